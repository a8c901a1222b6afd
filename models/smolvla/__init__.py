"""SmolVLA (arXiv 2506.01844) of lerobot: a small VLM with a flow-matching action expert.

Read ``options``, ``policy``, ``checkpoint``, then ``network``.
"""

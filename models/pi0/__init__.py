"""π₀ (arXiv 2410.24164) and π₀.₅ (2504.16054): a VLM with a flow-matching action expert.

Read ``options``, ``policy``, ``flow`` (sampling steps as pure functions), ``processor``,
``checkpoint``; then the network: ``network``, ``gemma``. ``real_time`` is for robots.
"""

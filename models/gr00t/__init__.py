"""GR00T N1.5 of NVIDIA: an Eagle 2.5 VLM whose features a diffusion transformer attends to.

Read ``options``, ``policy``, ``checkpoint``, then the network: ``network``, ``eagle``, ``dit``.
"""

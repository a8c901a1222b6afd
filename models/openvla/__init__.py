"""OpenVLA (arXiv 2406.09246; actions as language tokens) and OpenVLA-OFT (2502.19645; one pass).

Read ``options``, ``policy``, ``oft``; then ``actions``, ``processor`` and ``checkpoint``, all as in
the official code, and the network: ``prismatic``, ``vit``, ``decoding``.
"""

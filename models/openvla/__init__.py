"""OpenVLA (arXiv 2406.09246; actions as language tokens) and OpenVLA-OFT (2502.19645; one pass).

Read ``policy``, ``oft``; then ``actions``, ``processor`` and ``checkpoint``, all as in the official
code, and the network: ``prismatic``, ``vit``, ``decoding``.
"""

from .oft import OpenVLAOFTPolicy
from .policy import OpenVLAPolicy

__all__ = ["OpenVLAOFTPolicy", "OpenVLAPolicy"]

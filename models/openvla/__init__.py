"""OpenVLA (arXiv 2406.09246), discretised actions as language tokens, and OpenVLA-OFT (2502.19645), whole chunks in one pass."""

from .oft import OpenVLAOFTPolicy
from .policy import OpenVLAPolicy

__all__ = ["OpenVLAOFTPolicy", "OpenVLAPolicy"]

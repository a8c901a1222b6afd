"""OpenVLA (arXiv 2406.09246; actions as language tokens) and OpenVLA-OFT (2502.19645; one pass)."""

from .oft import OpenVLAOFTPolicy
from .policy import OpenVLAPolicy

__all__ = ["OpenVLAOFTPolicy", "OpenVLAPolicy"]

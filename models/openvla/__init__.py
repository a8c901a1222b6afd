"""OpenVLA (arXiv 2406.09246): discretised actions as language tokens."""

from .policy import OpenVLAPolicy

__all__ = ["OpenVLAPolicy"]

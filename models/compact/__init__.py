"""A small policy from images and proprioception: convolutions (or any timm backbone) and a Gaussian head."""

from .policy import CompactPolicy

__all__ = ["CompactPolicy"]

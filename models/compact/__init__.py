"""A small policy on images and proprioception: CNN (or any timm backbone) and a Gaussian head."""

from .policy import CompactPolicy

__all__ = ["CompactPolicy"]

"""Small models on images: a Gaussian policy with proprioception, and a success classifier.

Read ``policy``, ``encoder``; ``classifier`` is a reward plug-in, here for the encoder's sake.
"""

from .policy import CompactPolicy

__all__ = ["CompactPolicy"]

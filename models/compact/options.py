"""Recipe options of the compact policy and of the success classifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rlinf_vla.config.ranges import ImageSize, Label, Name, NonEmpty, Positive, Range


@dataclass
class CompactOptions:
    """Recipe node ``model.options``."""

    lora_targets: ClassVar[tuple[str, ...]] = ()
    random_weights: bool = False
    """Start from random weights; the checkpoint then needs only config.json."""
    images: list[Label] = field(default_factory=lambda: ["base"])
    """Cameras of the environment that the policy sees; all share one encoder. []: state alone."""
    encoder: Name = "conv"
    """Image encoder: ``conv`` (convolutions on patches), or ``timm:NAME`` for a backbone of timm
    from random weights, such as ``timm:resnet10t``."""
    reads_instruction: bool = False
    """See the words of the instruction, as a bag of ``WORDS`` kinds that they are hashed to. A
    checkpoint that does says so itself."""
    std: Positive = 0.5
    """Initial standard deviation of the actions."""


@dataclass
class ClassifierOptions:
    """Recipe node ``reward.options``."""

    checkpoint: str | None = None
    """Directory of a trained classifier; null creates a new one, to be trained."""
    image_size: ImageSize = 64
    """Side length of the input images in pixels, for a new classifier."""
    images: Annotated[list[Label], NonEmpty()] = field(default_factory=lambda: ["base"])
    """Cameras of the environment to classify from; all share one encoder."""
    encoder: Name = "conv"
    """Image encoder, from random weights: ``conv``, or ``timm:NAME`` for a backbone of timm."""
    threshold: Annotated[float, Range(0, 1, above=True, below=True)] = 0.5
    """Probability of success above which the reward is 1; otherwise it is 0."""
    ends_episode: bool = True
    """End the episode when the classifier reports success, as needed on a real robot."""

"""Recipe options of the compact policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rlinf_vla.config.ranges import Label, Name, Positive


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
    std: Positive = 0.5
    """Initial standard deviation of the actions."""

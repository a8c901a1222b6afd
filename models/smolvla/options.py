"""Recipe options of SmolVLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.config.ranges import Range

from ..flow_options import FlowOptions


@dataclass
class SmolVLAOptions(FlowOptions):
    """Recipe node ``model.options``."""

    denoise_steps: Annotated[int, Range(1, 1000)] | None = None  # type: ignore[assignment]
    """Number of denoising steps per chunk; null: ``num_steps`` of config.json."""

"""Recipe options of SmolVLA."""

from __future__ import annotations

from dataclasses import dataclass

from ..flow_options import FlowOptions


@dataclass
class SmolVLAOptions(FlowOptions):
    """Recipe node ``model.options``."""

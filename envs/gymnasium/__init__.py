"""Any gymnasium environment: ``plugin`` is what the entry point names. Importing this does not import gymnasium."""

from __future__ import annotations

from .config import GymnasiumConfig
from .plugin import Gymnasium

__all__ = ["Gymnasium", "GymnasiumConfig", "plugin"]

plugin = Gymnasium()

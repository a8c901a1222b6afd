"""gymnasium plug-in; the entry point names ``plugin``. Does not import gymnasium."""

from __future__ import annotations

from .config import GymnasiumConfig
from .plugin import Gymnasium

__all__ = ["Gymnasium", "GymnasiumConfig", "plugin"]

plugin = Gymnasium()

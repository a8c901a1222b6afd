"""Genesis plug-in; the entry point names ``plugin``. Does not import Genesis."""

from __future__ import annotations

from .config import GenesisConfig
from .plugin import Genesis

__all__ = ["Genesis", "GenesisConfig", "plugin"]

plugin = Genesis()

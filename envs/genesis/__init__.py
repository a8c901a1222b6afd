"""Genesis: ``plugin`` is what the entry point names. Importing this does not import Genesis."""

from __future__ import annotations

from .config import GenesisConfig
from .plugin import Genesis

__all__ = ["Genesis", "GenesisConfig", "plugin"]

plugin = Genesis()

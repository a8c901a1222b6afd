"""LIBERO plug-in; the entry point names ``plugin``. Imports neither LIBERO nor MuJoCo."""

from __future__ import annotations

from .config import LiberoConfig
from .plugin import Libero

__all__ = ["Libero", "LiberoConfig", "plugin"]

plugin = Libero()

"""What the planner does for training runs (``runtime/hooks.py``)."""

from __future__ import annotations

from rlinf_vla.features.planner.dry_run import choose_rows
from rlinf_vla.features.planner.monitor import planned

__all__ = ["choose_rows", "planned"]

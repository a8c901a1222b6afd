"""What a simulator plug-in says of its tasks and of this machine, without PyTorch.

``rlinf-vla list`` imports the plug-ins, so they import PyTorch and simulators on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EVALUATION_SEEDS = range(1 << 20)
"""Seeds of evaluation episodes, and of no others (see ``rollout/episodes.py``)."""


@dataclass(frozen=True)
class Diagnosis:
    """A check of ``rlinf-vla doctor``. ``fix``: what to do unless ``ok``; ``repair``: does it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    repair: Callable[[], None] | None = None


@dataclass(frozen=True)
class Task:
    """A task of a simulator, as ``rlinf-vla list`` shows it."""

    name: str
    instruction: str
    available: bool
    """False where files are missing; ``note`` says which."""
    has_expert: bool
    note: str = ""


@dataclass(frozen=True)
class Suite:
    """Part of an evaluation sweep: the tasks that share one set of vector environments."""

    name: str
    tasks: tuple[str, ...]
    """``EnvSpec.tasks`` of these environments."""
    config: Any
    """The ``env`` node that creates them."""

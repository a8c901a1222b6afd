"""Find plug-ins by entry point, and import one when it is named.

This is the engine's only access to models, simulators, rewards and robots.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from rlinf_vla.config.errors import UserError

if TYPE_CHECKING:  # PyTorch takes a second to import, and `rlinf-vla list` needs none
    from rlinf_vla.core.protocols import EnvPlugin, Policy, RewardPlugin


logger = logging.getLogger(__name__)


def models() -> Mapping[str, type[Policy]]:
    return Installed("rlinf_vla.models")


def model_options() -> Mapping[str, Any]:
    """Return name -> ``Config`` of the models that also register it, in a module without PyTorch.
    It then has the model's ``lora_targets``, for ``rlinf-vla list models``."""
    return Installed("rlinf_vla.model_options")


def envs() -> Mapping[str, EnvPlugin]:
    return Installed("rlinf_vla.envs")


def rewards() -> Mapping[str, RewardPlugin]:
    return Installed("rlinf_vla.rewards")


def robots() -> Mapping[str, Any]:
    """Return name -> ``features.realworld.robot.RobotPlugin``."""
    return Installed("rlinf_vla.robots")


def algorithms() -> Mapping[str, Any]:
    """Return name -> ``algorithms.base.Algorithm`` subclass."""
    return Installed("rlinf_vla.algorithms")


def operators() -> Mapping[str, Any]:
    """Return name -> ``features.realworld.robot.OperatorPlugin``."""
    return Installed("rlinf_vla.operators")


def verbs() -> Mapping[str, Any]:
    """Return name -> ``core.verb.Verb`` of the features beside the trainer."""
    return Installed("rlinf_vla.verbs")


def dry_runs() -> Mapping[str, Any]:
    """Return verb -> what runs it with ``--dry-run``."""
    return Installed("rlinf_vla.dry_runs")


def hook(name: str) -> Any:
    """Return what a feature does for the trainer (``runtime/hooks.py``).

    Raises UserError if its entry point is missing.
    """
    hooks = Installed("rlinf_vla.hooks")
    if name not in hooks:
        raise UserError(f"the entry point {name} of rlinf-vla is missing: install it once more")
    return hooks[name]


class Installed(Mapping[str, Any]):
    """Plug-ins of an entry-point group by name, sorted; a value is imported when it is read."""

    def __init__(self, group: str) -> None:
        points = sorted(
            _entry_points(tuple(sys.path)).select(group=group), key=lambda point: point.name
        )
        self._points: dict[str, EntryPoint] = {point.name: point for point in points}

    def __getitem__(self, name: str) -> Any:
        logger.debug("%s %s is %s", self._points[name].group, name, self._points[name].value)
        return self._points[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)


@lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> Any:
    """Read all packages on the import path once: a command looks plug-ins up dozens of times."""
    return entry_points()


def nearest(word: str, known: list[str]) -> str:
    """Return ``; did you mean X?`` if a known word is close, else an empty string."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def choose(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return ``known[name]``. Raises UserError with the nearest name if it is not installed."""
    if name not in known:
        raise UserError(
            f"{kind}={name} is not known{nearest(name, list(known))} (installed: {', '.join(known) or 'none'})"
        )
    return known[name]

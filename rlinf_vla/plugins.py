"""Plug-ins by entry point: the only place where the engine meets a model or a simulator."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import Any

from rlinf_vla.protocols import EnvPlugin, Policy, RewardPlugin
from rlinf_vla.robot import PersonPlugin, RobotPlugin
from rlinf_vla.types import UserError


def models() -> dict[str, type[Policy]]:
    return _load("rlinf_vla.models")


def envs() -> dict[str, EnvPlugin]:
    return _load("rlinf_vla.envs")


def rewards() -> dict[str, RewardPlugin]:
    return _load("rlinf_vla.rewards")


def robots() -> dict[str, RobotPlugin]:
    return _load("rlinf_vla.robots")


def people() -> dict[str, PersonPlugin]:
    return _load("rlinf_vla.people")


def _load(group: str) -> dict[str, Any]:
    return {point.name: point.load() for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def nearest(word: str, known: list[str]) -> str:
    """``; did you mean X?`` where some known word is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def choose(kind: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UserError(f"{kind}={name} is not known{nearest(name, list(known))} (installed: {', '.join(known) or 'none'})")
    return known[name]

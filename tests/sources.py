"""The repository's own Python files, each read and parsed once per process, and the order of imports between its rooms."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN_PACKAGES = ("models", "envs", "rewards", "robots")
DATA = ("recipes", "assets")
FEATURES = ("planner", "realworld", "serving", "sweeps", "view")
"""Rooms beside the trainer, in ``features``."""
FOR_PLUGINS = {"config", "core"}
"""Rooms that a plug-in package may import."""
FOR_SOME = {"robots": {"realworld"}, "models": {"serving"}}
"""More rooms for these: what a robot is, and the client of a policy server for ``models/remote``."""

BASE = {"config", "core"}
PLAYING = {"rollout", "training", "telemetry"}
MAY_IMPORT = {
    "config": set[str](),
    "core": {"config"},
    "algorithms": BASE,
    "telemetry": BASE,
    "data": BASE | {"algorithms"},
    "training": BASE | {"algorithms"},
    "rollout": BASE | {"algorithms", "data"},
    "runtime": BASE | {"algorithms", "data"} | PLAYING,
    "evaluation": BASE | {"algorithms", "runtime"} | PLAYING,
    "cli": BASE | {"algorithms", "data", "evaluation", "runtime"} | PLAYING,
    "planner": BASE | {"algorithms", "runtime"} | PLAYING,
    "realworld": BASE | {"algorithms", "cli", "data", "evaluation", "runtime"} | PLAYING,
    "serving": BASE | {"algorithms", "runtime"} | PLAYING,
    "sweeps": BASE | {"algorithms", "evaluation", "runtime"} | PLAYING,
    "view": BASE | {"data", "evaluation", "runtime", "sweeps", "telemetry"},
    "testing": BASE | {"algorithms", "cli", "realworld", "rollout", "telemetry"},
}
"""{cli, planner, serving, view -> sweeps} -> evaluation -> runtime -> {rollout, training, telemetry} -> {data} ->
algorithms -> core -> config, and never back up; realworld may import cli. Lazy and TYPE_CHECKING imports count. Nothing
imports testing. The trainer finds features by entry points (``runtime/hooks.py``, ``cli/verbs.py``)."""


def modules(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def name_of(path: Path) -> str:
    """As it appears in a test's message."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(text(path))))


def package_of(path: Path) -> tuple[str, ...]:
    """The package that a module is installed in."""
    parts = path.relative_to(ROOT).parent.parts if path.is_relative_to(ROOT) else ()
    inside = parts and parts[0] in (*PLUGIN_PACKAGES, "features", "benchmarks")
    return ("rlinf_vla", *parts) if inside else parts


@functools.cache
def import_pairs(path: Path) -> frozenset[tuple[str, str]]:
    """(absolute name of a module, what is imported from it or "") of each import of a file, at its
    top or inside its functions."""
    package = package_of(path)
    found = set[tuple[str, str]]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found.update((".".join(base), alias.name) for alias in node.names)
    return frozenset(found)


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Absolute names of what a module imports; of the package itself, its rooms."""
    return frozenset(
        f"rlinf_vla.{name}" if base == "rlinf_vla" else base
        for base, name in import_pairs(path)
        if base != "rlinf_vla" or not name.startswith("__")
    )


def absolute_names(path: Path) -> Iterator[str]:
    """What a module imports by absolute names, each with the imported name appended."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(path: Path) -> set[str]:
    """The parts of the project that a module imports."""
    return {_room_of(name.split(".")) for name in imported(path) if name.startswith("rlinf_vla.")}


def room(path: Path) -> str:
    """The part of the trainer, or the feature, to which a module belongs."""
    return _room_of((*package_of(path), path.stem))


def _room_of(name: Sequence[str]) -> str:
    return name[2] if name[1] == "features" and len(name) > 2 else name[1]

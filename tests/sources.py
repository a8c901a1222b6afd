"""The repository's own Python files, each read and parsed once per process, and the order of imports between its rooms."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN_PACKAGES = ("models", "envs", "rewards", "robots")
DATA = ("recipes", "assets")
FOR_PLUGINS = {"config", "core"}
"""Rooms of the engine that a plug-in package may import."""

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
    "planner": BASE | {"algorithms", "runtime"} | PLAYING,
    "serving": BASE | {"algorithms", "runtime"} | PLAYING,
    "realworld": BASE | {"algorithms", "data", "evaluation", "runtime"} | PLAYING,
    "view": BASE | {"data", "evaluation", "runtime", "telemetry"},
    "cli": BASE
    | {"algorithms", "data", "evaluation", "planner", "realworld", "runtime", "serving", "view"}
    | PLAYING,
    "testing": BASE | {"algorithms", "cli", "rollout", "telemetry"},
}
"""cli -> {planner, realworld, serving, view} -> evaluation -> runtime -> {rollout, training, telemetry} -> {data} ->
algorithms -> core -> config, and never back up. Lazy and TYPE_CHECKING imports count. Nothing imports testing."""


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
    inside = parts and parts[0] in (*PLUGIN_PACKAGES, "benchmarks")
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
    return {name.split(".")[1] for name in imported(path) if name.startswith("rlinf_vla.")}


def room(path: Path) -> str:
    """The part of the engine to which a module belongs."""
    return path.relative_to(ROOT / "rlinf_vla").parts[0].removesuffix(".py")

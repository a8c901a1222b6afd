"""The lane of a test file: *pure*, or *machine* for what depends on the machine's processes, signals, sockets or clocks.

It follows from the source of the file and of the helpers in ``tests`` that it imports. tests/purity.py refuses what a pure
test may not do.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.sources import PLUGIN_PACKAGES, ROOT, absolute_names, imported, modules, nodes

PURE, MACHINE = "pure", "machine"
IMPORTS = {
    "subprocess",
    "multiprocessing",
    "ray",
    "signal",
    "socket",
    "threading",
    "asyncio",
    "concurrent",
    "http",
    "urllib",
}
NAMES = {"time.sleep", "os.kill", "os.killpg", "os.fork", "os.posix_spawn", "pytester", "Clock()"}
"""Attributes, arguments and calls."""
SIMULATORS = {f"pytest.mark.{mark}" for mark in ("simulator", "realtime", "genesis")}
MARKS = SIMULATORS | {"pytest.mark.machine"}
SEVERAL = SIMULATORS | {"multiprocessing", "ray"}
"""Signs of a file that starts several processes at once: simulators, ranks, workers."""
REPORTS = "rlinf_vla.telemetry.environment"
"""Of the modules of the code that start processes, the one that only asks git and nvidia-smi, whose answers no test waits for long."""


def file_of(name: str) -> str:
    """The file of a test, relative to the repository's root."""
    return name.partition("::")[0]


def named(path: Path) -> set[str]:
    """Full names of modules and of what is imported from them."""
    return {*absolute_names(path), *imported(path)}


@functools.cache
def processes_of_the_code() -> frozenset[str]:
    """Modules of the code that themselves import what starts processes or opens sockets."""
    found = set()
    for path in modules("rlinf_vla", "features", "benchmarks", *PLUGIN_PACKAGES):
        if {name.partition(".")[0] for name in imported(path)} & {
            "subprocess",
            "multiprocessing",
            "ray",
            "socket",
        }:
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.add(
                ".".join(parts if parts[0] == "rlinf_vla" else ("rlinf_vla", *parts)).removesuffix(
                    ".__init__"
                )
            )
    return frozenset(found - {REPORTS})


def helpers(path: Path) -> Iterator[Path]:
    """Files in ``tests`` that a file imports: as ``tests.name``, or by the bare name of a neighbour."""
    for name in named(path):
        parts = name.split(".")
        places = (
            [ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])]
            if parts[0] == "tests"
            else [path.parent / parts[0]]
        )
        yield from (
            place.with_suffix(".py") for place in places if place.with_suffix(".py").is_file()
        )


@functools.cache
def read_with(path: Path) -> tuple[Path, ...]:
    """The file and its helpers, and theirs."""
    found = [path]
    for each in found:
        found.extend(set(helpers(each)) - set(found))
    return tuple(found)


@functools.cache
def signs(path: Path) -> frozenset[str]:
    """What in one file shows that it is no pure one."""
    tops = {name.partition(".")[0] for name in imported(path)}
    used = {ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Attribute)}
    used |= {node.arg for node in nodes(path) if isinstance(node, ast.arg)}
    used |= {
        f"{node.func.id}()"
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return frozenset(
        tops & IMPORTS | used & (NAMES | MARKS) | named(path) & processes_of_the_code()
    )


@functools.cache
def lane(path: Path) -> str:
    return MACHINE if any(map(signs, read_with(path))) else PURE


@functools.cache
def starts_several(path: Path) -> bool:
    """Whether a file of the machine lane is process-heavy."""
    return any(signs(each) & SEVERAL for each in read_with(path))

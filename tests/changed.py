"""Runs the tests that can see a change: ``python tests/changed.py [--list] [COMMIT]`` (``make test-changed``).

A change is what differs from ``COMMIT`` (default: ``origin/main``, else the last commit), and new files. A test file sees
its own file and its helpers, the rooms that these import, and what those rooms may import (the table that
tests/test_structure.py keeps). Plug-ins and recipes are seen by whoever sees ``runtime``, which loads them.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lanes import named, read_with  # noqa: E402
from tests.sources import (  # noqa: E402  # noqa: E402
    DATA,
    FEATURES,
    FOR_PLUGINS,
    FOR_SOME,
    MAY_IMPORT,
    PLUGIN_PACKAGES,
    nodes,
    rooms,
    text,
)

ALWAYS = ("tests/test_structure.py", "tests/test_documentation.py", "tests/test_mutants.py")
"""They read the files of the repository."""
LOADED = {*PLUGIN_PACKAGES, *DATA, "benchmarks"}
"""What is found through entry points or by name."""
LOADS = {"runtime": LOADED | {"serving"}, "cli": LOADED | set(FEATURES)}
"""What the code of a room finds so: plug-ins and recipes, a policy server's backbone, and verbs."""
COMMON = {"pyproject.toml", "constraints.txt", "Makefile"}
"""With tests/conftest.py and the files that it imports: every test depends on them."""


def below(room: str) -> set[str]:
    """A room and all that its code may run."""
    found = {room} | (FOR_PLUGINS | FOR_SOME.get(room, set()) if room in PLUGIN_PACKAGES else set())
    pending = list(found)
    for each in pending:
        lower = MAY_IMPORT.get(each, set()) - found
        found |= lower
        pending += lower
    return found.union(*(LOADS[each] for each in found & LOADS.keys()))


@functools.cache
def mentioned(path: Path) -> frozenset[str]:
    """Rooms that a file names in its texts: of programs that it starts."""
    docstrings = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    ]
    found = {
        room
        for each in texts
        if isinstance(each, str)
        for room in re.findall(r"\brlinf_vla\.(?:features\.)?(\w+)", each)
    }
    return frozenset(
        found | {"cli" for each in texts if isinstance(each, str) and "rlinf-vla" in each}
    )


def suites(path: Path) -> Iterator[Path]:
    """Files of ``rlinf_vla.testing`` that a file imports: helpers, which import other rooms file by file."""
    for name in named(path):
        parts = name.split(".")
        for place in (ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])):
            if parts[:2] == ["rlinf_vla", "testing"] and place.with_suffix(".py").is_file():
                yield place.with_suffix(".py")


@functools.cache
def with_helpers(test: Path) -> tuple[Path, ...]:
    """A test file, the conftest.py files of its folders, and what they import of ``tests`` and ``rlinf_vla.testing``."""
    conftests = [
        folder / "conftest.py"
        for folder in test.parents
        if folder.is_relative_to(ROOT / "tests") and folder != ROOT / "tests"
    ]
    found = [helper for path in (test, *conftests) if path.exists() for helper in read_with(path)]
    for path in found:
        found += [each for each in suites(path) if each not in found]
    return tuple(found)


@functools.cache
def seen(test: Path) -> set[str]:
    """Rooms whose change a test file may see."""
    direct = {room for path in with_helpers(test) for room in (*rooms(path), *mentioned(path))}
    return set[str]().union(*map(below, direct - {"testing"}))


def changed(commit: str) -> list[str]:
    def git(*arguments: str) -> list[str]:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    return sorted(
        {*git("diff", "--name-only", commit), *git("ls-files", "--others", "--exclude-standard")}
    )


def room_of(name: str) -> str | None:
    """Where a changed file of the code or of its data belongs."""
    parts = Path(name).parts
    if parts[0] in ("rlinf_vla", "features"):
        return parts[1].removesuffix(".py") if len(parts) > 1 else None
    return parts[0] if parts[0] in LOADED else None


def selected(changes: Iterable[str]) -> list[str]:
    """Test files that can see one of the changed files."""
    changes = set(changes)
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    common = COMMON | {
        str(path.relative_to(ROOT)) for path in read_with(ROOT / "tests" / "conftest.py")
    }
    if changes & common:
        return [str(test.relative_to(ROOT)) for test in tests]
    touched = {room for name in changes if (room := room_of(name))}
    tools = {Path(name).stem for name in changes if name.startswith(("tools/", "studies/"))}
    found = []
    for test in tests:
        name = str(test.relative_to(ROOT))
        own = {str(path.relative_to(ROOT)) for path in with_helpers(test)}
        of_a_tool = any(re.search(rf"\b{tool}\b", text(test)) for tool in tools)
        if (
            name in ALWAYS
            or own & changes
            or seen(test) & touched
            or of_a_tool
            or any(is_data_of(test, change) for change in changes)
        ):
            found.append(name)
    return found


def is_data_of(test: Path, change: str) -> bool:
    """Whether a changed file is in a folder beside a test file, as ``fixtures`` are."""
    folder = test.parent.relative_to(ROOT)
    return (
        folder != Path("tests") and folder in Path(change).parents and Path(change).parent != folder
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", help="what to compare with")
    parser.add_argument("--list", action="store_true", help="print the files, run nothing")
    arguments = parser.parse_args()
    known = (
        subprocess.run(
            ["git", "rev-parse", "-q", "--verify", "origin/main"], cwd=ROOT, capture_output=True
        ).returncode
        == 0
    )
    changes = changed(arguments.commit or ("origin/main" if known else "HEAD"))
    tests = selected(changes)
    print(f"{len(changes)} changed files, {len(tests)} test files that can see them", flush=True)
    if arguments.list:
        print("\n".join(tests))
        return 0
    return subprocess.run([sys.executable, "tests/run.py", *tests], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Mutation testing: checks that each listed mistake fails the tests that are directly about it.

``tests/mutants/*.toml`` lists mutants, mistakes in the code: the file, the exact text, and the wrong text that replaces it.
For each of them the tests that it names run on a copy of the tree in which that one text is exchanged, and must fail. The list is made by
hand: it contains common mistakes (a wrong sign, bound, axis, mask, network, seed) and none that cannot be observed.

    python tests/mutate.py --page docs/results/mutants.md     # all (make mutants)
    python tests/mutate.py soft_trainer                       # those whose path or description contains that
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix("").with_name("mutants")
CODE = ("rlinf_vla", "features", "benchmarks", "models", "envs", "rewards", "robots")
"""The copied packages; all but the first are installed inside the first."""
LINKED = ("recipes", "assets", "docs", "README.md", "Makefile", "constraints.txt")
KILLED = 1
SURVIVED = 0
ELSEWHERE = 99
LATE = 98
"""Exit codes: pytest's; the copy was not what the tests imported; it took longer than LIMIT_S."""
LIMIT_S = 300
SLOW_TO_IMPORT = [
    "torch._dynamo",
    "pytest",
    "hypothesis.strategies",
    "hydra",
    "omegaconf",
    "pyarrow.parquet",
    "av",
    "safetensors.torch",
]
"""Slow imports, done once instead of for every mutant. No module of the project is among them."""
WANTED = 0.95


@dataclass(frozen=True)
class Mutant:
    """``survived_before``: the tests at commit 24b5cdf, before this list, are known not to detect it."""

    path: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]
    survived_before: bool = False

    def applied(self, root: Path) -> str:
        """The text of the file with the mistake. Raises ValueError unless the right text occurs exactly once."""
        text = (root / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.path}: {self.what!r}: its text occurs {text.count(self.old)} times, not once: bring tests/mutants up to date"
            )
        return text.replace(self.old, self.new)


def listed() -> list[Mutant]:
    found = []
    for file in sorted(LIST.glob("*.toml")):
        for module in tomllib.loads(file.read_text())["module"]:
            for each in module["mutant"]:
                tests = tuple(each.pop("tests", module["tests"]))
                found.append(Mutant(path=module["path"], tests=tests, **each))
    return found


def copied(target: Path, tests: Path) -> Path:
    """The tree as it is when installed, in ``target``: there, the plug-in packages are inside ``rlinf_vla``."""
    for name in CODE:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, folder in (
        ("tests", tests),
        ("tools", ROOT / "tools"),
        ("studies", ROOT / "studies"),
    ):
        shutil.copytree(folder, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    for name in LINKED:
        (target / name).symlink_to(ROOT / name)
    for name in (*CODE[1:], "recipes", "assets"):
        (target / "rlinf_vla" / name).symlink_to(Path("..", name))
    return target


def run_tests(copy: Path, path: str | None, tests: Sequence[str], log: Path) -> None:
    """In a separate process; exits with pytest's code. The copy precedes the installed package, also in child processes.

    The nightly tests of a file do not run, but those that are named do.
    """
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [
        str(copy),
        *(each for each in sys.path if Path(each).resolve() not in (ROOT, ROOT / "tests")),
    ]
    import pytest

    marks = "" if all("::" in test for test in tests) else "not nightly"
    options = ["-x", "-q", "-n", "0", "-m", marks, "-p", "no:cacheprovider", "--timeout", "120"]
    options += ["--hypothesis-profile", "without shrinking"]
    options += [
        "-W",
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    ]  # what is preloaded
    code = int(pytest.main([*options, *tests]))
    name = "" if path is None else ".".join(Path(path).with_suffix("").parts)
    module = sys.modules.get(name if name.startswith("rlinf_vla") else f"rlinf_vla.{name}")
    imported = path is None or (
        module is not None and Path(str(module.__file__)).resolve() == (copy / path).resolve()
    )
    sys.stdout.flush()
    os._exit(code if imported else ELSEWHERE)


class Campaign:
    """Runs on ``workers`` copies at a time."""

    def __init__(self, workers: int, tests: Path = ROOT / "tests") -> None:
        self._workers = workers
        self._tests = tests
        self._copies: Queue[Path] = Queue()
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }  # as in conftest.py, which is too late for what is preloaded
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(SLOW_TO_IMPORT)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Campaign]:
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            for number in range(self._workers):
                self._copies.put(copied(Path(scratch, str(number)), self._tests))
            yield self

    def run(self, tests: Sequence[str], mutant: Mutant | None = None) -> tuple[int, str]:
        """The exit code of these tests, with the mistake if there is one, and what they printed."""
        copy = self._copies.get()
        log = copy / "log"
        path = None if mutant is None else copy / mutant.path
        right = None if path is None else path.read_text()
        try:
            if mutant is not None and path is not None:
                path.write_text(mutant.applied(copy))
            process = self._processes.Process(
                target=run_tests, args=(copy, mutant and mutant.path, tests, log)
            )
            process.start()
            process.join(LIMIT_S)
            if process.exitcode is None:
                process.kill()
                process.join()
                return LATE, log.read_text()
            return process.exitcode, log.read_text()
        finally:
            if path is not None and right is not None:
                path.write_text(right)
            self._copies.put(copy)

    def judged(self, mutant: Mutant) -> int:
        started = time.monotonic()
        code, printed = self.run(mutant.tests, mutant)
        if code == LATE:  # it hangs, which counts as detected
            code = KILLED
        said = {
            KILLED: "killed",
            SURVIVED: "SURVIVED",
            ELSEWHERE: "ERROR: the tests do not import this file",
        }
        print(
            f"{said.get(code, f'ERROR {code}'):9} {time.monotonic() - started:5.1f} s  {mutant.path}: {mutant.what}",
            flush=True,
        )
        if code not in (KILLED, SURVIVED):
            print(printed[-3000:], flush=True)
        return code


def page(mutants: Sequence[Mutant], codes: Sequence[int], seconds: float) -> str:
    from rlinf_vla.telemetry.environment import (
        fingerprint,
    )  # here: mutants are imported from a copy, by processes that read this file

    killed = codes.count(KILLED)
    total = len(codes)
    machine = fingerprint()
    lines = [
        "# Mutants",
        "",
        f"`make mutants`, {date.today()}: {machine['cores']} cores of {machine['cpu']}, {platform.system()}; {seconds / 60:.0f} minutes.",
        "",
        "A mutant is the code with one mistake in it: a wrong sign, bound, axis, mask, network or seed. It is",
        "killed when the tests that are directly about that code fail. The list (`tests/mutants/`) is made by",
        "hand; it holds no mutants that change nothing observable. A general tool (mutmut 3.8.1) makes 10160",
        "mutants of these files. Their tests would take more than a day, many of them change a message, and",
        "such mistakes as a target from the wrong network are not among them.",
        "",
        f"**{killed} of {total} killed ({100 * killed / total:.1f} %).** Wanted: {100 * WANTED:.0f} %.",
        "Survived before: shown not to be noticed by the tests that were directly about it at commit 24b5cdf.",
        "Not all were tried on those tests: only what an earlier campaign had listed, or survived at first.",
        "",
        "| file | mutants | killed | survived | survived before |",
        "|---|---|---|---|---|",
    ]
    for path in dict.fromkeys(each.path for each in mutants):
        of_file = [
            (mutant, code)
            for mutant, code in zip(mutants, codes, strict=True)
            if mutant.path == path
        ]
        found = [sum(code == wanted for _, code in of_file) for wanted in (KILLED, SURVIVED)]
        before = sum(mutant.survived_before for mutant, _ in of_file)
        lines.append(f"| `{path}` | {len(of_file)} | {found[0]} | {found[1]} | {before} |")
    before = sum(mutant.survived_before for mutant in mutants)
    lines.append(f"| all | {total} | {killed} | {codes.count(SURVIVED)} | {before} |")
    lines += ["", "## Survived before", ""]
    lines += [f"* `{mutant.path}`: {mutant.what}" for mutant in mutants if mutant.survived_before]
    lines += ["", "## Survive now", ""]
    alive = [
        f"* `{mutant.path}`: {mutant.what}"
        for mutant, code in zip(mutants, codes, strict=True)
        if code == SURVIVED
    ]
    return "\n".join([*lines, *(alive or ["None."])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "some", nargs="*", help="only mutants whose path or description contains one of these"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path, help="write the result there")
    arguments = parser.parse_args()
    mutants = [
        each
        for each in listed()
        if not arguments.some or any(some in f"{each.path} {each.what}" for some in arguments.some)
    ]
    for mutant in mutants:
        mutant.applied(ROOT)
    started = time.monotonic()
    with (
        Campaign(arguments.workers).opened() as campaign,
        ThreadPoolExecutor(arguments.workers) as pool,
    ):
        every = sorted({test for mutant in mutants for test in mutant.tests})
        named = [test for test in every if "::" in test]
        files = [test for test in every if test not in named]
        parts = [
            tests[first :: arguments.workers]
            for tests in (named, files)
            for first in range(min(arguments.workers, len(tests)))
        ]
        for code, printed in pool.map(campaign.run, parts):
            if code:
                print(f"the tests fail without any mutant:\n{printed[-3000:]}")
                return 1
        codes = list(pool.map(campaign.judged, mutants))
    killed = codes.count(KILLED)
    print(f"{killed} of {len(codes)} killed in {(time.monotonic() - started) / 60:.0f} min")
    if arguments.page:
        arguments.page.write_text(page(mutants, codes, time.monotonic() - started))
    return 0 if killed >= WANTED * len(codes) and set(codes) <= {KILLED, SURVIVED} else 1


if __name__ == "__main__":
    sys.exit(main())

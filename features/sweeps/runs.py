"""List, compare and prune the runs in runs/: ``rlinf-vla runs [list|compare|prune]``."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf_vla.config.arguments import Parser
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import MODES, flat
from rlinf_vla.core import plugins
from rlinf_vla.core.io import read_json, step_of
from rlinf_vla.features.sweeps.compare import comparison, episodes_at, print_comparison
from rlinf_vla.runtime import run_directory
from rlinf_vla.runtime.run_directory import (
    CHECKPOINTS,
    EPISODES,
    RECIPE,
    RUNS,
    held,
    is_sweep,
    saved_recipe,
)
from rlinf_vla.runtime.run_names import all_runs, named
from rlinf_vla.telemetry.console import duration
from rlinf_vla.telemetry.metrics import read_metrics
from rlinf_vla.telemetry.run_files import CONTROL_FILE
from rlinf_vla.telemetry.tables import JSON, print_json, print_table
from rlinf_vla.training.checkpoint_files import complete_checkpoints

RUNNING = "running"
FINISHED = "finished"
INTERRUPTED = "interrupted"
DAMAGED = "damaged"
BEFORE, AFTER = "before", "after"
OF_A_DIRECTORY = {"run_dir", "resume"}
"""Keys that differ between equal runs."""


@dataclass(frozen=True)
class Run:
    """A run as it is listed. ``size``: bytes. ``age_s``: seconds since it last wrote.

    ``iterations``: up to its newest complete checkpoint, of ``of_iterations``. ``success``: of
    ``before`` and ``after`` training, percent with its 95 % interval, in the first mode evaluated.
    """

    name: str
    recipe: str
    status: str
    iterations: int
    of_iterations: int
    success: dict[str, Any]
    size: int
    age_s: float

    def row(self) -> tuple[str, ...]:
        done = f"{self.iterations}/{self.of_iterations}" if self.of_iterations else ""
        gain = " → ".join(
            "{:.1f} ({:.1f} to {:.1f}) %".format(*self.success[name])
            for name in (BEFORE, AFTER)
            if name in self.success
        )
        return self.name, self.status, done, gain, megabytes(self.size), age(self.age_s)


def run(arguments: Sequence[str]) -> None:
    """Carry out ``list`` (the default), ``compare A B`` or ``prune``. Raises UserError."""
    verb, rest = (
        (arguments[0], arguments[1:])
        if arguments and not arguments[0].startswith("-")
        else ("list", arguments)
    )
    if verb not in VERBS:
        raise UserError(
            f"runs {verb}: no such command{plugins.nearest(verb, list(VERBS))} (commands: {', '.join(VERBS)})"
        )
    VERBS[verb](rest)


def _parser(verb: str) -> Parser:
    parser = Parser(f"runs {verb}")
    parser.add_argument(JSON, action="store_true")
    return parser


def list_runs(arguments: Sequence[str]) -> None:
    """Print the runs in runs/, or those of one recipe."""
    parser = _parser("list")
    parser.add_argument("recipe", nargs="?")
    options = parser.parse_args(arguments)
    runs = [described(path) for path in all_runs() if options.recipe in (None, path.parent.name)]
    if options.json:
        print_json([asdict(run) for run in runs])
    elif runs:
        print_table(
            ("run", "status", "iterations", "success before → after (95 %)", "size", "age"),
            [run.row() for run in runs],
        )
    else:
        print(
            f"no runs in {RUNS.absolute()}"
            + (f" of recipe {options.recipe}" if options.recipe else "")
        )


def described(directory: Path) -> Run:
    """Describe the run in ``directory``; it is DAMAGED if its recipe cannot be read."""
    try:
        recipe = saved_recipe(directory)
    except UserError:
        recipe = {}
    checkpoints = complete_checkpoints(directory / CHECKPOINTS)
    done = (step_of(checkpoints[-1].name) or 0) if checkpoints else 0
    total = 0 if is_sweep(directory) else int(recipe.get("iterations") or 0)
    files = list(_files(directory))
    written = max((file.st_mtime for file in files), default=time.time())
    evaluations = {name: _evaluation(directory, name) for name in (BEFORE, AFTER)}
    success = {
        name: rates for name, document in evaluations.items() if (rates := _success(document))
    }
    name = str(directory.relative_to(RUNS)) if directory.is_relative_to(RUNS) else str(directory)
    size = sum(file.st_size for file in files)
    seconds = max(0.0, time.time() - written)
    enough = (
        0 < total <= done or evaluations[AFTER].get("checkpoint") == f"iteration {done}"
    )  # session.minutes may end it early
    status = _status(directory, enough) if recipe else DAMAGED
    return Run(
        name,
        str(recipe.get("name", directory.parent.name)),
        status,
        done,
        total,
        success,
        size,
        seconds,
    )


def _status(directory: Path, enough: bool) -> str:
    with held(directory) as idle:
        if not idle:
            return RUNNING
    if is_sweep(directory):
        return FINISHED if (directory / run_directory.RESULT).exists() else INTERRUPTED
    return (
        FINISHED if enough or _at_robot(directory) else INTERRUPTED
    )  # at a robot a person ends it when it is enough


def _at_robot(directory: Path) -> bool:
    return any((directory / name).exists() for name in (EPISODES, CONTROL_FILE))


def _evaluation(directory: Path, name: str) -> dict[str, Any]:
    """Return a recorded evaluation; empty if there is none or it cannot be read."""
    try:
        evaluation = read_json(run_directory.evaluation_file(directory, name))
    except (OSError, ValueError):
        return {}
    return evaluation if isinstance(evaluation, dict) else {}


def _success(document: dict[str, Any]) -> tuple[float, float, float] | None:
    for mode in MODES:
        if mode in document:
            return document[mode]["pc_success"], *document[mode]["pc_success_ci95"]
    return None


def compare_runs(arguments: Sequence[str]) -> None:
    """Print the keys in which two runs differ, their last metrics, and their evaluations."""
    parser = _parser("compare")
    parser.add_argument("runs", nargs=2, metavar="RUN")
    options = parser.parse_args(arguments)
    paths = [
        Path(argument) if (Path(argument) / RECIPE).exists() else named(argument)
        for argument in options.runs
    ]
    names = list(map(str, paths))
    if names[0] == names[1]:
        raise UserError(f"runs compare: {names[0]} is given twice, give two runs")
    keys = _differences(
        [
            {k: v for k, v in flat(saved_recipe(path)).items() if k not in OF_A_DIRECTORY}
            for path in paths
        ]
    )
    metrics = [_last_metrics(path) for path in paths]
    evaluated = _compared(names, paths)
    if options.json:
        document = {name: {"metrics": last} for name, last in zip(names, metrics, strict=True)}
        print_json(
            {
                "runs": document,
                "keys": {key: dict(zip(names, pair, strict=True)) for key, pair in keys},
                "evaluation": evaluated,
            }
        )
        return
    print_table(
        ("key", *names), [(key, *map(_told, pair)) for key, pair in keys], title="keys that differ"
    )
    rows = [
        (key, *(_told(last.get(key)) for last in metrics))
        for key in sorted(metrics[0].keys() | metrics[1].keys())
        if key != "time"
    ]
    print_table(("metric", *names), rows, title="metrics of the last iteration logged")
    if evaluated is not None:
        print_comparison(evaluated)


def _last_metrics(directory: Path) -> dict[str, Any]:
    """Return the metrics of the last step; an evaluation has a line of its own."""
    rows = read_metrics(directory)
    return {
        key: value for row in rows if row["step"] == rows[-1]["step"] for key, value in row.items()
    }


def _differences(recipes: Sequence[dict[str, object]]) -> list[tuple[str, list[object]]]:
    every = sorted(recipes[0].keys() | recipes[1].keys())
    pairs = [(key, [recipe.get(key) for recipe in recipes]) for key in every]
    return [(key, pair) for key, pair in pairs if pair[0] != pair[1]]


def _compared(names: Sequence[str], paths: Sequence[Path]) -> dict[str, Any] | None:
    """Compare the evaluations after training in the first mode that both runs have."""
    documents = [_evaluation(path, AFTER) for path in paths]
    mode = next((mode for mode in MODES if all(mode in document for document in documents)), None)
    if mode is None:
        return None
    files = [f"{path / 'evaluation' / AFTER}.json:{mode}" for path in paths]
    return comparison({name: [episodes_at(file)] for name, file in zip(names, files, strict=True)})


def prune(arguments: Sequence[str]) -> None:
    """Remove old checkpoints, and runs without a checkpoint; without ``--yes`` only say which."""
    parser = _parser("prune")
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--keep", type=int, default=1, metavar="N")
    parser.add_argument("--yes", action="store_true")
    options = parser.parse_args(arguments)
    if options.keep < 1:
        raise UserError(f"runs prune: --keep {options.keep}: must be at least 1")
    removed: list[dict[str, Any]] = []
    for directory in all_runs():
        if options.recipe not in (None, directory.parent.name) or directory.is_symlink():
            continue
        with held(directory) as idle:
            for path in _superfluous(directory, options.keep) if idle else ():
                removed.append({"path": str(path), "size": _size(path), "removed": options.yes})
                if options.yes:
                    shutil.rmtree(path)
    if options.json:
        print_json(removed)
        return
    for entry in removed:
        print(
            f"{'removed' if options.yes else 'would remove'} {entry['path']} ({megabytes(entry['size'])})"
        )
    total = megabytes(sum(entry["size"] for entry in removed))
    print(
        f"{len(removed)} directories, {total}"
        + ("" if options.yes or not removed else ": give --yes to remove them")
    )


def _superfluous(directory: Path, keep: int) -> Iterator[Path]:
    """Yield the old checkpoints of a run, or the run itself if it holds no work.

    Results of a sweep, sessions at a robot, transitions and weights are work.
    """
    checkpoints = complete_checkpoints(directory / CHECKPOINTS)
    if checkpoints:
        yield from (path for path in checkpoints[:-keep] if not path.is_symlink())
    elif not (is_sweep(directory) or _at_robot(directory) or any(directory.rglob("*.safetensors"))):
        yield directory


def _size(directory: Path) -> int:
    return sum(file.st_size for file in _files(directory))


def _files(directory: Path) -> Iterator[os.stat_result]:
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # a run that goes on replaces its files
            if not path.is_dir():
                yield path.lstat()


def _told(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def age(seconds: float) -> str:
    return duration(seconds) if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"


VERBS = {"list": list_runs, "compare": compare_runs, "prune": prune}

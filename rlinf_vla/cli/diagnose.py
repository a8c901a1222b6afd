"""Run ``rlinf-vla diagnose RUN``: what is conspicuous in a run, and which keys to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlinf_vla.config.arguments import Parser
from rlinf_vla.config.errors import UserError, printable
from rlinf_vla.runtime.run_directory import RECIPE, evaluation_file, held, is_sweep
from rlinf_vla.runtime.run_names import named
from rlinf_vla.telemetry.diagnosis import LEAST, Record, Verdict, verdicts
from rlinf_vla.telemetry.metrics import METRICS_FILE, read_metrics
from rlinf_vla.telemetry.run_files import Run, read_run
from rlinf_vla.telemetry.tables import JSON, print_json


def run(arguments: Sequence[str]) -> None:
    """Print the verdicts. Raises UserError if the run cannot be read."""
    parser = Parser("diagnose", "rlinf-vla diagnose RUN")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(JSON, action="store_true")
    options = parser.parse_args(arguments)
    directory = Path(options.run).expanduser()
    directory = directory if directory.is_dir() else named(options.run)
    if is_sweep(directory):
        raise UserError(f"{directory} holds an evaluation sweep: give the directory of a training")
    if not any((directory / name).exists() for name in (RECIPE, METRICS_FILE)):
        raise UserError(f"{directory} holds no run: give the directory of one, or a run's name")
    read_metrics(directory)  # a damaged line is one of the user's to repair
    found = read_run(directory)
    given = verdicts(found)
    done = _iterations(found)
    state = _state(found, done, directory)
    if options.json:
        document = {"run": str(directory), "state": state, "iterations": done}
        print_json(document | {"verdicts": [asdict(each) for each in given]})
        return
    print(printable(f"{directory}: {state}"))
    conspicuous = [each for each in given if each.conspicuous]
    for each in conspicuous:
        print(printable("\n".join(_lines(each))))
    if not given:
        print(f"too few iterations for a verdict: {LEAST} are needed")
    elif not conspicuous:
        print(f"nothing conspicuous (checked: {', '.join(each.name for each in given)})")


def _iterations(run: Run) -> int:
    rows = Record(run).rows
    return int(rows[-1]["step"]) if rows else 0


def _state(run: Run, done: int, directory: Path) -> str:
    """Say how far a run with ``done`` iterations is, and whether it goes on or was stopped."""
    total = run.recipe.get("iterations") or 0
    reached = f"iteration {done} of {total}" if done else "no iteration has been logged yet"
    with held(directory) as idle:
        if not idle:
            return f"running, {reached}"
    # session.minutes may end a run early, and an evaluation is its last work
    ended = evaluation_file(directory, "after").exists() or (
        isinstance(total, int) and done >= total
    )
    return f"finished, {reached}" if done and ended else f"stopped before its end, {reached}"


def _lines(verdict: Verdict) -> list[str]:
    where = f"iterations {verdict.first} to {verdict.last}"
    advice = ", ".join(map(str, verdict.keys))
    lines = [f"{verdict.name}: {verdict.number} ({where})", f"  {verdict.meaning}"]
    return lines + ([f"  try {advice}"] if advice else [])

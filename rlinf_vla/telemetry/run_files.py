"""Read a run directory for the report, whether the run is finished, running or failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlinf_vla.core.io import STEP_NAME, read_json, read_yaml
from rlinf_vla.telemetry.metrics import METRICS_FILE, read_metrics
from rlinf_vla.telemetry.timeline import PREDICTED, RECORDED, Span

CONTROL_FILE = "control.json"
MODES = ("greedy", "sampled")
"""Evaluation modes; the first that was evaluated both before and after training is the headline."""
MOMENTS = ("before", "after")
"""Evaluations and videos of before and after training."""

_EVALUATIONS = f"before|after|start|{STEP_NAME}"
_EVALUATION_KEYS = ("n_episodes", "n_success", "pc_success", "pc_success_ci95")
_COMPARISON_KEYS = (
    "n_pairs",
    "n_gained",
    "n_lost",
    "pc_difference",
    "pc_difference_ci95",
    "p_value",
)
_CONTROL_KEYS = (
    "control_hz",
    "seconds",
    "steps",
    "missed",
    "chunks",
    "interventions",
    "sections_ms",
    "ages_ms",
    "left_per_tenth",
)

Read = TypeVar("Read")


@dataclass
class Run:
    """Contents of a run directory. Absent pieces are empty; ``problems`` lists unreadable ones."""

    name: str
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """``before``, ``after``, ``step_XXXXXX`` or, without training, ``start`` -> mode -> block."""
    comparison: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Mode -> paired comparison of before and after."""
    control: dict[str, Any] = field(default_factory=dict)
    """Control-loop timing of a run on a robot."""
    timeline: list[Span] = field(default_factory=list)
    predicted: list[Span] = field(default_factory=list)
    """The timeline of an iteration under the run's plan; empty without a prediction."""
    iteration: int = 0
    """Iteration that ``timeline`` shows."""
    videos: dict[str, dict[str, Path]] = field(default_factory=dict)
    """Episode -> name of its evaluation -> file."""
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def headline_mode(self) -> str | None:
        """The first mode evaluated both before and after, else the first mode evaluated at all."""
        both = [
            mode
            for mode in MODES
            if all(mode in self.evaluations.get(moment, {}) for moment in MOMENTS)
        ]
        some = [
            mode
            for mode in MODES
            if any(mode in document for document in self.evaluations.values())
        ]
        return next(iter(both + some), None)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of one metric, NaN where it was not finite."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [
            float("nan") if row[name] is None else row[name] for row in rows
        ]


def read_run(run_dir: Path) -> Run:
    """Read whatever files ``run_dir`` contains; never raises for damaged ones."""
    run = Run(name="")

    def read(path: Path, reader: Callable[[Path], Read], otherwise: Read) -> Read:
        if not path.exists():
            return otherwise
        try:
            check_inside(run_dir, path)
            return reader(path)
        except Exception as error:  # whatever a crash left there must not prevent the report
            run.problems.append(
                f"{path.relative_to(run_dir)} could not be read: {str(error)[:200]}"
            )
            return otherwise

    run.metrics = read(run_dir / METRICS_FILE, lambda path: read_metrics(path.parent), [])
    for path in sorted((run_dir / "evaluation").glob("*.json")):
        if path.stem == "comparison":
            run.comparison = read(path, partial(_read_blocks, keys=_COMPARISON_KEYS), {})
        elif re.fullmatch(_EVALUATIONS, path.stem):
            run.evaluations[path.stem] = read(
                path, partial(_read_blocks, keys=_EVALUATION_KEYS), {}
            )
    run.control = read(run_dir / CONTROL_FILE, partial(_read_json, keys=_CONTROL_KEYS), {})
    no_timeline: tuple[int, list[Span]] = (0, [])
    run.iteration, run.timeline = read(run_dir / RECORDED, _read_timeline, no_timeline)
    run.predicted = read(run_dir / PREDICTED, _read_timeline, no_timeline)[1]
    for path in sorted((run_dir / "videos").glob("*.mp4")):
        if match := re.fullmatch(rf"({_EVALUATIONS})_(.+)", path.stem):
            run.videos.setdefault(match[2], {})[match[1]] = path
    run.recipe = read(
        run_dir / "recipe.yaml", lambda path: _checked(read_yaml(path), "the file"), {}
    )
    run.environment = read(run_dir / "environment.json", _read_json, {})
    run.name = str(run.recipe.get("name") or "") or run_dir.resolve().name
    pieces = {
        "evaluation/comparison.json": run.comparison,
        RECORDED: run.timeline,
        "videos/": run.videos,
        "recipe.yaml": run.recipe,
        "environment.json": run.environment,
    }
    absent = [name for name, piece in pieces.items() if not piece]
    if absent:
        run.problems.append(
            f"Not in this page, because it is not there or cannot be read: {', '.join(absent)}."
        )
    return run


def check_inside(directory: Path, path: Path) -> None:
    """Raise ValueError if a link leads from ``directory``, which may be untrusted, to elsewhere, or
    to something whose reading may never end."""
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError("it is a link that leads out of the directory: copy the file itself")
    if not path.is_file() and not path.is_dir():
        raise ValueError("it is no file")


def _read_json(path: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    return _checked(read_json(path), "the file", keys)


def _read_blocks(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Return mode -> block."""
    return {
        mode: _checked(block, mode, keys)
        for mode, block in _read_json(path).items()
        if mode in MODES
    }


def _checked(document: Any, name: str, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Raises ValueError unless ``document`` is a dictionary with ``keys``."""
    if not isinstance(document, dict):
        raise ValueError(f"{name} is not a mapping")
    if absent := sorted(set(keys) - set(document)):
        raise ValueError(f"{name} has no {absent[0]}")
    return document


def _read_timeline(path: Path) -> tuple[int, list[Span]]:
    """Return the latest iteration of a ``Timeline.write`` trace, starting at 0 seconds."""
    events = _read_json(path)["traceEvents"]
    tracks = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        return 0, []
    iteration = max(event["args"]["iteration"] for event in spans)
    spans = [event for event in spans if event["args"]["iteration"] == iteration]
    zero = min(event["ts"] for event in spans)
    return iteration, [
        Span(
            event["name"],
            tracks[event["tid"]],
            (event["ts"] - zero) / 1e6,
            (event["ts"] - zero + event["dur"]) / 1e6,
        )
        for event in spans
    ]

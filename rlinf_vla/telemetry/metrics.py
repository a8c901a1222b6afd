"""Log a run's metrics: one JSON line per step in ``metrics.jsonl``, and the same in its trackers.

Names follow verl: ``actor/...``, ``critic/...``, ``rollout/...``, ``timing_s/...`` (seconds),
``throughput/...`` (per second), and ``eval/success_once`` (a fraction). ``memory/...`` are peaks of
the first trainer's GPU during updates.

Trackers are TensorBoard, Weights & Biases, Trackio and MLflow, by their libraries.
``trackers/NAME.json`` in the run's directory holds the identity of the run there, the last step
sent and the names sent in it, so that a resumed run continues it and sends nothing twice.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import TENSORBOARD, flat
from rlinf_vla.core.io import parse_json, replacing, write_json

METRICS_FILE = "metrics.jsonl"
TRACKERS = "trackers"
"""Folder of a run directory; see the top of this file."""
MLFLOW_PARAMETERS = 100
"""The most that MLflow takes at once."""


class MetricsLog:
    """Writes the metrics of one run.

    ``resume_step=N`` continues after step N: lines that an interrupted run logged after its
    checkpoint are removed, so that no step appears twice.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int | None = None,
        trackers: Sequence[str] = (TENSORBOARD,),
        recipe: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """``recipe``: what trackers show as the run's settings; ``say`` reports those that fail."""
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        _repair(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        self._trackers = open_trackers(trackers, run_dir, resume_step, recipe or {}, say)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log ``metrics`` of ``step`` and flush the file. In JSON, NaN and infinity become null."""
        values = {name: float(value) for name, value in metrics.items()}
        line = {"step": step, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self, failed: bool = False) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.finish(failed)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines of a run, oldest first; empty without a file. Non-finite values are None.

    An incomplete last line, left by a run killed while writing, is skipped. Raises UserError if any
    other line is damaged.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [_read_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _read_line(line: str, where: str) -> dict[str, Any]:
    try:
        values = parse_json(line)
        if (
            not isinstance(values, dict)
            or type(values["step"]) is not int
            or not 0 <= values["step"] < 1e12
        ):
            raise ValueError
        return {
            name: value if name in ("step", "time") or value is None else _finite(value)
            for name, value in values.items()
        }
    except (ValueError, KeyError, TypeError, OverflowError):
        raise UserError(
            f"{where} is damaged (no JSON object with a step and numbers): delete that line, or start a new run_dir"
        ) from None


def _finite(value: Any) -> float | None:
    return value + 0 if math.isfinite(value) else None


def _repair(path: Path, last_step: int | None) -> None:
    """Keep complete lines up to ``last_step``, if given. The file is replaced atomically."""
    if not path.exists():
        return
    lines = [
        line for line in read_metrics(path.parent) if last_step is None or line["step"] <= last_step
    ]
    with replacing(path) as unfinished:
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


class Tracker(Protocol):
    """The run as one library stores it. Steps do not decrease."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, failed: bool) -> None: ...


class TensorBoard:
    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        # Imported here: readers of metrics need neither torch nor TensorBoard, which import slowly.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / TENSORBOARD), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, failed: bool) -> None:
        self._writer.close()


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError if the library of a tracker is not installed."""
    for name in names:
        if name != TENSORBOARD and find_spec(name) is None:
            package = {"mlflow": "mlflow-skinny sqlalchemy alembic"}.get(name, name)
            raise UserError(
                f"tracker={name} is not installed: pip install {package} (or the extra: pip install 'rlinf-vla[trackers]')"
            )


def open_trackers(
    names: Sequence[str],
    run_dir: Path,
    resume_step: int | None,
    recipe: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[Tracker]:
    """Open the trackers of a run. ``say`` reports those that fail, now or later."""
    return [
        TensorBoard(run_dir, resume_step)
        if name == TENSORBOARD
        else Guarded(name, run_dir, recipe, say)
        for name in dict.fromkeys(names)
    ]


class Guarded:
    """A tracker whose failure costs a line on the console, and never the run."""

    def __init__(
        self, name: str, run_dir: Path, recipe: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._name = name
        self._say = say
        self._path = run_dir / TRACKERS / f"{name}.json"
        self._state: dict[str, Any] = {"id": "", "step": -1, "names": []}
        self._tracker: Tracker | None = None
        self._attempt(lambda: self._open(run_dir, recipe))

    def _open(self, run_dir: Path, recipe: Mapping[str, Any]) -> None:
        if self._path.exists():
            self._state |= json.loads(self._path.read_text(encoding="utf-8"))
        self._tracker = tracker = OPENED[self._name](run_dir, recipe, self._state["id"])
        self._state["id"] = tracker.identity
        self._save()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        logged = {"names": self._state["names"]} if step == self._state["step"] else {"names": []}
        new = {name: value for name, value in metrics.items() if name not in logged["names"]}
        tracker = self._tracker
        if tracker is None or step < self._state["step"] or not new:
            return
        self._state |= {"step": step, "names": [*logged["names"], *new]}

        def send() -> None:
            self._save()  # before it is sent: a run that is killed here must not send it again
            tracker.log(step, new)

        self._attempt(send)

    def finish(self, failed: bool) -> None:
        tracker = self._tracker
        self._tracker = None
        if tracker is not None:
            self._attempt(lambda: tracker.finish(failed))

    def _save(self) -> None:
        write_json(self._path, self._state)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a library or the network raises
            self._tracker = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._say(
                f"tracker {self._name} failed ({reason}): training goes on without it, its metrics are in metrics.jsonl"
            )


class Wandb:
    """A run of Weights & Biases; with WANDB_MODE=offline a folder that ``wandb sync`` sends."""

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], identity: str) -> None:
        import wandb

        self.identity = identity or uuid.uuid4().hex[:8]
        settings = wandb.Settings(console="off", silent=True, login_timeout=30)
        project = os.environ.get("WANDB_PROJECT") or _project(recipe)
        self._run = wandb.init(
            project=project,
            id=self.identity,
            resume="allow",
            name=run_dir.name,
            config=dict(recipe),
            dir=str(run_dir),
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of Trackio, in its local database unless TRACKIO_SPACE_ID names a Space."""

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], identity: str) -> None:
        import trackio

        self.identity = identity or f"{run_dir.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            _project(recipe),
            name=self.identity,
            config=dict(recipe),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI; the experiment has the recipe's name."""

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], identity: str) -> None:
        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"
        )  # a lost server must not hold up training
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self.identity = identity
        if identity:
            self._client.update_run(identity, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _project(recipe)
        existing = self._client.get_experiment_by_name(name)
        experiment = (
            existing.experiment_id if existing is not None else self._client.create_experiment(name)
        )
        self.identity = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in flat(recipe).items()]
        for start in range(0, len(params), MLFLOW_PARAMETERS):
            self._client.log_batch(self.identity, params=params[start : start + MLFLOW_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self.identity,
            metrics=[Metric(name, value, now, step) for name, value in metrics.items()],
        )

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


OPENED: dict[str, Callable[[Path, Mapping[str, Any], str], Any]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}
"""Name of a tracker -> how it is opened: run directory, recipe, identity or an empty string."""


def _project(recipe: Mapping[str, Any]) -> str:
    return str(recipe.get("name", "rlinf-vla"))

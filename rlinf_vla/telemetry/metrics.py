"""Log a run's metrics: one JSON line per step in ``metrics.jsonl``, and the same in its trackers.

Names follow verl: ``actor/...``, ``critic/...``, ``rollout/...``, ``timing_s/...`` (seconds),
``throughput/...`` (per second), and ``eval/success_once`` (a fraction). ``memory/...`` are peaks of
the first trainer's GPU during updates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import TENSORBOARD
from rlinf_vla.core.io import parse_json, replacing
from rlinf_vla.telemetry.trackers import open_trackers

METRICS_FILE = "metrics.jsonl"


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

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_vla.config.errors import UserError
from rlinf_vla.telemetry.metrics import MetricsLog, read_metrics


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir)]


def test_written_lines_are_read_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "run") as log:
        log.write(
            1,
            {"actor/pg_loss": 0.5, "critic/vf_loss": float("nan"), "rollout/reward_mean": math.inf},
        )
        # On disk at once: a run may be killed at any moment.
        assert steps(tmp_path / "run") == [1]
        log.write(2, {"actor/pg_loss": 0.25})
    first, second = read_metrics(tmp_path / "run")
    assert (
        first["actor/pg_loss"] == 0.5
        and first["critic/vf_loss"] is None
        and first["rollout/reward_mean"] is None
    )
    assert second["actor/pg_loss"] == 0.25
    moment = datetime.fromisoformat(first["time"])
    assert moment.utcoffset() == UTC.utcoffset(None)
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 60
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no NaN


def test_tensorboard_has_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TensorBoard orders files by the second in which they began, and within one by a number without leading zeros.
    monkeypatch.setattr(time, "time", partial(next, count(1_000_000_000)))
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"rollout/success_once": step / 10})
    with MetricsLog(tmp_path, resume_step=2) as log:
        log.write(3, {"rollout/success_once": 0.9})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shown = [(event.step, round(event.value, 6)) for event in board.Scalars("rollout/success_once")]
    assert shown == [(1, 0.1), (2, 0.2), (3, 0.9)]


@pytest.mark.parametrize(
    "torn", ["", '{"step": 6, "time": "2026-01-', '{"step": 6}', "\x00\x00\x00"]
)
def test_resume_removes_lines_after_the_checkpoint(tmp_path: Path, torn: str) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.write(step, {"actor/pg_loss": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    with MetricsLog(tmp_path, resume_step=3) as log:
        log.write(4, {"actor/pg_loss": 44})
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert [line["actor/pg_loss"] for line in read_metrics(tmp_path)] == [1, 2, 3, 44]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_a_crash_during_resume_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"actor/pg_loss": 1})
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            MetricsLog(tmp_path, resume_step=0)
    assert steps(tmp_path) == [1]
    MetricsLog(tmp_path, resume_step=0).close()
    assert steps(tmp_path) == []


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"of": "something else"}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1 is damaged"):
        MetricsLog(tmp_path, resume_step=0)


def test_a_missing_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []

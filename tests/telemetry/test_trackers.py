"""Trackers with their real libraries, offline; and with a library that fails."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.telemetry import metrics
from rlinf_vla.telemetry.metrics import MetricsLog, read_metrics, require_trackers
from tests.skips import needs

ROOT = Path(__file__).parents[2]
RECIPE = {"name": "counting", "algorithm": {"name": "ppo", "gamma": 0.9}}


class Recorder:
    """A library that keeps what it gets; ``broken`` names the calls that raise."""

    sent: list[tuple[int, dict[str, float]]]
    broken: set[str]

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], identity: str) -> None:
        self.check("init")
        self.recipe = dict(recipe)
        self.identity = identity or f"new-{len(self.opened)}"
        self.opened.append(self)

    opened: list[Recorder]

    def check(self, call: str) -> None:
        if call in self.broken:
            raise ConnectionError(f"the network is lost in {call}\nat length")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.check("log")
        self.sent.append((step, dict(metrics)))

    def finish(self, failed: bool) -> None:
        self.check("finish")
        self.failed = failed


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    fresh = type("Fresh", (Recorder,), {"sent": [], "opened": [], "broken": set()})
    monkeypatch.setitem(metrics.OPENED, "wandb", fresh)
    return fresh


def log(
    run: Path, resume: int, steps: range, said: list[str] | None = None, name: str = "wandb"
) -> None:
    with MetricsLog(
        run, resume, [name], RECIPE, (said if said is not None else []).append
    ) as metrics:
        for step in steps:
            metrics.write(step, {"actor/loss": step / 2})


def test_a_tracker_gets_what_the_log_gets_and_no_tensorboard_unless_asked(
    recorder: type[Recorder], tmp_path: Path
) -> None:
    log(tmp_path / "run", -1, range(1, 4))
    assert recorder.sent == [(step, {"actor/loss": step / 2}) for step in (1, 2, 3)]
    assert recorder.opened[0].recipe == RECIPE and recorder.opened[0].failed is False
    assert not (tmp_path / "run" / "tensorboard").exists()
    with pytest.raises(ZeroDivisionError), MetricsLog(tmp_path / "other", None, ["wandb"]):
        raise ZeroDivisionError
    assert recorder.opened[1].failed is True


def test_a_resumed_run_continues_and_sends_nothing_twice(
    recorder: type[Recorder], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    log(run, -1, range(1, 8))
    log(run, 5, range(6, 7))  # killed again, after fewer steps
    with MetricsLog(run, 5, ["wandb"], RECIPE) as metrics:
        for step in range(6, 10):
            metrics.write(step, {"actor/loss": step / 2})
            if step == 7:
                metrics.write(step, {"eval/success_once": 0.5})
    steps = [step for step, values in recorder.sent if "actor/loss" in values]
    assert steps == list(range(1, 10)) and (7, {"eval/success_once": 0.5}) in recorder.sent
    assert {each.identity for each in recorder.opened} == {"new-0"}
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_one_line(
    recorder: type[Recorder], tmp_path: Path, call: str
) -> None:
    recorder.broken.add(call)
    said: list[str] = []
    log(tmp_path / "run", -1, range(1, 5), said)
    assert len(said) == 1 and said[0].startswith(
        f"tracker wandb failed (the network is lost in {call}): training goes on"
    )
    assert "\n" not in said[0] and len(read_metrics(tmp_path / "run")) == 4


def test_a_damaged_identity_is_such_a_failure(recorder: type[Recorder], tmp_path: Path) -> None:
    (tmp_path / "run" / "trackers").mkdir(parents=True)
    (tmp_path / "run" / "trackers" / "wandb.json").write_text("rubbish")
    said: list[str] = []
    log(tmp_path / "run", -1, range(1, 3), said)
    assert len(said) == 1 and recorder.sent == [] and len(read_metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_library_that_is_missing_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda module: None)
    require_trackers(["tensorboard"])
    with pytest.raises(UserError, match=rf"tracker={name} is not installed: pip install {name}"):
        require_trackers(["tensorboard", name])


# the libraries


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in (
        "TRACKIO_SPACE_ID",
        "TRACKIO_SERVER_URL",
        "WANDB_PROJECT",
        "MLFLOW_EXPERIMENT_NAME",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def twice(run: Path, name: str) -> list[str]:
    """Two attempts, of which the second begins before the end of the first."""
    said: list[str] = []
    log(run, -1, range(1, 4), said, name)
    if name == "wandb":
        time.sleep(1.1)  # it names the folder of an attempt by the second
    with MetricsLog(run, 2, [name], RECIPE, said.append) as metrics:
        for step in (3, 4):
            metrics.write(step, {"actor/loss": step / 2, "actor/kl": math.nan})
        metrics.write(4, {"eval/success_once": 0.75})
    return said


LOSSES = {1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0}


def records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file, which is a log of LevelDB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    place = 7
    begun = b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no header fits into the rest of the block
            place += 32768 - place % 32768
            continue
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        begun += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(begun)
            begun = b""
            yield record


def print_wandb(run: Path) -> None:
    """Track ``run`` with wandb, and print what its files hold."""
    import wandb

    said = twice(run, "wandb")
    wandb.teardown()  # waits for the process that writes
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    found = [record for path in files for record in records(path)]
    rows = [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in each.history.item
        }
        for each in found
        if each.HasField("history")
    ]
    config = {
        item.key: json.loads(item.value_json)
        for each in found
        if each.HasField("run")
        for item in each.run.config.update
    }
    print(
        json.dumps(
            {"said": said, "files": [path.name for path in files], "rows": rows, "config": config}
        )
    )


@needs("trackers")
def test_wandb_offline(offline: Path) -> None:
    run = (
        offline / "run"
    )  # in a process of its own, because its files and threads last as long as the process
    code = f"import pathlib; from tests.telemetry import test_trackers; test_trackers.print_wandb(pathlib.Path({str(run)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["said"] == [] and len(set(found["files"])) == 1, (
        "one run, in as many folders as attempts"
    )
    assert [
        (row["_step"], row["actor/loss"]) for row in found["rows"] if "actor/loss" in row
    ] == list(LOSSES.items())
    assert [row["_step"] for row in found["rows"] if row.get("eval/success_once") == 0.75] == [4]
    assert found["config"]["algorithm"] == RECIPE["algorithm"]


@pytest.mark.slow
@needs("trackers")
@pytest.mark.filterwarnings("ignore")  # of SQLAlchemy, at MLflow
def test_mlflow_in_a_database(offline: Path) -> None:
    from mlflow import MlflowClient

    assert twice(offline / "run", "mlflow") == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("counting")
    (found,) = client.search_runs([experiment.experiment_id])
    assert {
        each.step: each.value for each in client.get_metric_history(found.info.run_id, "actor/loss")
    } == LOSSES
    assert len(client.get_metric_history(found.info.run_id, "actor/loss")) == 4
    assert found.data.metrics["eval/success_once"] == 0.75 and found.info.status == "FINISHED"
    assert found.data.params["algorithm.gamma"] == "0.9"


@needs("trackers")
def test_trackio_in_its_local_database(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", offline / "trackio")
    assert twice(offline / "run", "trackio") == []
    (name,) = sqlite_storage.SQLiteStorage.get_runs("counting")
    rows = sqlite_storage.SQLiteStorage.get_logs("counting", name)
    assert [(row["step"], row["actor/loss"]) for row in rows if "actor/loss" in row] == list(
        LOSSES.items()
    )
    assert [row["step"] for row in rows if row.get("eval/success_once") == 0.75] == [4]


@needs("trackers")
def test_mlflow_without_its_server_is_one_line(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    said: list[str] = []
    log(offline / "run", -1, range(1, 3), said, "mlflow")
    assert (
        len(said) == 1
        and said[0].startswith("tracker mlflow failed (")
        and len(read_metrics(offline / "run")) == 2
    )

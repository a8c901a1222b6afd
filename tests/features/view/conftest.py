from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_vla.core.sockets import listening_at
from rlinf_vla.evaluation.statistics import compare, summary
from rlinf_vla.evaluation.video import write_video
from rlinf_vla.features.sweeps.results import FORMAT, tables
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.timeline import Timeline
from tests.skips import require

HOSTILE = "</script><script>document.title='injected'</script><img src=x onerror=\"document.title='injected'\">"


@dataclass
class Answer:
    status: int
    text: str
    body: bytes
    headers: dict[str, str]

    @property
    def data(self) -> Any:
        """What view.js draws."""
        found = re.search(
            r'<script type="application/json" id="data">(.*?)</script>', self.text, re.DOTALL
        )
        assert found is not None, self.text
        return json.loads(found[1])


@dataclass
class Page:
    """A view that is served on this machine."""

    port: int

    def get(self, path: str = "/", **headers: str) -> Answer:
        """The path is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(
                "GET",
                path,
                headers={name.replace("_", "-"): value for name, value in headers.items()},
            )
            found = connection.getresponse()
            body = found.read()
            return Answer(
                found.status,
                body.decode(errors="replace"),
                body,
                {name.lower(): value for name, value in found.getheaders()},
            )
        finally:
            connection.close()


Viewed = Callable[..., AbstractContextManager[Page]]


@pytest.fixture
def viewed() -> Viewed:
    """Serves a directory's view from a thread."""
    require("serve")

    @contextmanager
    def serving(directory: Path, token: str | None = None, loopback: bool = True) -> Iterator[Page]:
        import uvicorn

        from rlinf_vla.features.view.app import build_app

        app = build_app(directory, token, loopback)
        # uvloop, which trackers bring along, would keep a pipe for signals open.
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                loop="asyncio",
            )
        )
        with listening_at("127.0.0.1", 0, "here") as listener:
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            try:
                while thread.is_alive() and not server.started:
                    time.sleep(0.01)
                yield Page(listener.getsockname()[1])
            finally:
                server.should_exit = True
                thread.join(60)
                assert not thread.is_alive()

    return serving


def film(path: Path, title: str) -> None:
    write_video(path, np.zeros((8, 32, 32, 3), np.uint8), 10, title)


def log(run_dir: Path, steps: range) -> None:
    with MetricsLog(run_dir) as metrics:
        for step in steps:
            values = {
                "rollout/success_once": step / 40,
                "actor/approx_kl": 0.01 if step > 1 else float("nan"),
                f"own/{HOSTILE}": 1.0,
            }
            metrics.write(step, values)


def evaluation(outcomes: list[bool]) -> dict[str, Any]:
    episodes = [
        {"task": HOSTILE, "seed": seed, "success": won} for seed, won in enumerate(outcomes)
    ]
    return {"greedy": {**summary(episodes, "task"), "episodes": episodes}}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that ended, with names that are HTML."""
    path = tmp_path / "runs" / "ppo" / "20261120-120000"
    log(path, range(1, 21))
    documents = {
        "before": evaluation([True] * 4 + [False] * 36),
        "step_000010": evaluation([True] * 20 + [False] * 20),
    }
    documents["after"] = evaluation([False] + [True] * 35 + [False] * 4)
    documents["comparison"] = compare(documents["before"], documents["after"])
    (path / "evaluation").mkdir()
    for name, document in documents.items():
        (path / "evaluation" / f"{name}.json").write_text(json.dumps(document))
        if name != "comparison":
            film(path / "videos" / f"{name}_PushCube_3.mp4", f"{name}: {HOSTILE}")
    timeline = Timeline()
    timeline.begin_iteration(20)
    timeline.add("act", "policy <script>", 0.0, 0.5)
    timeline.write(path / "timeline.json")
    (path / "recipe.yaml").write_text(
        json.dumps({"name": HOSTILE, "iterations": 40, "algorithm": {"gamma": 0.97}})
    )
    return path


def block(policy: int, suite: int, task: int, wins: int) -> dict[str, Any]:
    names = {
        "policy": ("start", f"best {HOSTILE}")[policy],
        "probe": "none",
        "suite": f"suite{suite}",
        "task": f"task{task} {HOSTILE}",
    }
    episodes = [
        names
        | {"seed": seed, "instruction": "go", "success": seed < wins, "steps": 5, "return": 0.0}
        for seed in range(6)
    ]
    return {
        "block": {"policy": policy, "suite": suite, "task": task, "seeds": list(range(6))},
        "episodes": episodes,
    }


@pytest.fixture
def sweep_dir(tmp_path: Path) -> Path:
    """A finished sweep of two policies on two tasks of two suites."""
    path = tmp_path / "sweep"
    (path / "blocks").mkdir(parents=True)
    episodes = []
    for suite in range(2):
        for policy in range(2):
            for task in range(2):
                document = block(policy, suite, task, wins=(1, 5)[policy])
                episodes += document["episodes"]
                name = f"{policy:02d}_{suite:03d}_{task:03d}_{0:07d}"
                (path / "blocks" / f"{name}.json").write_text(json.dumps(document))
                film(path / "videos" / f"{name}.mp4", f"film {HOSTILE}")
    suites = [
        {"suite": f"suite{suite}", "tasks": [f"task{task} {HOSTILE}" for task in range(2)]}
        for suite in range(2)
    ]
    head = {
        "format": FORMAT,
        "name": "libero_eval",
        "environment": {"cpu": "abacus"},
        "suites": suites,
        "recipe": {"name": "libero_eval"},
    }
    head |= {
        "provenance": {"start": {}, f"best {HOSTILE}": {}},
        "lost": {"simulators": 0, "processes": 0},
    }
    (path / "recipe.yaml").write_text("name: libero_eval\n")
    (path / "result.json").write_text(json.dumps(head | tables(episodes) | {"episodes": episodes}))
    return path

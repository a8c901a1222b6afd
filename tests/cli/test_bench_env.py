"""``rlinf-vla bench env`` on counter world, beside a baseline that is a program of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Baseline
from rlinf_vla.testing.toy_env import CounterPlugin
from tests.cli.conftest import CommandLine, Counting

STOCK = "import sys, time; print('hello'); print('begin', flush=True); time.sleep(0.2); print('end', flush=True); sys.stdin.read()"


class Compared(CounterPlugin):
    stock = STOCK

    def baselines(self, config: Any, episodes: int) -> list[Baseline]:
        return [Baseline(f"stock, {images}", images, ("-c", self.stock)) for images in (True, False)]


@pytest.fixture
def compared(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> Compared:
    plugin = Compared()
    monkeypatch.setattr(plugins, "envs", lambda: {"counter": plugin})
    return plugin


def test_ours_and_the_simulators_own(rlinf_vla: CommandLine, compared: Compared, tmp_path: Path) -> None:
    found = rlinf_vla("bench", "env", "env=counter", "run_dir=out")
    assert found.code == 0, found.out + found.err
    document = json.loads((tmp_path / "out" / "bench_env.json").read_text())["counter"]
    names = [(each["name"], each["images"]) for each in document["measured"]]
    assert names == [
        *(("ours", images) for images in ("every step", "every 6 steps", "once an episode")),
        *(("stock, True", "every step"), ("stock, False", "none")),
    ]
    assert all(each["steps"] > 0 and each["seconds"] > 0 for each in document["measured"])
    assert document["measured"][3]["steps"] == 3 * 6 * 4
    assert len(document["ratios"]) == 6 and all(env.closed for env in compared.created)


def test_without_a_baseline_ours_alone(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> None:
    assert rlinf_vla("bench", "env", "env=counter", "run_dir=out").code == 0
    assert json.loads((tmp_path / "out" / "bench_env.json").read_text())["counter"]["ratios"] == {}


def test_a_baseline_that_fails_ends_it(rlinf_vla: CommandLine, compared: Compared) -> None:
    compared.stock = "print('begin')"
    found = rlinf_vla("bench", "env", "env=counter", "run_dir=out")
    assert found.code == 1 and "ended before it printed 'end'" in found.err

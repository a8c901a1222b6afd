"""``rlinf-vla bench env`` on counter world, compared with a baseline in a separate program."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_vla.benchmarks.simulators import Baseline
from rlinf_vla.core import plugins
from tests.cli.conftest import CommandLine, Counting

pytestmark = pytest.mark.machine  # commands that start processes

STOCK = "import time; from rlinf_vla.benchmarks.simulators.timed import timed; print('hello'); timed(lambda _: time.sleep(0.1), 2)"


@pytest.fixture
def stock(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The program of the simulator's own vector environment, with and without images."""
    code = [STOCK]

    def baselines(config: Any, episodes: int) -> list[Baseline]:
        return [Baseline(f"stock, {images}", images, ("-c", *code)) for images in (True, False)]

    installed = plugins.Installed
    module = SimpleNamespace(baselines=baselines)
    monkeypatch.setattr(
        plugins,
        "Installed",
        lambda group: {"counter": module} if group == "rlinf_vla.benchmarks" else installed(group),
    )
    return code


def test_our_environment_is_compared_with_the_simulators_own(
    rlinf_vla: CommandLine, counting: Counting, stock: list[str], tmp_path: Path
) -> None:
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
    assert len(document["ratios"]) == 6 and all(env.closed for env in counting.plugin.created)


def test_without_a_baseline_only_ours_is_measured(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    assert rlinf_vla("bench", "env", "env=counter", "run_dir=out").code == 0
    assert json.loads((tmp_path / "out" / "bench_env.json").read_text())["counter"]["ratios"] == {}


def test_a_failing_baseline_ends_the_benchmark(rlinf_vla: CommandLine, stock: list[str]) -> None:
    stock[0] = "print('begin')"
    found = rlinf_vla("bench", "env", "env=counter", "run_dir=out")
    assert found.code == 1 and "ended before it printed 'end'" in found.err

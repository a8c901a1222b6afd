"""Policies on a real server, in a process of its own: a sweep is that of the policy itself, bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from rlinf_vla.core import plugins
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.models.remote.policy import RemotePolicy
from rlinf_vla.testing.toy_env import CounterWorld
from rlinf_vla.testing.toy_policy import LinearPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import CountingInSuites, announce
from tests.cli.toy_robot import Arguments
from tests.cli.toy_session import toy_session  # noqa: F401
from tests.models.policy_servers import PolicyServer, serving
from tests.skips import needs

pytestmark = needs("serve")

MODELS = (LinearPolicy, OpenVLAOFTPolicy, Pi0Policy, RemotePolicy)
PI0 = (
    "model=pi0",
    "model.checkpoint=asset://pi0_tiny_pushcube",
    "model.options.denoise_steps=3",
    "model.lora.rank=0",
)
OFT = (
    "model=openvla_oft",
    "model.checkpoint=asset://openvla_oft_tiny_pushcube",
    "model.lora.rank=0",
)
PLAYED = (
    "env.state_dim=8",
    "episodes=4",
    "sweep.policies=[start]",
    "evaluation.modes=[sampled,greedy]",
    "evaluation.filmed=0",
    "cluster=laptop",
)


@contextmanager
def served(*settings: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yields address and process of ``rlinf-vla serve`` with these settings, when it is ready."""
    words = ["serve", "recipe=maniskill_eval", "serve.port=0", "cluster=laptop", *settings]
    command = [sys.executable, "-P", "-m", "rlinf_vla.cli.main", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline(), process.stdout.readline()]
            found = re.search(r"wss?://\S+", said[0])
            assert found and said[1].startswith("ready"), said + process.stdout.readlines()
            yield found[0], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def pi0_server() -> Iterator[str]:
    with served(*PI0) as (url, _):
        yield url


@pytest.fixture
def with_models(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(plugins, "models", lambda: {model.name: model for model in MODELS})
    return counting


Eval = Callable[..., dict[str, Any]]


@pytest.fixture
def sweep(rlinf_vla: CommandLine, with_models: Counting, tmp_path: Path) -> Eval:
    def run(name: str, *settings: str) -> dict[str, Any]:
        found = rlinf_vla(
            *with_models.arguments("eval", "counting_eval", f"run_dir={name}", *PLAYED, *settings)
        )
        assert found.code == 0, found.out + found.err
        return json.loads((tmp_path / name / "result.json").read_text())

    return run


def remote(url: str, *settings: str) -> list[str]:
    return ["model=remote", f"model.options.url={url}", *settings]


@pytest.mark.nightly
def test_a_sweep_of_pi0_on_a_server_is_that_of_pi0(
    sweep: Eval, pi0_server: str, rlinf_vla: CommandLine
) -> None:
    """At its temperature too, and whatever the seed of the server is; and it can be verified."""
    here = sweep("here", *PI0, "seed=3", "env.num_envs=4", "rollout.batch_size=2")
    there = sweep("there", *remote(pi0_server), "seed=3", "env.num_envs=4", "rollout.batch_size=2")
    assert there["episodes"] == here["episodes"] and there["policies"] == here["policies"]
    assert len({each["return"] for each in here["episodes"]}) > 4, "the actions matter"
    assert (
        there["provenance"]["start greedy"]["sha256"]
        == here["provenance"]["start greedy"]["sha256"]
    )
    assert (
        there["provenance"]["start greedy"]["model"] == "remote"
        and there["provenance"]["start greedy"]["server"]["model"] == "pi0"
    )

    refused = rlinf_vla("verify", "there/result.json", "--episodes", "6").complaint
    assert f"sets model.options.url={pi0_server}" in refused, "a file chooses no machine"
    again = rlinf_vla(
        "verify", "there/result.json", "--episodes", "6", f"model.options.url={pi0_server}"
    )
    assert (
        again.code == 0
        and "6 of 6 episodes are bit-identical" in again.out
        and "changed" not in again.out
    )


def test_a_sweep_of_openvla_oft_on_a_server_is_that_of_openvla_oft(
    sweep: Eval, pi0_server: str, rlinf_vla: CommandLine, with_models: Counting
) -> None:
    """And it is not continued with another policy."""
    with served(*OFT) as (url, _):
        here = sweep("here", *OFT)
        there = sweep("there", *remote(url))
    assert there["episodes"] == here["episodes"]
    words = [*PLAYED, "run_dir=there", *remote(pi0_server)]
    found = rlinf_vla(*with_models.arguments("eval", "counting_eval", *words)).complaint
    assert "was begun with other software or weights: policies.start sampled.sha256" in found


def test_an_evaluation_without_a_sweep(
    rlinf_vla: CommandLine, with_models: Counting, pi0_server: str, tmp_path: Path
) -> None:
    words = [
        "env.state_dim=8",
        "episodes=3",
        "evaluation.filmed=0",
        "sweep.policies=[]",
        "cluster=laptop",
    ]
    rows = {}
    for name, model in (("here", list(PI0)), ("there", remote(pi0_server))):
        found = rlinf_vla(
            *with_models.arguments("eval", "counting_eval", f"run_dir={name}", *words, *model)
        )
        assert found.code == 0, found.err
        document = json.loads((tmp_path / name / "evaluation" / "start.json").read_text())
        rows[name] = document["greedy"]["episodes"] + document["sampled"]["episodes"]
    assert rows["here"] == rows["there"]


def test_a_server_that_dies_ends_the_sweep_in_one_line_and_another_continues_it(
    rlinf_vla: CommandLine,
    with_models: Counting,
    sweep: Eval,
    pi0_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["sweep.block=1", "evaluation.modes=[greedy]"]
    whole = sweep("whole", *remote(pi0_server), *words)
    with served(*PI0) as (url, process):
        step = CounterWorld.step_async
        count = 0

        def killing(env: CounterWorld, actions: Tensor, skip_ended: bool = False) -> None:
            nonlocal count
            count += 1
            if count == 5:
                process.kill()
                process.wait()
            step(env, actions, skip_ended)

        monkeypatch.setattr(CounterWorld, "step_async", killing)
        cut = [*PLAYED, *words, "run_dir=cut", "model.options.retries=1"]
        found = rlinf_vla(*with_models.arguments("eval", "counting_eval", *cut, *remote(url)))
    assert (
        found.code == 1
        and "does not answer in 2 attempts" in found.err
        and found.err.count("\n") == 1
    ), found.err
    assert 0 < len(list((tmp_path / "cut").rglob("blocks/*.json"))) < 8
    assert sweep("cut", *words, *remote(pi0_server))["episodes"] == whole["episodes"]


@pytest.mark.slow
def test_processes_that_play_blocks_have_connections_of_their_own(
    sweep: Eval, pi0_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tmp_path / "package")
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(tmp_path / "package"), *os.environ["PYTHONPATH"].split(os.pathsep)]),
    )
    monkeypatch.setattr(
        plugins, "envs", lambda: {"counter": CountingInSuites()}
    )  # as the processes find it
    alone, together = (
        sweep(f"in {count}", *remote(pi0_server), "sweep.block=1", f"sweep.parallel={count}")
        for count in (1, 2)
    )
    assert together["episodes"] == alone["episodes"] and len(alone["episodes"]) == 32


@pytest.mark.parametrize(
    ("verb", "recipe", "settings", "complaint"),
    [
        (
            "train",
            "counting_ppo",
            [],
            "model=remote: its weights are on a server, there is nothing to train",
        ),
        ("plan", "counting_ppo", [], "there is nothing to train"),
        ("export", "counting_ppo", ["output=out", "checkpoint=run"], "there is nothing to export"),
        ("serve", "counting_eval", [], "there is nothing to serve"),
        (
            "eval",
            "counting_eval",
            ["sweep.policies=[start,somewhere]"],
            "there is no use for somewhere in sweep.policies",
        ),
        ("eval", "counting_eval", ["model.checkpoint=somewhere"], "start the server first"),
        ("eval", "counting_eval", ["model.options.url=null"], "model.options.url has no value"),
        ("eval", "counting_eval", ["model.options.url=http://127.0.0.1"], "use ws://HOST:PORT"),
        ("eval", "counting_eval", [], "start the server first"),
    ],
)
def test_what_a_policy_on_a_server_cannot_do(
    rlinf_vla: CommandLine,
    with_models: Counting,
    verb: str,
    recipe: str,
    settings: list[str],
    complaint: str,
) -> None:
    words = remote("ws://127.0.0.1:1", *settings)
    assert complaint in rlinf_vla(*with_models.arguments(verb, recipe, *words)).complaint


AT_A_ROBOT = """# @package _global_
defaults:
  - _self_
  - override /env: robot
  - override /robot: toy
  - override /model: remote
  - override /algorithm: none
name: toy_remote
iterations: 0
episodes: 2
env:
  episode_limit: 8
session:
  acknowledge: script
control:
  max_observation_age_s: 5.0
  max_misses: 1000
  warmup: 1
rollout:
  pipeline_depth: 1
  batch_size: 1
evaluation:
  modes: [greedy]
"""


@pytest.mark.timeout(300)
def test_a_policy_on_a_server_drives_a_robot(
    rlinf_vla: CommandLine, toy: Arguments, tmp_path: Path
) -> None:
    (tmp_path / "recipe" / "toy_remote.yaml").write_text(AT_A_ROBOT)
    model = ["model=compact", f"model.checkpoint={tmp_path}/model", "model.lora.rank=0"]
    model += ["model.options.random_weights=true", "model.options.images=[front]"]
    with served(*model) as (url, process):
        words = [
            "--config-dir",
            str(tmp_path),
            "recipe=toy_remote",
            "cluster=laptop",
            f"robot.fault={tmp_path}/fault",
            *remote(url),
        ]
        found = rlinf_vla("robot", "run", *words, "run_dir=run")
        assert found.code == 0 and "in 2 episodes at toy" in found.out, found.out + found.err
        assert "simulator failed" not in found.out
        assert json.loads((tmp_path / "run" / "control.json").read_text())["steps"]["policy"] > 0
        document = json.loads((tmp_path / "run" / "evaluation" / "start.json").read_text())
        steps = [episode["executed"] for episode in document["greedy"]["episodes"]]
        output = ["output=data", "record.video=false"]
        kept = rlinf_vla("robot", "dataset", "run=run", *output, f"model.options.url={url}")
        assert kept.code == 0 and "2 episodes, 0 with success" in kept.out, kept.out + kept.err
        lengths = [length - 1 for length, _ in LeRobotReader(tmp_path / "data").listed()]
        assert lengths == steps, "and the last observation"
        process.kill()
        process.wait()
        assert (
            "start the server first" in rlinf_vla("robot", "run", *words, "run_dir=again").complaint
        )


def test_of_a_server_that_does_not_say_its_weights_rates_are_verified(
    sweep: Eval, rlinf_vla: CommandLine
) -> None:
    """Not bits: returns differ here, and the successes do not."""
    server = PolicyServer(lambda observation: {"actions": np.full((4, 4), 0.5, np.float32)})
    with serving(server) as url:
        told = [
            "model.options.keys=lerobot",
            "model.options.chunk=2",
            "model.options.action_dim=4",
            "model.options.state_dim=8",
            "model.options.image_size=64",
        ]
        there = sweep(
            "there",
            *remote(url, *told),
            "evaluation.modes=[greedy]",
            "+model.options.images.base=camera",
        )
        assert there["provenance"]["start"]["sha256"] is None and "camera" in server.seen[0]
        verify = ["verify", "there/result.json", "--episodes", "4", f"model.options.url={url}"]
        assert "4 of 4 episodes are bit-identical" in rlinf_vla(*verify).out
        server.answer = lambda observation: {"actions": np.full((4, 4), 0.25, np.float32)}
        found = rlinf_vla(*verify)
    assert (
        found.code == 0
        and "0 of 4 episodes are bit-identical" in found.out
        and "p = 1.000 for equal success rates" in found.out
    )

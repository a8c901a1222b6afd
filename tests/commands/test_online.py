"""Sessions at a toy robot, with the process beside it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlinf_vla import compose
from rlinf_vla.commands.robot_process import EPISODES, LEARNER_GONE
from rlinf_vla.commands.robot_side import RobotSide
from rlinf_vla.rollout.robot_episode import EVALUATION, TRAINING, Job, RobotEpisode
from rlinf_vla.telemetry.metrics import read_metrics
from tests.commands.conftest import CommandLine
from tests.commands.toy_robot import announce

ROOT = Path(__file__).parents[2]
RECIPE = """# @package _global_
defaults:
  - _self_
  - override /env: robot
  - override /robot: toy
  - override /model: compact
  - override /algorithm: sac
name: toy_rlpd
iterations: 2
episodes: 2
env:
  episode_limit: 12
session:
  acknowledge: script
  learner_nice: 0
control:
  max_observation_age_s: 5.0
  max_misses: 1000
  warmup: 1
cluster:
  update_threads: 1
model:
  checkpoint: {folder}/model
  options:
    random_weights: true
    images: [front]
  lora:
    rank: 0
rollout:
  pipeline_depth: 1
  batch_size: 1
evaluation:
  modes: [greedy]
checkpoints:
  every: 1
algorithm:
  episodes: 2
  demonstrations: 2
  batch_size: 4
  critics: 2
  hidden: 8
"""

Arguments = Callable[..., list[str]]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arguments:
    announce(tmp_path / "package")
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "toy_rlpd.yaml").write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "model").mkdir()
    config = {"image_sizes": [16, 16], "chunk": 1, "action_dim": 4, "state_dim": 8, "patch": 4, "channels": [4], "width": 8}
    config["state_range"] = {"low": [-1] * 8, "high": [1] * 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def arguments(verb: str, *overrides: str) -> list[str]:
        return [verb, "--config-dir", str(tmp_path), "recipe=toy_rlpd", "cluster=laptop", f"robot.fault={tmp_path}/fault", *overrides]

    return arguments


@pytest.mark.timeout(300)
def test_a_session_from_its_beginning_to_its_report(toy: Arguments, rlinf_vla: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("reflex")  # found when the arm is first looked at
    found = rlinf_vla(*toy("train", "run_dir=run"))
    assert found.code == 0, found.out + found.err
    assert "the robot waits for 'acknowledge': reflex" in found.out
    run = tmp_path / "run"
    metrics = [line for line in read_metrics(run) if "rollout/steps" in line]
    assert [line["step"] for line in metrics] == [1, 2]
    assert metrics[-1]["rollout/steps"] > 0 and metrics[-1]["rollout/faults"] == 0
    for name in ("before", "after"):
        document = json.loads((run / "evaluation" / f"{name}.json").read_text())
        assert len(document["greedy"]["episodes"]) == 2
    assert json.loads((run / "control.json").read_text())["steps"]["policy"] > 0
    assert list((run / "videos").glob("*.mp4")) and "Control loop" in (run / "report.html").read_text()
    left = {path.name.partition("_")[0] for path in (run / EPISODES).iterdir()}
    assert EVALUATION not in left, "what was counted is not kept"

    found = rlinf_vla(*toy("train", "run_dir=run", "resume=auto", "iterations=3"))
    assert found.code == 0 and "continuing after iteration 2" in found.out, found.out + found.err
    found = rlinf_vla(*toy("eval", "checkpoint=run/checkpoints/step_000003", "episodes=1"))
    assert found.code == 0 and "in 1 episodes at toy" in found.out, found.out + found.err


@pytest.mark.timeout(300)
def test_demonstrations_are_recorded_learnt_from_and_done_again(toy: Arguments, rlinf_vla: CommandLine, tmp_path: Path) -> None:
    found = rlinf_vla("robot", *toy("record", "output=data", "record.video=false"))
    assert found.code == 0 and "2 episodes, 2 with success" in found.out, found.out + found.err
    shown = ("algorithm.demonstrations=0", "algorithm.dataset=data")
    found = rlinf_vla(*toy("train", "run_dir=run", "iterations=1", "evaluation.before_and_after=false", *shown))
    assert found.code == 0 and read_metrics(tmp_path / "run")[0]["demonstrations/success"] == 1, found.out + found.err
    found = rlinf_vla("robot", *toy("replay", "episode=1", *shown))
    assert found.code == 0 and "actions: success" in found.out and "0.0 mm from where it had been, at most 0.0" in found.out, (
        found.out + found.err
    )
    assert "episodes 0 to 1" in rlinf_vla("robot", *toy("replay", "episode=2", *shown)).complaint
    assert "algorithm.dataset=DIR" in rlinf_vla("robot", *toy("replay")).complaint
    assert "wants a recipe for a robot" in rlinf_vla("robot", "record", "recipe=maniskill_rlpd", "output=data").complaint
    for word in ("algorithm.demonstrations=0", "output=data"):
        assert rlinf_vla("robot", *toy("record", word)).code == 2


@pytest.mark.timeout(300)
def test_the_process_beside_the_robot_is_replaced_and_leaves_what_it_saw(toy: Arguments, tmp_path: Path) -> None:
    _, _, folder, *overrides = toy("train")
    config = compose_with(folder, [*overrides, "env.episode_limit=40"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    said: list[str] = []
    jobs = [Job(TRAINING, number, 7 + number) for number in range(3)]
    with RobotSide(tmp_path / "run", 60.0, said.append) as side:
        for job in jobs[:2]:
            side.begin(job)
        assert len(side.episode(jobs[0], lambda: None)) > 0
        assert side._process is not None
        pid = side._process._process.pid
        os.kill(pid, signal.SIGKILL)
        assert len(side.episode(jobs[1], lambda: None)) > 0
        assert any("died (exit code -9)" in line for line in said) and side._process._process.pid != pid
        side.begin(jobs[2])
        control = tmp_path / "run" / "control.json"
        began, before = time.monotonic(), control.stat().st_mtime_ns
        while time.monotonic() - began < 1.0:
            time.sleep(0.05)
        assert control.stat().st_mtime_ns == before, "the third is under way"
    cut = RobotEpisode.read(tmp_path / "run" / EPISODES / jobs[2].file)
    assert cut.ended == LEARNER_GONE and not cut.terminated
    with RobotSide(tmp_path / "run", 60.0, said.append) as side:
        side.begin(jobs[2])
        assert len(side.episode(jobs[2], lambda: None)) == len(cut) and side._process is None, "it is not played again"


def compose_with(folder: str, overrides: list[str]) -> object:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from rlinf_vla import recipe

    recipe.register()
    GlobalHydra.instance().clear()
    with initialize_config_module(compose.CONFIG_MODULE, version_base="1.3"):
        return compose.compose("train", overrides=[f"hydra.searchpath=[file://{folder}]", *overrides])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.num_envs=2", "there is one robot"),
        ("session.acknowledge=nobody", "session.acknowledge=nobody: one of person, script"),
        ("session.person=keybord", "did you mean keyboard"),
        ("session.patience_s=-1", "must not be negative"),
        ("algorithm.gamma_unit=chunk", "algorithm.gamma_unit=chunk"),
        ("model.options.images=[side]", "'side'"),
        ("robot=tou", "robot=tou does not exist"),
    ],
)
def test_mistakes_are_one_line(toy: Arguments, rlinf_vla: CommandLine, override: str, complaint: str) -> None:
    arguments = toy("train", "run_dir=run", override)
    if override.startswith("robot="):
        arguments = [word for word in arguments if not word.startswith("robot.")]
    assert complaint in rlinf_vla(*arguments).complaint

"""Sessions at a toy robot, with the process beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.features.realworld.client import LocalRobotLink, RobotClient
from rlinf_vla.features.realworld.episode import (
    DEMONSTRATION,
    EVALUATION,
    TRAINING,
    Job,
    RobotEpisode,
)
from rlinf_vla.features.realworld.process import SESSION_OVER, UNDER_WAY
from rlinf_vla.features.realworld.recorder import LOST, recover_episode
from rlinf_vla.runtime.run_directory import EPISODES
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine
from tests.cli.own_signal import KILL_ITSELF, when_it_prints
from tests.cli.toy_robot import Arguments, toy_run
from tests.cli.toy_session import toy_session  # noqa: F401

PATIENT = "env.episode_limit=400"
"""For experts that shall succeed in few steps: a busy machine skips the steps of half a second and more."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_session_from_its_beginning_to_its_report(
    toy: Arguments, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "fault").write_text("reflex")  # found when the arm is first looked at
    found = rlinf_vla(*toy("train", "run_dir=run"))
    assert found.code == 0, found.out + found.err
    assert "the robot waits for 'acknowledge': reflex" in found.out
    run = tmp_path / "run"
    metrics = [line for line in read_metrics(run) if "rollout/steps" in line]
    assert [line["step"] for line in metrics] == [1, 2]
    assert metrics[-1]["rollout/steps"] > 0 and metrics[-1]["rollout/faults"] == 0
    assert metrics[-1]["control/steps_policy"] > 0 and metrics[-1]["control/tick_ms_p99"] > 0
    for name in ("before", "after"):
        document = json.loads((run / "evaluation" / f"{name}.json").read_text())
        assert len(document["greedy"]["episodes"]) == 2
    assert json.loads((run / "control.json").read_text())["steps"]["policy"] > 0
    assert (
        list((run / "videos").glob("*.mp4")) and "Control loop" in (run / "report.html").read_text()
    )
    left = {path.name.partition("_")[0] for path in (run / EPISODES).iterdir()}
    assert EVALUATION not in left, "what was counted is not kept"

    found = rlinf_vla(*toy("train", "run_dir=run", "resume=auto", "iterations=3"))
    assert found.code == 0 and "continuing after iteration 2" in found.out, found.out + found.err
    found = rlinf_vla(*toy("eval", "checkpoint=run/checkpoints/step_000003", "episodes=1"))
    assert found.code == 0 and "in 1 episodes at toy" in found.out, found.out + found.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demonstrations_are_recorded_learnt_from_and_done_again(
    toy: Arguments, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    found = rlinf_vla("robot", *toy("record", "output=data", "record.video=false", PATIENT))
    assert found.code == 0 and "2 episodes, 2 with success" in found.out, found.out + found.err
    shown = ("algorithm.demonstrations=0", "algorithm.dataset=data")
    found = rlinf_vla(
        *toy("train", "run_dir=run", "iterations=1", "evaluation.before_and_after=false", *shown)
    )
    assert found.code == 0 and read_metrics(tmp_path / "run")[0]["demonstrations/success"] == 1, (
        found.out + found.err
    )
    phases = ("algorithm=cal_ql", "algorithm.offline_iterations=1", "algorithm.offline_updates=3")
    never = "evaluation.before_and_after=false"
    found = rlinf_vla(*toy("train", "run_dir=phases", "iterations=2", never, *phases, *shown))
    assert found.code == 0, found.out + found.err
    offline, online = read_metrics(tmp_path / "phases")
    assert offline["actor/updates"] == 3 and "rollout/steps" not in offline
    assert online["rollout/steps"] > 0 and online["replay/size"] > 0
    found = rlinf_vla("robot", *toy("replay", "episode=1", *shown))
    assert (
        found.code == 0
        and "actions: success" in found.out
        and "0.0 mm from where it had been, at most 0.0" in found.out
    ), found.out + found.err
    for verb in (("train", "run_dir=slow"), ("robot", "replay")):
        command = [*verb[:-1], *toy(*verb[-1:])] if verb[0] == "robot" else toy(*verb)
        assert (
            "data has 20 steps per second, the environment 10"
            in rlinf_vla(*command, *shown, "robot.hz=10").complaint
        )
    by_hand = ("robot.by_hand=true", "session.acknowledge=operator")
    assert (
        "an operator must lay out its episodes"
        in rlinf_vla("robot", *toy("replay", *shown, *by_hand)).complaint
    )
    assert "episodes 0 to 1" in rlinf_vla("robot", *toy("replay", "episode=2", *shown)).complaint
    assert "algorithm.dataset=DIR" in rlinf_vla("robot", *toy("replay")).complaint
    assert (
        "needs a recipe for a robot"
        in rlinf_vla("robot", "record", "recipe=maniskill_rlpd", "output=data").complaint
    )
    for word in ("algorithm.demonstrations=0", "output=data"):
        assert rlinf_vla("robot", *toy("record", word)).code == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_recorded_outlives_the_command(
    toy: Arguments, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    words = toy(
        "record", "output=data", "record.video=false", PATIENT, "algorithm.demonstrations=6"
    )
    command = [sys.executable, "-m", "rlinf_vla.cli.main", "robot", *words]
    with when_it_prints("episode 3/6", tmp_path / "package", KILL_ITSELF):
        killed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    kept = list((tmp_path / ".data.episodes").glob("demonstration_*"))
    assert len(kept) == 3 and not (tmp_path / "data").exists()
    found = rlinf_vla("robot", *words)
    assert found.code == 0 and f"{len(kept)} of 6 episodes are in .data.episodes\n" in found.out, (
        found.out + found.err
    )
    assert (
        found.out.count("\nepisode ") == 6 - len(kept) and "6 episodes, 6 with success" in found.out
    )
    assert len(LeRobotReader(tmp_path / "data")) == 6 and not (tmp_path / ".data.episodes").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_process_beside_the_robot_is_replaced_and_leaves_what_it_saw(
    toy: Arguments, tmp_path: Path
) -> None:
    """The scene's expert ends the first episode with success; the policy's, of 200 seconds, are cut short."""
    run = toy_run(tmp_path / "run", toy("train", "env.episode_limit=4000"))
    said: list[str] = []
    jobs = [Job(DEMONSTRATION, 0, 7, scripted=True), Job(TRAINING, 0, 8), Job(TRAINING, 1, 9)]

    def is_under_way(job: Job) -> bool:
        return (
            under_way.exists()
            and (kept := recover_episode(under_way)) is not None
            and kept.job == job
        )

    with RobotClient(run, partial(LocalRobotLink, run, 60.0), said.append) as side:
        for job in jobs[:2]:
            side.begin(job)
        assert len(side.episode(jobs[0], lambda: None)) > 0
        assert isinstance(side.link, LocalRobotLink)
        pid = side.link.child.pid
        under_way = run / EPISODES / UNDER_WAY
        while not is_under_way(jobs[1]):
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # until then it may be writing
        kept = recover_episode(under_way)
        assert kept is not None
        cut = side.episode(jobs[1], lambda: None)
        assert cut.ended == LOST and cut.fault and not cut.terminated and len(cut) == len(kept) > 0
        assert torch.equal(cut.state, kept.state) and not under_way.exists()
        assert any("died (exit code -9)" in line for line in said) and side.link.child.pid != pid
        side.begin(jobs[2])
        while not is_under_way(jobs[2]):
            time.sleep(0.02)
    cut = RobotEpisode.read(run / EPISODES / jobs[2].file)
    assert cut.ended == SESSION_OVER and not cut.terminated
    with RobotClient(run, partial(LocalRobotLink, run, 60.0), said.append) as side:
        side.begin(jobs[2])
        assert len(side.episode(jobs[2], lambda: None)) == len(cut) and side.link is None, (
            "it is not played again"
        )


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.num_envs=2", "env.num_envs=2 is out of range: use 1"),
        (
            "session.acknowledge=nobody",
            "session.acknowledge=nobody is not known: use operator or script",
        ),
        ("session.operator=keybord", "did you mean keyboard"),
        ("session.patience_s=-1", "session.patience_s=-1.0 is out of range"),
        (
            "robot.expert=false",
            "algorithm.demonstrations=2: robot=toy has no expert that could give them: set session.operator=keyboard",
        ),
        (
            "robot.by_hand=true session.acknowledge=operator",
            "an operator must lay out its episodes and confirm the layout: set session.op",
        ),
        ("algorithm.gamma_unit=chunk", "algorithm.gamma_unit=chunk"),
        ("model.options.images=[side]", "'side'"),
        ("robot.pixels=8", "the policy's image 'front' is 16x16 pixels, the camera's 8x16"),
        ("session.connect_s=90", "session.connect_s=90.0 is not under session.silence_s=90.0"),
        ("robot=tou", "robot=tou does not exist"),
    ],
)
def test_mistakes_are_one_line(
    toy: Arguments, rlinf_vla: CommandLine, override: str, complaint: str
) -> None:
    arguments = toy("train", "run_dir=run", *override.split())
    if override.startswith("robot="):
        arguments = [word for word in arguments if not word.startswith("robot.")]
    assert complaint in rlinf_vla(*arguments).complaint


PI0 = (
    "model=pi0",
    "model.checkpoint=asset://pi0_tiny",
    "model.options.images=[front]",
    "model.options.random_weights=true",
)
PI0 += (
    "model.options.denoise_steps=2",
    "model.options.prompt_length=24",
    "model.lora.rank=0",
    "robot.pixels=64",
)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_chunked_policy_acts_and_learns(
    toy: Arguments, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    """π₀ imitates recorded episodes, acts at the robot, and its noise is learnt there."""
    recipe = (
        (tmp_path / "recipe" / "toy_rlpd.yaml").read_text().partition("algorithm:\n  episodes")[0]
    )
    (tmp_path / "recipe" / "toy_sft.yaml").write_text(
        recipe.replace("/algorithm: sac", "/algorithm: sft").replace("toy_rlpd", "toy_sft")
    )

    def sft(verb: str, *overrides: str) -> list[str]:
        return [word.replace("toy_rlpd", "toy_sft") for word in toy(verb, *PI0, *overrides)]

    found = rlinf_vla("robot", *toy("record", "output=data", "record.video=false", PATIENT, *PI0))
    assert found.code == 0, found.out + found.err
    found = rlinf_vla(
        *sft(
            "train",
            "run_dir=sft",
            "algorithm.demonstrations.dataset=data",
            "algorithm.batch_size=4",
            "episodes=1",
        )
    )
    assert found.code == 0, found.out + found.err
    assert (
        len(json.loads((tmp_path / "sft/evaluation/after.json").read_text())["greedy"]["episodes"])
        == 1
    )

    acting = sft(
        "run",
        "checkpoint=sft/checkpoints/step_000002",
        "control.real_time_chunking=true",
        "run_dir=acts",
    )
    found = rlinf_vla("robot", *acting)
    assert found.code == 0 and "in 2 episodes at toy" in found.out, found.out + found.err
    run = tmp_path / "acts"
    document = json.loads((run / "evaluation/step_000002.json").read_text())
    for episode in document["greedy"]["episodes"]:
        assert (
            episode["ended"] == "time is up"
            and episode["executed"] > 0
            and episode["by_operator"] == 0
        )
    assert "simulator failed" not in found.out
    page = (run / "report.html").read_text()
    assert "Control loop" in page and "time is up" in page and "<video" in page
    control = json.loads((run / "control.json").read_text())
    assert control["steps"]["policy"] >= sum(
        each["executed"] for each in document["greedy"]["episodes"]
    )
    assert "holds a run already" in rlinf_vla("robot", *acting).complaint

    learn = (
        "algorithm.demonstrations=0",
        "algorithm.frozen_backbone=true",
        "algorithm.noise_bound=2",
        "iterations=1",
    )
    learn += (
        "evaluation.before_and_after=false",
        "algorithm.episodes=1",
        "model.checkpoint=sft/policy",
    )
    assert "control.asynchronous=false" in rlinf_vla(*toy("train", *PI0, *learn)).complaint
    found = rlinf_vla(*toy("train", *PI0, *learn, "control.asynchronous=false", "run_dir=dsrl"))
    assert found.code == 0, found.out + found.err
    assert read_metrics(tmp_path / "dsrl")[0]["replay/size"] >= 2
    refine = [
        "algorithm.anchor=0.1" if word == "algorithm.noise_bound=2" else word for word in learn
    ]
    found = rlinf_vla(*toy("train", *PI0, *refine, "control.asynchronous=false", "run_dir=rlt"))
    assert found.code == 0, found.out + found.err
    assert read_metrics(tmp_path / "rlt")[0]["replay/size"] >= 2
    assert "robot record makes one" in rlinf_vla(*sft("train", "run_dir=no")).complaint
    ppo = tmp_path / "recipe" / "toy_ppo.yaml"
    ppo.write_text(
        recipe.replace("/algorithm: sac", "/algorithm: ppo").replace("toy_rlpd", "toy_ppo")
    )
    assert (
        "algorithm=ppo cannot learn at a robot"
        in rlinf_vla(
            *(word.replace("toy_rlpd", "toy_ppo") for word in toy("train", *PI0))
        ).complaint
    )

"""The robot's side on a node of a Ray cluster: the same episodes, whoever dies meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from rlinf_vla.features.realworld.client import LocalRobotLink, RobotClient
from rlinf_vla.features.realworld.episode import (
    DEMONSTRATION,
    EVALUATION,
    TRAINING,
    Job,
    RobotEpisode,
)
from rlinf_vla.features.realworld.process import LEARNER_GONE
from rlinf_vla.features.realworld.ray_link import RayLink, RemoteRobotActor, robot_on_ray
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.run_directory import EPISODES
from rlinf_vla.runtime.saved_recipe import read_saved
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine
from tests.cli.toy_robot import Arguments, toy_run
from tests.cli.toy_session import toy_session  # noqa: F401


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the robot's node keeps its sessions."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rlinf-vla" / "sessions"


@pytest.fixture
def recipe(toy: Arguments, tmp_path: Path) -> str:
    return (
        toy_run(tmp_path / "written", toy("train", "env.episode_limit=40")) / "recipe.yaml"
    ).read_text()


def heard(
    outpost: RemoteRobotActor,
) -> Iterator[tuple[list[dict[str, str]], dict[str, bytes], str | None]]:
    while True:
        said, files, lost = outpost.hear()
        yield json.loads(said), files, lost


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_not_delivered_waits_for_the_next_actor(recipe: str, state: Path) -> None:
    job = Job(TRAINING, 3, 7)
    order = json.dumps(vars(job))
    outpost = RemoteRobotActor("abc", recipe, 60.0, 60.0)
    outpost.give(order)
    lost_on_the_way = next(files for _, files, _ in heard(outpost) if files)
    assert lost_on_the_way.keys() == {job.file, "control.json"}
    stale = state / "abc" / EPISODES / Job(EVALUATION, 0, 7).file
    stale.write_bytes(b"of other weights")
    assert lost_on_the_way.items() <= outpost.end().items()

    outpost = RemoteRobotActor("abc", recipe, 60.0, 60.0)
    outpost.give(order)
    assert outpost.hear() == (json.dumps([{"played": job.file}]), lost_on_the_way, None), (
        "it is not played again"
    )
    outpost.delivered([job.file])
    assert outpost.end() == {} and not stale.exists()
    outpost.clear()
    assert not list(state.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_that_is_silent_is_as_good_as_dead(
    toy: Arguments, tmp_path: Path, state: Path
) -> None:
    long = (
        toy_run(tmp_path / "written", toy("train", "env.episode_limit=4000")) / "recipe.yaml"
    ).read_text()
    outpost = RemoteRobotActor("abc", long, 60.0, 4.0)
    job = Job(TRAINING, 0, 7)
    outpost.give(json.dumps(vars(job)))
    signs_of_life = 0
    while signs_of_life < 3:
        signs_of_life += len(json.loads(outpost.hear()[0]))
    cut = state / "abc" / EPISODES / job.file
    while (
        not cut.exists()
    ):  # of 200 seconds; to ask whether the process lives would be a sign of life
        time.sleep(0.1)
    said, files, lost = next(each for each in heard(outpost) if each[2] is not None)
    assert lost == "it received nothing from the learner for 4 s" and not any(
        "left" in answer for answer in said
    )
    assert RobotEpisode.read(cut).ended == LEARNER_GONE
    assert files.keys() <= outpost.end().keys(), "it waits to be delivered"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_session_whose_actor_is_killed(toy: Arguments, tmp_path: Path, state: Path) -> None:
    """The expert looks at the robot alone: what it shows does not depend on how busy the machine is."""
    run, here = (
        toy_run(tmp_path / name, toy("train", "cluster.runtime=ray")) for name in ("run", "here")
    )
    jobs = [Job(DEMONSTRATION, number, 7 + number, scripted=True) for number in range(2)]
    said = list[str]()
    with robot_on_ray(recipes.read(read_saved(run)), run, said.append) as side:
        side.begin(jobs[0])
        played = [side.episode(jobs[0], lambda: None)]
        link = side.link
        assert isinstance(link, RayLink) and any(
            "the robot process runs at" in line for line in said
        )
        side.begin(jobs[1])
        os.kill(beside(link), signal.SIGKILL)
        played.append(side.episode(jobs[1], lambda: None))
        assert (
            any("was lost (ActorDiedError); starting a new one" in line for line in said)
            and side.link is not link
        )
    assert not list(state.iterdir()), "all was delivered"
    with RobotClient(here, partial(LocalRobotLink, here, 60.0), said.append) as side:
        for job, there in zip(jobs, played, strict=True):
            side.begin(job)
            same = side.episode(job, lambda: None)
            assert there.job == job and there.success and len(there) == len(same)
            for name in ("action", "state", "reward", "human"):
                assert torch.equal(getattr(there, name), getattr(same, name))


def beside(link: RayLink) -> int:
    """The process of the link's actor."""
    import ray

    return int(ray.get(link.actor.__ray_call__.remote(lambda outpost: os.getpid())))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_from_its_beginning_to_its_report(
    toy: Arguments, rlinf_vla: CommandLine, tmp_path: Path, state: Path
) -> None:
    words = toy(
        "train",
        "run_dir=run",
        "cluster.runtime=ray",
        "+cluster.roles.robot.resources.cell_7=1",
        "evaluation.before_and_after=false",
    )
    found = rlinf_vla(*words)
    assert found.code == 0 and "the robot process runs at" in found.out, found.out + found.err
    run = tmp_path / "run"
    assert [line["step"] for line in read_metrics(run) if "rollout/steps" in line] == [1, 2]
    assert json.loads((run / "control.json").read_text())["steps"]["policy"] > 0
    assert RobotEpisode.read(run / EPISODES / Job(TRAINING, 3, 0).file).weights == 1, (
        "new weights went there"
    )
    assert not list(state.iterdir())

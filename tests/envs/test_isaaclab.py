"""The Isaac Lab plug-in against a stand-in that speaks Isaac Lab's API (``isaaclab_stand_in``)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import StepResult
from rlinf_vla.envs.isaaclab.config import IsaacLabConfig
from rlinf_vla.envs.isaaclab.plugin import INSTRUCTIONS, plugin, simulator_options
from rlinf_vla.envs.isaaclab.simulator import IsaacLabBatch
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.env import (
    EPISODE_LIMIT,
    NUM_ENVS,
    VectorEnvConformance,
    assert_same,
    assert_same_row,
    episodes,
    random_actions,
)

STAND_IN = str(Path(__file__).with_name("isaaclab_stand_in"))
LIFT = "Isaac-Lift-Cube-Franka-IK-Rel-v0"
JOINTS = {"task": "Isaac-Joints-v0", "instruction": "go", "image_size": None}
EVERYTHING = ["eef_pos", "eef_quat", "gripper_pos", "cube_pos"]


def configured(**config: Any) -> IsaacLabConfig:
    common = {
        "num_envs": NUM_ENVS,
        "episode_limit": EPISODE_LIMIT,
        "image_size": 16,
        "device": "cpu",
        "python": sys.executable,
    }
    return IsaacLabConfig(**common | config)


def make(groups: int = 1, version: str = "2.3.0", **config: Any) -> list[VectorEnv]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", STAND_IN)
        patch.setenv("STAND_IN_VERSION", version)
        return plugin.create(configured(num_envs=groups * NUM_ENVS, **config), groups)


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return make(groups=2, translation_m=0.05, rotation_rad=0.2)


class TestConformanceOfVersion3(VectorEnvConformance):
    """Quaternions x y z w, a dense reward and no images."""

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return make(
            groups=2,
            version="3.0.0",
            translation_m=0.05,
            rotation_rad=0.2,
            reward="dense",
            cameras=[],
        )


def to_the_cube(env: VectorEnv, state: torch.Tensor, steps: int = 6) -> StepResult:
    """Move straight to the cube, with a state of ``EVERYTHING``, and two steps beyond it."""
    actions = torch.zeros(env.spec.num_envs, steps + 2, 7)
    actions[:, :, :3] = ((state[:, 9:] - state[:, :3]) / steps / 0.5)[:, None]
    return env.step(actions)


@pytest.fixture(scope="module")
def env() -> Iterator[VectorEnv]:
    """Sees everything, in the units of the task."""
    (env,) = make(state=EVERYTHING)
    yield env
    env.close()


def test_success_ends_an_episode_and_its_last_observation_is_kept(env: VectorEnv) -> None:
    """Isaac Lab itself would return the first observation of the next episode."""
    start = env.reset(episodes(1, 2, 3))
    result = to_the_cube(env, start.state)
    assert result.success.any(1).all() and torch.equal(result.terminated, result.success)
    assert torch.equal(result.reward, result.success.float()) and not result.truncated.any()
    last = result.observation.state
    assert torch.equal(last[:, 9:], start.state[:, 9:]), "the cube of another episode"
    assert ((last[:, :3] - last[:, 9:]).abs() < 0.03).all()
    assert not result.valid.all(), "nothing is recorded after success"


def test_a_termination_that_is_no_success_is_a_failure(env: VectorEnv) -> None:
    env.reset(episodes(1, 2, 3))
    down = torch.zeros(NUM_ENVS, 8, 7)
    down[:, :, 2] = -0.2
    result = env.step(down)
    assert result.terminated.any(1).all() and not result.success.any()


def test_rows_that_ended_do_not_disturb_the_others(env: VectorEnv) -> None:
    """An environment reaches its cube, ends and goes on; the others end as if it had not."""
    actions = random_actions(env, 10, seed=0) * 0.1
    actions[:, :, 2] = 0
    start = env.reset(episodes(1, 2, 3))
    expected = env.step(actions)
    env.reset(episodes(1, 2, 3))
    actions[0, :, :3] = ((start.state[0, 9:] - start.state[0, :3]) / 4 / 0.5)[None]
    found = env.step(actions)
    assert found.terminated[0].any() and not found.terminated[1:].any()
    for row in (1, 2):
        assert_same_row(found.observation, row, expected.observation, row)


def test_a_lost_process_is_replaced_and_replayed(env: VectorEnv) -> None:
    assert isinstance(env, ProcessVectorEnv)
    actions = random_actions(env, 6, seed=1)

    def play(kill: bool) -> StepResult:
        env.reset(episodes(1, 2, 3))
        env.step(actions)
        if kill:
            os.kill(env.pool.pids[0], signal.SIGKILL)
        return env.step(actions)

    expected = play(kill=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", STAND_IN)
        assert_same(play(kill=True), expected)
    assert env.pool.restarts == 1
    with pytest.raises(UserError, match="no scripted expert"):
        env.expert_actions()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in in this process, where it is started fast."""
    known = dict(sys.modules)
    for name in [
        name
        for name in known
        if name.partition(".")[0] in ("gymnasium", "isaaclab", "isaaclab_tasks")
    ]:
        del sys.modules[name]
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.syspath_prepend(STAND_IN)
    yield
    signal.signal(signal.SIGINT, handler)
    for name in sys.modules.keys() - known.keys():
        del sys.modules[name]
    sys.modules.update(known)


def batch(**config: Any) -> IsaacLabBatch:
    found = configured(**config)
    check_values(found, "env.")
    return IsaacLabBatch(simulator_options(found), found.num_envs)


def moved(env: IsaacLabBatch, action: float) -> float:
    """Metres along x."""
    env.reset([1, 2, 3], [0, 1, 2])
    before, _ = env.observe([0])
    env.step(torch.tensor([[action, 0, 0, 0, 0, 0, 0]]).expand(NUM_ENVS, 7))
    after, _ = env.observe([0])
    return float((after - before)[0, 0])


@pytest.mark.usefixtures("stand_in")
class TestBatch:
    def test_the_units_of_the_task_are_kept_unless_they_are_set(self) -> None:
        env = batch()
        assert env.spec.tool == [0.5, 0.5] and moved(env, 0.1) == pytest.approx(0.05)
        assert moved(env, 3) == pytest.approx(0.5), "clipped to 1"

    def test_units_of_a_recipe(self) -> None:
        env = batch(translation_m=0.02)
        assert env.spec.tool == [0.02, 0.5] and moved(env, 1) == pytest.approx(0.02)
        assert env.spec.native is not None and env.spec.native["gripper"] == "open_positive"

    def test_what_the_task_is_made_of(self) -> None:
        """Control rate, images of the size asked for, and what it runs on."""
        env = batch(cameras=["base", "wrist_cam"])
        assert env.spec.control_hz == pytest.approx(20)
        assert env.spec.images == {"base": [16, 16], "wrist_cam": [16, 16]} and env.render(
            1
        ).shape == (16, 16, 3)
        assert env.spec.instructions == [INSTRUCTIONS["Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor"]]
        assert env.spec.stack["isaaclab"] == "2.3.0"

    def test_a_task_without_success_and_tool_state(self) -> None:
        """Its observations are one vector with noise: its terms are taken apart, without noise."""
        env = batch(
            task=LIFT, success=None, reward="dense", cameras=[], state=["cube_pos", "eef_pos"]
        )
        assert (
            env.reset([1, 2, 3], [0, 1, 2]) == ["lift the cube to the goal"] * NUM_ENVS
            and env.spec.tool is None
        )
        state, images = env.observe([0, 1, 2])
        assert (
            torch.allclose(state[:, 3:], torch.tensor([0.4, 0.0, 0.3]), atol=0.011) and not images
        )
        reward, terminated, success = env.step(torch.zeros(NUM_ENVS, 7))
        assert (reward < 0).all() and not terminated.any() and not success.any()
        assert not env.render(0).any()

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (
                {"task": "Isaac-Unknown-v0"},
                "env.task=Isaac-Unknown-v0 has no instruction here: set env.instruction",
            ),
            (
                {"task": "Isaac-Unknown-v0", "instruction": "go"},
                "env.task=Isaac-Unknown-v0 cannot be made: Environment",
            ),
            (
                {"task": "Isaac-Direct-v0", "instruction": "go"},
                "env.task=Isaac-Direct-v0 is not a manager-based task",
            ),
            ({"module": "my_tasks"}, "cannot be made: No module named 'my_tasks'"),
            (
                {"task": LIFT},
                "env.success of Isaac-Lift-Cube-Franka-IK-Rel-v0=success is unknown: one of fell",
            ),
            (
                {"task": LIFT, "success": None, "reward": "dense"},
                "has no tool state (set env.state): term=eef_quat is unknown",
            ),
            (
                {"success": "time_out"},
                "env.success of Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor-v0=time_out is unknown",
            ),
            (
                {"success": None},
                "env.reward=sparse needs success: set env.success, or env.reward=dense",
            ),
            ({"state": ["eef_rot"]}, "env.state=eef_rot is unknown: did you mean eef_pos?"),
            ({"cameras": ["front"]}, "env.cameras=front is unknown"),
            (
                JOINTS | {"translation_m": 0.1},
                "has no relative inverse kinematics: unset env.translation_m",
            ),
            (
                JOINTS,
                "env.cameras: wrist is float32 [3], not uint8 [height, width, 3]: set the term's normalize=False",
            ),
            ({"reward": "shaped"}, "env.reward=shaped is not known: use sparse or dense"),
        ],
    )
    def test_a_wrong_setting_is_named_with_its_fix(
        self, config: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UserError) as error:
            batch(**config)
        assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (
            "/nowhere/python",
            "env.python=/nowhere/python is not there: give the path of a Python program",
        ),
        (None, "Isaac Lab is not installed: pip install isaaclab in an environment of its own"),
        (sys.executable, "No module named 'isaaclab' in env.python: install Isaac Lab there"),
    ],
)
def test_an_interpreter_without_isaac_lab_is_named(python: str | None, message: str) -> None:
    with pytest.raises(UserError) as error:
        plugin.create(configured(python=python), 1)
    assert message in str(error.value) and "\n" not in str(error.value)

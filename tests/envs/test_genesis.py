"""Tests with Genesis. Its kernels are compiled once per machine (about two minutes) and stored in the user's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Tensors, Trajectory
from rlinf_vla.envs import options
from rlinf_vla.envs.genesis.config import GenesisConfig
from rlinf_vla.envs.genesis.plugin import plugin
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect
from rlinf_vla.rollout.player import Call
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.env import NUM_ENVS
from rlinf_vla.testing.policy_calls import with_critic
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.envs.outlined import outlined
from tests.envs.pick_cube import PICK_CUBE, PickCubeConformance, PutOnPlateTests
from tests.skips import needs

SCENE = Path(__file__).with_name("fixtures") / "everything.yaml"

real = [
    pytest.mark.simulator,
    pytest.mark.genesis,
    pytest.mark.timeout(1800),
    needs("genesis"),
]
"""Of tests that start Genesis."""


def make(groups: int = 1, **config: Any) -> list[VectorEnv]:
    return plugin.create(GenesisConfig(num_envs=groups * NUM_ENVS, backend="cpu", **config), groups)


@pytest.mark.nightly
class TestPickCube(PickCubeConformance):
    pytestmark = real

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return make(groups=2, **PICK_CUBE)

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        assert outlined(plugin, env, GenesisConfig(**PICK_CUBE))


@pytest.fixture(scope="module")
def plates() -> Any:
    (env,) = plugin.create(
        GenesisConfig(task="PutOnPlate", num_envs=10, backend="cpu", image_size=16), 1
    )
    yield env
    env.close()


@pytest.mark.nightly
class TestPutOnPlate(PutOnPlateTests):
    pytestmark = real


@pytest.mark.nightly
class TestBatchSizes:
    pytestmark = real

    def test_a_rollout_does_not_depend_on_the_size_of_the_batches(self) -> None:
        """Observations, rewards and all else: in a batch of 4, in two of 2, and of one environment alone."""
        actor = Actor(
            with_critic(LinearPolicy(LinearOptions())),
            Settings(run_seed=3, temperature=1.0, batch_size=1),
        )

        def rollout(num_envs: int, groups: int, first: int = 0) -> Trajectory:
            envs = plugin.create(
                GenesisConfig(
                    num_envs=num_envs, backend="cpu", episode_limit=10, reward="progress"
                ),
                groups,
            )
            try:
                return collect(actor, envs, 0, 0, 8, Timeline(), first=first, beside=state)
            finally:
                for env in envs:
                    env.close()

        whole = rollout(4, 1)
        halves = rollout(4, 2)
        alone = rollout(1, 1, first=2)
        assert whole.reward.abs().sum() > 0 and whole.truncated.any()
        assert_equal(halves, whole)
        assert_equal(alone, whole[:, 2:3])


def state(call: Call) -> Tensors:
    return {"state": call.observation.state, "next_state": call.result.observation.state}


def assert_equal(a: Trajectory, b: Trajectory) -> None:
    for one, other in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(one, other)


def test_importing_the_plugin_imports_no_simulator() -> None:
    code = "import sys, rlinf_vla.envs.genesis.plugin; sys.exit(bool({'genesis', 'quadrants', 'trimesh'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("config", "groups", "message"),
    [
        ({"task": "PickCub"}, 1, "env.task=PickCub is unknown: did you mean PickCube?"),
        (
            {"scene": "/nowhere/my.yaml"},
            1,
            "the scene file /nowhere/my.yaml cannot be read: No such file or directory",
        ),
        ({"backend": "tpu"}, 1, "env.backend=tpu is not known: use auto, cpu or gpu"),
        ({"control_mode": "ee_delta"}, 1, "use ee_delta_pos or ee_delta_pose"),
        ({"reward": "spars"}, 1, "env.reward=spars is not known: use sparse or progress"),
        ({"robot_visuals": "lowpoly"}, 1, "use low_poly or stock"),
        ({"image_size": 4}, 1, "from 16 to 1024"),
        ({"cameras": ["bas"]}, 1, "did you mean base?"),
        ({"episode_limit": 0}, 1, "env.episode_limit=0 is out of range"),
        ({"step_timeout_s": 0.0}, 1, "env.step_timeout_s=0.0 is out of range"),
        ({"num_envs": 10}, 4, "env.num_envs=10 cannot be shared by 4 groups: use 8"),
        ({"num_envs": 8, "processes": 3}, 2, "env.processes=3 cannot be shared by 2 groups: use 4"),
        ({"num_envs": 6, "processes": 4}, 1, "=6 cannot be shared by 4 groups"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(
    config: dict[str, Any], groups: int, message: str
) -> None:
    with pytest.raises(UserError) as error:
        check_values(GenesisConfig(**config), "env.")
        plugin.create(GenesisConfig(**config), groups)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@needs("genesis")
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_the_gpu_backend_needs_a_gpu() -> None:
    with pytest.raises(UserError, match=r"use env\.backend=cpu"):
        plugin.create(GenesisConfig(backend="gpu"), 1)


def test_a_machine_without_opengl_gets_the_packages_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["rlinf_vla.envs.genesis.plugin"]
    monkeypatch.setattr(module, "gl", lambda: None)
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    with pytest.raises(UserError, match="apt-get install libegl1"):
        plugin.create(GenesisConfig(), 1)


@needs("genesis")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"env\.cache_dir=.*file.* cannot be written"):
        plugin.create(GenesisConfig(backend="cpu", cache_dir=str(tmp_path / "file")), 1)


def test_the_tasks_are_listed() -> None:
    assert {task.name: (task.has_expert, task.available) for task in plugin.tasks()} == {
        "PickCube": (True, True),
        "PutOnPlate": (True, True),
    }
    assert "red cube" in {task.name: task.instruction for task in plugin.tasks()}["PutOnPlate"]


def test_a_sweep_has_a_part_per_task() -> None:
    config = GenesisConfig(tasks=["PickCube", "PutOnPlate"], image_size=80)
    suites = plugin.suites(config)
    assert [(part.tasks, part.config.task, part.config.image_size) for part in suites] == [
        ((task,), task, 80) for task in config.tasks
    ]
    assert [part.tasks for part in plugin.suites(GenesisConfig(scene=str(SCENE)))] == [
        ("everything",)
    ]
    for wrong, words in (
        ({"tasks": ["PickCube", "PickCube"]}, "twice"),
        ({"tasks": ["PickCub"]}, "did you mean PickCube"),
        ({"tasks": ["PickCube"], "scene": str(SCENE)}, "cannot be played in one sweep"),
    ):
        with pytest.raises(UserError, match=words):
            plugin.suites(GenesisConfig(**wrong))
    with pytest.raises(UserError, match="choose one with"):
        plugin.create(config, 1)

"""Tests with ManiSkill. A simulator takes about ten seconds to start, so tests share it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core.protocols import ToolUnits, VectorEnv
from rlinf_vla.envs.maniskill import vulkan
from rlinf_vla.envs.maniskill.config import ManiSkillConfig
from rlinf_vla.envs.maniskill.plugin import plugin, simulator_options
from rlinf_vla.envs.maniskill.tasks import BRIDGE_MARKERS, TASKS, WIDOWX_MODES
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.env import (
    EPISODE_LIMIT,
    NUM_ENVS,
    VectorEnvConformance,
    assert_same,
    episodes,
    random_actions,
)
from tests.envs.outlined import outlined
from tests.envs.scene25 import published_folder
from tests.skips import needs

pytestmark = [
    pytest.mark.simulator,
    needs("maniskill"),
]


class TestPushCube(VectorEnvConformance):
    config = ManiSkillConfig(
        task="PushCube",
        num_envs=2 * NUM_ENVS,
        processes=2,
        episode_limit=EPISODE_LIMIT,
        backend="cpu",
    )

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return plugin.create(cls.config, groups=2)

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        assert outlined(plugin, env, self.config)

    def test_a_killed_process_does_not_change_the_episodes(self, env: ProcessVectorEnv) -> None:
        actions = random_actions(env, 6, seed=10)
        env.reset(episodes(111, 112, 113))
        env.step(actions)
        expected = env.step(actions)
        env.reset(episodes(111, 112, 113))
        env.step(actions)
        env.step_async(actions)
        os.kill(env.pool.pids[0], signal.SIGKILL)
        assert_same(env.step_wait(), expected)
        assert env.pool.restarts == 1

    def test_the_state_is_the_tool_and_a_finger(self, env: VectorEnv) -> None:
        state = env.reset(episodes(1, 2, 3)).state
        assert ((state[:, 2] > 0.1) & (state[:, 2] < 0.3)).all(), (
            "the tool is above the table, in metres"
        )
        assert torch.allclose(state[:, 3:7].norm(dim=1), torch.ones(NUM_ENVS), atol=1e-5)
        assert torch.allclose(state[:, 7], torch.full((NUM_ENVS,), 0.04), atol=1e-3)
        up_and_closed = torch.tensor([0.0, 0.0, 0.5, -1.0]).expand(NUM_ENVS, 4, 4)
        after = env.step(up_and_closed).observation.state
        assert (after[:, 2] > state[:, 2] + 0.01).all()
        assert (after[:, 7] < 0.02).all()


@pytest.mark.slow
def test_the_camera_also_measures_distances() -> None:
    config = ManiSkillConfig(num_envs=NUM_ENVS, processes=1, depth=True, backend="cpu")
    (env,) = plugin.create(config, 1)
    try:
        assert outlined(plugin, env, config)
        images = env.reset(episodes(1, 2, 3)).images
    finally:
        env.close()
    distance = images["base_depth"]
    assert (distance.dtype, distance.shape) == (torch.int16, (NUM_ENVS, 64, 64, 1))
    eye, target, _ = TASKS["PushCube"].close_view
    middle = distance[:, 28:36, 28:36].float().mean(dim=(1, 2, 3))
    assert middle.tolist() == pytest.approx([1000 * math.dist(eye, target)] * NUM_ENVS, rel=0.1)
    assert images["base"].dtype == torch.uint8


class TestPutOnPlate25(VectorEnvConformance):
    """With an overlay, which depends on the episode and on the tool."""

    config = ManiSkillConfig(
        task="PutOnPlate25NoiseWeak",
        control_mode="pd_ee_delta_pose",
        num_envs=2 * NUM_ENVS,
        processes=2,
        episode_limit=EPISODE_LIMIT,
        backend="cpu",
    )

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return plugin.create(cls.config, 2)

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        assert outlined(plugin, env, self.config)


@pytest.mark.slow
class TestPutOnPlateInScene25(VectorEnvConformance):
    """A photograph, unscaled; the arm follows targets; rewards are changes of what was reached."""

    # an action is in metres
    reach = 0.008
    open_m = (0.02, 0.025)
    config = ManiSkillConfig(
        task="PutOnPlateInScene25Single-v1",
        control_mode=WIDOWX_MODES[0],
        image_size=None,
        reward="progress",
        num_envs=2 * NUM_ENVS,
        processes=2,
        episode_limit=EPISODE_LIMIT,
        backend="cpu",
    )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def assets(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.config = replace(
            cls.config, asset_dir=str(published_folder(tmp_path_factory.mktemp("assets")))
        )

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return plugin.create(cls.config, 2)

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        assert outlined(plugin, env, self.config)

    def test_a_tool_is_before_its_base_and_above_the_table(self, env: VectorEnv) -> None:
        state = env.reset(episodes(1, 2, 3)).state
        assert ((state[:, 0] > 0.2) & (state[:, 1].abs() < 0.05) & (state[:, 2] > 0.05)).all()


def test_an_outline_is_of_tasks_and_modes_that_are_known_without_a_simulator() -> None:
    known = plugin.outline(
        ManiSkillConfig(control_mode="pd_ee_target_delta_pose", image_size=96, num_envs=3)
    )
    assert known is not None
    assert (known.action_dim, known.state_dim, known.num_envs, known.images) == (
        7,
        8,
        3,
        {"base": (96, 96)},
    )
    assert known.tool == ToolUnits(0.1, 0.1)
    assert plugin.outline(ManiSkillConfig(control_mode="pd_joint_pos")) is None
    assert (
        plugin.outline(ManiSkillConfig(task="PegInsertionSide", control_mode="pd_ee_delta_pose"))
        is None
    ), "another robot"
    for wrong, words in (
        (ManiSkillConfig(task="PushCub"), "PushCube"),
        (ManiSkillConfig(control_mode="pd_ee"), "env.control_mode"),
    ):
        with pytest.raises(UserError, match=words):
            plugin.outline(wrong)


def test_importing_the_plugin_imports_no_simulator() -> None:
    code = "import sys, rlinf_vla.envs.maniskill.plugin; sys.exit(bool({'mani_skill', 'sapien', 'gymnasium'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("config", "groups", "message"),
    [
        ({"task": "PushCub"}, 1, "env.task=PushCub is unknown: did you mean PushCube?"),
        ({"task": "Chess"}, 1, "env.task=Chess is unknown: one of PushCube, "),
        ({"control_mode": "pd_ee_delta"}, 1, "did you mean pd_ee_delta_pos?"),
        ({"task": "PickCubeSO100"}, 1, "did you mean pd_joint_delta_pos?"),
        (
            {"task": "StackPyramid", "reward": "progress"},
            1,
            "env.reward for StackPyramid=progress is unknown: one of sparse",
        ),
        ({"reward": "spars"}, 1, "env.reward=spars is not known: use sparse, "),
        ({"camera": "closer"}, 1, "env.camera=closer is not known: use close or stock"),
        (
            {"robot_visuals": "lowpoly"},
            1,
            "env.robot_visuals=lowpoly is not known: use low_poly or stock",
        ),
        ({"backend": "tpu"}, 1, "env.backend=tpu is not known: use auto, cpu or gpu"),
        ({"image_size": 4}, 1, "from 16 to 1024"),
        (
            {"episode_limit": 0},
            1,
            "env.episode_limit=0 is out of range: use a whole number from 1 to 1000000000, or null",
        ),
        (
            {"step_timeout_s": 0.0},
            1,
            "env.step_timeout_s=0.0 is out of range: use a number above 0",
        ),
        ({"num_envs": 10}, 4, "env.num_envs=10 cannot be shared by 4 groups: use 8"),
        ({"num_envs": 8, "processes": 3}, 2, "env.processes=3 cannot be shared by 2 groups: use 4"),
        ({"num_envs": 2, "processes": 4}, 1, "env.processes=4 is more than env.num_envs=2"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(
    config: dict[str, Any], groups: int, message: str
) -> None:
    with pytest.raises(UserError) as error:
        check_values(ManiSkillConfig(**config), "env.")
        plugin.create(ManiSkillConfig(**config), groups)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_the_gpu_backend_needs_a_gpu() -> None:
    with pytest.raises(UserError, match=r"use env\.backend=cpu"):
        plugin.create(ManiSkillConfig(backend="gpu"), 1)


def test_a_task_without_an_expert_names_those_that_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlinf_vla.envs.maniskill.plugin import why_no_expert

    assert why_no_expert(ManiSkillConfig()) is None
    assert "PutOnPlate" in str(why_no_expert(ManiSkillConfig(task="PullCube")))
    assert "pd_ee_delta_pose" in str(why_no_expert(ManiSkillConfig(control_mode="pd_joint_pos")))


def test_bridge_tasks_need_their_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    config = ManiSkillConfig(
        task="PutCarrotOnPlate", control_mode=TASKS["PutCarrotOnPlate"].control_modes[0]
    )
    for early in (
        config,
        ManiSkillConfig(task="PutCarrotOnPlate"),
    ):  # before anything about how to drive it
        with pytest.raises(
            UserError, match=r"needs assets that are not on this machine.*download_asset"
        ):
            plugin.create(early, 1)
    available = {task.name: task.available for task in plugin.tasks()}
    assert available["PushCube"]
    assert not available["PutCarrotOnPlate"]
    (check,) = [check for check in plugin.diagnose() if "bridge" in check.name]
    assert not check.ok
    assert check.detail.startswith("optional")
    assert "download_asset" in check.fix
    for marker in BRIDGE_MARKERS:
        (tmp_path / marker).parent.mkdir(parents=True)
        (tmp_path / marker).touch()
    published = {name for name, entry in TASKS.items() if entry.scene25}
    assert {task.name for task in plugin.tasks() if not task.available} == published, (
        "these need further assets"
    )
    assert simulator_options(config)["bridge"]


def no_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("RLINF_VLA_VULKAN_DIR", str(folder / "vulkan"))
    for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES"):
        monkeypatch.setenv(name, str(folder / "nothing.json"))


def test_a_machine_without_a_driver_gets_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_driver(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="rlinf-vla doctor --fix"):
        plugin.create(ManiSkillConfig(), 1)
    (check,) = [check for check in plugin.diagnose() if check.name == "Vulkan driver"]
    assert not check.ok
    assert check.repair is vulkan.install


def test_a_removed_driver_is_reported_by_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_driver(monkeypatch, tmp_path)
    options = {**simulator_options(ManiSkillConfig()), "render_backend": "cpu"}
    pool = SimulatorPool(
        ["-m", "rlinf_vla.envs.maniskill.simulator"], options, slots=1, processes=1, episode_limit=5
    )
    with pytest.raises(
        UserError, match=r"^no Vulkan driver that SAPIEN accepts: run `rlinf-vla doctor --fix`$"
    ):
        ProcessVectorEnv(pool, ("PushCube",))


def test_an_accepted_driver_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = vulkan.find()
    assert found is not None
    monkeypatch.setattr(
        vulkan, "accepted", lambda driver: pytest.fail("SAPIEN is asked again, in a process")
    )
    assert vulkan.find() == found


def test_a_sweep_has_a_part_per_task() -> None:
    config = ManiSkillConfig(tasks=["PickCube", "PushCube"], image_size=80)
    suites = plugin.suites(config)
    assert [
        (part.name, part.tasks, part.config.task, part.config.image_size) for part in suites
    ] == [("maniskill", (task,), task, 80) for task in config.tasks]
    assert [part.tasks for part in plugin.suites(ManiSkillConfig(task="StackCube"))] == [
        ("StackCube",)
    ]
    for tasks, words in (
        (["PickCube", "PickCube"], "twice"),
        (["PickCub"], "did you mean PickCube"),
    ):
        with pytest.raises(UserError, match=words):
            plugin.suites(ManiSkillConfig(tasks=tasks))
    with pytest.raises(UserError, match="choose one with"):
        plugin.create(config, 1)

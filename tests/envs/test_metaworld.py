"""Tests with Meta-World, in this Python environment if it is there, else in the one of `make metaworld`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes
from rlinf_vla.envs import mujoco_gl
from rlinf_vla.envs.metaworld.config import MetaWorldConfig
from rlinf_vla.envs.metaworld.conventions import to_common, to_world, tool_state
from rlinf_vla.envs.metaworld.plugin import plugin
from rlinf_vla.envs.metaworld.tasks import BENCHMARKS, INSTRUCTIONS, selected
from rlinf_vla.testing.env import (
    EPISODE_LIMIT,
    NUM_ENVS,
    VectorEnvConformance,
    assert_same_row,
    episodes,
    random_actions,
)
from tests.envs.outlined import outlined
from tests.skips import python_with_metaworld

FACTS = Path(__file__).with_name("metaworld_facts.py")


def make(groups: int = 1, **config: Any) -> list[VectorEnv]:
    common = {
        "num_envs": groups * NUM_ENVS,
        "processes": groups,
        "rendering": "fast",
        "image_size": 32,
        "python": python_with_metaworld(),
    }
    return plugin.create(MetaWorldConfig(**common | config), groups)


@pytest.mark.simulator
class TestReach(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return make(groups=2, episode_limit=EPISODE_LIMIT, action_repeat=5)

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        assert outlined(
            plugin,
            env,
            MetaWorldConfig(image_size=32, episode_limit=EPISODE_LIMIT, action_repeat=5),
        )


@pytest.mark.simulator
class TestDrawer(VectorEnvConformance):
    """Contacts, Meta-World's own observation and no images."""

    @classmethod
    def make(cls) -> list[VectorEnv]:
        tasks = ["drawer-close-v3", "push-v3"]
        return make(
            groups=2,
            tasks=tasks,
            episode_limit=EPISODE_LIMIT,
            action_repeat=5,
            cameras=[],
            state="full",
            reward="progress",
        )

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        config = MetaWorldConfig(
            tasks=["drawer-close-v3", "push-v3"],
            image_size=32,
            episode_limit=EPISODE_LIMIT,
            action_repeat=5,
            cameras=[],
            state="full",
        )
        assert outlined(plugin, env, config)


@pytest.fixture(scope="module")
def all_tasks() -> Iterator[VectorEnv]:
    (env,) = make(tasks=["MT50"], cameras=[], convention="metaworld", reward="dense", num_envs=2)
    yield env
    env.close()


def said(*arguments: str, **variables: str) -> bytes:
    """Output of the interpreter that has Meta-World."""
    command = [python_with_metaworld() or sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, check=True, env=os.environ | variables
    ).stdout


def places(*numbers: tuple[int, int]) -> Episodes:
    """Of (task, seed)."""
    return Episodes.first_attempts(*(torch.tensor(column) for column in zip(*numbers, strict=True)))


@pytest.mark.simulator
class TestTasks:
    def test_a_slot_changes_its_task(self, all_tasks: VectorEnv) -> None:
        """And the task it comes back to is as it was."""
        reach, window = (
            all_tasks.spec.tasks.index(name) for name in ("reach-v3", "window-open-v3")
        )
        actions = random_actions(all_tasks, 4, seed=1)
        first = all_tasks.reset(places((reach, 1), (window, 2)))
        assert first.instruction == [INSTRUCTIONS["reach-v3"], INSTRUCTIONS["window-open-v3"]]
        expected = all_tasks.step(actions)
        for task in (window, all_tasks.spec.tasks.index("push-v3"), reach):
            all_tasks.reset(places((task, 3), (reach, 4)))
            all_tasks.step(random_actions(all_tasks, 3, seed=2))
        all_tasks.reset(places((window, 2), (reach, 1)))
        swapped = all_tasks.step(actions[[1, 0]])
        for row, place in enumerate((1, 0)):
            assert_same_row(swapped.observation, row, expected.observation, place)
            assert torch.equal(swapped.reward[row], expected.reward[place])

    def test_it_steps_as_metaworld_does(self, all_tasks: VectorEnv) -> None:
        """States, dense rewards and success of a script that knows nothing of this package."""
        tasks = ("reach-v3", "button-press-v3", "push-v3")
        for task, facts in json.loads(said(str(FACTS), *tasks)).items():
            number = all_tasks.spec.tasks.index(task)
            seen = all_tasks.reset(places((number, 5), (number, 5)))
            assert seen.state[0].tolist() == torch.tensor(facts["start"][:4]).float().tolist()
            actions = torch.tensor(facts["actions"]).float().expand(2, -1, -1)
            result = all_tasks.step(actions)
            ended = int(result.valid[0].sum())
            assert (
                result.reward[0, :ended].tolist()
                == torch.tensor(facts["rewards"][:ended]).float().tolist()
            )
            assert result.success[0, :ended].tolist() == facts["successes"][:ended]
            if ended == len(facts["actions"]):
                assert (
                    result.observation.state[0].tolist()
                    == torch.tensor(facts["end"][:4]).float().tolist()
                )

    def test_the_names_are_those_of_the_package(self) -> None:
        code = "import json; from metaworld import env_dict as e; print(json.dumps([list(e.MT10_V3), list(e.MT50_V3)]))"
        ten, fifty = json.loads(said("-c", code))
        assert set(BENCHMARKS["MT10"]) == set(ten) and set(BENCHMARKS["MT50"]) == set(fifty)

    @pytest.mark.slow
    def test_the_image_is_metaworlds_turned_upright(self) -> None:
        size = 48
        cameras = ["base", "corner2", "topview"]
        (env,) = make(
            num_envs=1,
            tasks=["button-press-v3"],
            rendering="exact",
            image_size=size,
            cameras=cameras,
        )
        seen = env.reset(episodes(5)).images
        env.close()
        backend, _, name = env.spec.stack["renderer"].partition(": ")
        variables = mujoco_gl.Renderer(backend, name).environment()
        shown = said(str(FACTS), "--images", str(size), "button-press-v3", **variables)
        own = torch.from_numpy(np.frombuffer(shown, np.uint8).copy()).view(3, size, size, 3)
        assert torch.equal(seen["base"][0], own[0].flip(0, 1)), (
            "corner2 where LeRobot's data have it, rotated"
        )
        assert torch.equal(seen["corner2"][0], own[1].flip(0, 1))
        assert torch.equal(seen["topview"][0], own[2])


@pytest.mark.parametrize(
    ("devices", "visible", "chosen", "expected"),
    [
        ((2, 0, 1), None, None, 1),
        ((2, 0, 1), "2,1", None, 0),
        ((2, 0, 1), "2,1", "1", 1),
        ((2, 0, 1), "", None, None),
        ((2, 0, 1), "GPU-0a", None, None),
        ((2, 0, 1), "5", None, None),
        ((None,), None, None, None),
        ((), "3", "3", 3),
    ],
)
def test_egl_renders_on_the_gpu_of_the_policy(
    devices: tuple[int | None, ...], visible: str | None, chosen: str | None, expected: int | None
) -> None:
    """EGL numbers devices in an order of its own; a user's choice counts for all processes."""
    variables = {"CUDA_VISIBLE_DEVICES": visible, "MUJOCO_EGL_DEVICE_ID": chosen}
    given = {name: value for name, value in variables.items() if value is not None}
    assert mujoco_gl.device_for(devices, given) == expected
    set_for = mujoco_gl.Renderer("egl", "a GPU", expected).environment()
    assert set_for.get("MUJOCO_EGL_DEVICE_ID") == (None if expected is None else str(expected))
    assert "MUJOCO_EGL_DEVICE_ID" not in mujoco_gl.Renderer("none", "none", expected).environment()


@pytest.mark.parametrize(("devices", "chosen"), [((0, 1), "2"), ((0,), "gpu"), ((), "-1")])
def test_an_egl_device_that_is_not_there(devices: tuple[int | None, ...], chosen: str) -> None:
    with pytest.raises(UserError, match=rf"^MUJOCO_EGL_DEVICE_ID={chosen}: EGL's devices are"):
        mujoco_gl.device_for(devices, {"MUJOCO_EGL_DEVICE_ID": chosen})


@pytest.mark.parametrize("wanted", ["auto", "egl"])
def test_a_gpu_whose_driver_hangs_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
) -> None:
    """A program that never ends stands in for the interpreter of the simulators."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    names = {"egl": ("NVIDIA H200/PCIe", (0,)), "osmesa": ("llvmpipe", ())}
    monkeypatch.setattr(mujoco_gl, "renderer", lambda backend, *others: names[backend])
    monkeypatch.setattr(mujoco_gl, "TRIAL_S", 0.2)
    mujoco_gl.works_at_once.cache_clear()
    said = "8 processes that render there while CUDA computes hang or abort"
    if wanted == "egl":
        with pytest.raises(UserError, match=rf"^env\.renderer=egl: NVIDIA H200/PCIe: {said}; use"):
            mujoco_gl.find(wanted, str(python), processes=20)
    else:
        found = mujoco_gl.find(wanted, str(python), processes=20)
        assert found == mujoco_gl.Renderer("osmesa", "llvmpipe")
        assert said in caplog.text
    assert mujoco_gl.find("egl", str(python), needed=False).device == 0, "nothing is drawn"


@pytest.mark.parametrize("program", ["print(1, flush=True)", "raise SystemExit(1)"])
def test_cuda_computes_before_the_trial_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    """A program stands in for the products of matrices: one that computes, and one that cannot."""
    begun = tmp_path / "begun"
    touch = f"import pathlib; pathlib.Path({str(begun)!r}).touch()\n"
    monkeypatch.setattr(mujoco_gl, "COMPUTE", touch + program)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with mujoco_gl.computing():
        assert begun.exists()


@pytest.mark.slow
@pytest.mark.simulator
def test_several_processes_render_at_once() -> None:
    found = mujoco_gl.find("auto", None)
    mujoco_gl.works_at_once.cache_clear()
    assert mujoco_gl.works_at_once(found, None, 2)
    absent = mujoco_gl.Renderer("egl", "a GPU that is not there", 63)
    assert not mujoco_gl.works_at_once(absent, None, 2)


def test_axes_and_gripper_are_those_of_the_conventions() -> None:
    assert to_world(np.array([1, 2, 3, 1])).tolist() == [-2, 1, 3, -1], (
        "forward is Meta-World's y, and left its -x"
    )
    assert to_common(to_world(np.array([1.0, 2.0, 3.0, 1.0]))).tolist() == [1, 2, 3, 1]
    half = 0.5**0.5
    state = tool_state(np.array([0.1, 0.6, 0.2]), np.array([half, 0, 0, half]), 0.03)
    assert np.allclose(state, [0.6, -0.1, 0.2, 1, 0, 0, 0, 0.03]), (
        "a tool that faces forward is not turned"
    )


def test_every_task_has_an_instruction_of_its_own_sense() -> None:
    assert len(INSTRUCTIONS) == 50 and set(BENCHMARKS["MT10"]) < set(INSTRUCTIONS)
    assert len(set(INSTRUCTIONS.values())) == 50
    assert [task.name for task in plugin.tasks()] == list(INSTRUCTIONS)
    assert selected(["MT10"], {"push-v3": "push it"})["push-v3"] == "push it"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tasks": ["reach-v2"]}, "env.tasks=reach-v2 is unknown: did you mean reach-v3?"),
        ({"tasks": ["MT10", "reach-v3"]}, "env.tasks names reach-v3 twice"),
        ({"tasks": []}, "env.tasks"),
        ({"instructions": {"reach": "go"}}, "env.instructions=reach is unknown: did you mean"),
        ({"instructions": {"reach-v3": " "}}, "env.instructions.reach-v3 is empty"),
        ({"cameras": ["corner5"]}, "env.cameras=corner5 is unknown: did you mean corner"),
        ({"reward": "densest"}, "env.reward=densest is not known: use sparse, dense or progress"),
        ({"python": "/nowhere/python"}, "env.python=/nowhere/python is not there"),
        ({"num_envs": 3, "processes": 4}, "env.processes=4 is more than env.num_envs=3"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_values(MetaWorldConfig(**config), "env.")
        plugin.create(MetaWorldConfig(**config), 1)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

"""Known mistakes of adapters that cost success rate (docs/pitfalls.md), each made on purpose: a check must pass, and fail with the mistake.

No simulator is started here; tests/envs/test_libero.py has the tests that need one, tests/models/test_pitfalls.py those of policies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.envs.genesis import batch as genesis_batch
from rlinf_vla.envs.libero import conventions, scene, simulator
from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.plugin import simulator_options
from rlinf_vla.envs.libero.suites import LIMITS, limit
from rlinf_vla.rollout.demonstrations import collect_demonstrations
from rlinf_vla.testing.env import VectorEnvConformance
from rlinf_vla.testing.policy_calls import act, observations
from rlinf_vla.testing.toy_env import groups
from tests.data.test_from_dataset import Sees, played, write
from tests.envs.perfect_arm import MISTAKES, perfect_arm
from tests.models.tiny_openvla import OFT_PLUS

PHYSICAL = (
    VectorEnvConformance.test_the_tool_moves_the_way_it_is_told,
    VectorEnvConformance.test_the_gripper_opens_and_closes,
)


def caught(mistake: str) -> list[str]:
    """The names of the physical tests that fail."""
    failed = []
    arm = perfect_arm(mistake)
    for check in PHYSICAL:
        try:
            check(VectorEnvConformance(), arm)
        except AssertionError:
            failed.append(check.__name__)
    arm.close()
    return failed


def test_an_arm_that_follows_the_conventions_passes() -> None:
    assert caught("") == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_adapter_that_breaks_a_convention_is_caught_by_physics(mistake: str) -> None:
    """Polarity and threshold of the gripper, order of quaternions, units, frames, control rate, source of the state."""
    assert caught(mistake)


Convert = Callable[[NDArray[Any]], Sequence[float]]


def shorter_way(quaternion: NDArray[Any]) -> Sequence[float]:
    """The mistake: q and -q are the same orientation, so take the one with the smaller angle."""
    return conventions.axis_angle(quaternion if quaternion[0] >= 0 else -quaternion)


def jump(convert: Convert) -> float:
    """The largest change between neighbours while the tool, which points down, moves through pi."""
    swaying = [
        np.array([math.cos(angle / 2), math.sin(angle / 2), 0.0, 0.0])
        for angle in np.linspace(math.pi - 0.1, math.pi + 0.1, 21)
    ]
    found = [np.array(convert(each)) for each in swaying]
    return max(float(np.abs(b - a).max()) for a, b in itertools.pairwise(found))


def test_the_antipodal_flip_of_axis_angle() -> None:
    assert jump(conventions.axis_angle) < 0.02
    assert jump(shorter_way) > 6


@pytest.mark.parametrize("state", conventions.STATES)
def test_the_order_of_the_state(state: str) -> None:
    """Each number is at its place in docs/libero.md; exchanging any two gives another state."""
    position = np.array([0.1, 0.2, 0.3])
    quaternion = np.array([0.1, 0.7, 0.1, 0.7])
    fingers = np.array([0.03, -0.02])
    turn = conventions.axis_angle(quaternion)
    expected = {
        "quaternion": [*position, *quaternion, 0.03],
        "axis_angle": [*position, *turn, 0.03, -0.02],
    }[state]
    assert conventions.state_vector(position, quaternion, fingers, state) == pytest.approx(expected)
    mistaken = [
        conventions.state_vector(position, np.roll(quaternion, -1), fingers, state),  # x y z w
        conventions.state_vector(position, quaternion, fingers[::-1], state),
        conventions.state_vector(position[::-1], quaternion, fingers, state),
    ]
    for wrong in mistaken:
        assert np.abs(wrong - np.array(expected)).max() > 0.01


def test_images_upside_down_or_mirrored() -> None:
    """A letter F as OpenGL gives it, its first row at the bottom: it is an F in only one orientation."""
    letter = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]], np.uint8)
    raw = letter[::-1, :, None].repeat(3, axis=2)
    shown = {flip: conventions.flipped(raw, flip)[..., 0] for flip in conventions.FLIPS}
    assert np.array_equal(shown["upright"], letter)
    assert np.array_equal(shown["rot180"], letter[:, ::-1]), (
        "as in OpenVLA's data: upright, mirrored"
    )
    assert len({image.tobytes() for image in shown.values()}) == 3
    presets = {
        name: simulator_options(LiberoConfig(convention=name))["flip"]
        for name in ("common", "openvla")
    }
    assert presets == {"common": "upright", "openvla": "rot180"}


@torch.no_grad()
def test_cameras_are_selected_by_name_and_not_by_order() -> None:
    """An environment may list its cameras in any order; their images must not be exchanged."""
    from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
    from rlinf_vla.models.openvla.options import OpenVLAOFTOptions

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = OpenVLAOFTPolicy.load(
            OFT_PLUS, OpenVLAOFTOptions(random_weights=True, images=["base", "wrist"])
        )
    base, wrist = policy.spec.images
    seen = observations(policy, 2)
    reordered = replace(seen, images={wrist: seen.images[wrist], base: seen.images[base]})
    exchanged = replace(seen, images={base: seen.images[wrist], wrist: seen.images[base]})

    log_probs = [
        act(policy, policy.prepare(each)).log_prob for each in (seen, reordered, exchanged)
    ]
    assert torch.equal(log_probs[0], log_probs[1])
    assert not torch.equal(log_probs[0], log_probs[2])


def libero_period(module: ModuleType) -> float:
    """Seconds of physics in a control step of LIBERO, from its constants."""
    return module.SUBSTEPS * module.TIMESTEP


def test_the_control_rate_of_libero(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 Hz: at 5 instead of 15 Hz a published policy solved 0 of 11."""
    assert libero_period(scene) == pytest.approx(1 / scene.CONTROL_HZ) == pytest.approx(0.05)
    monkeypatch.setattr(scene, "SUBSTEPS", 100)
    assert libero_period(scene) != pytest.approx(1 / scene.CONTROL_HZ)


def test_the_control_rate_of_genesis() -> None:
    assert pytest.approx(20.0) == genesis_batch.CONTROL_HZ
    assert (
        pytest.approx(1 / genesis_batch.CONTROL_HZ)
        == genesis_batch.SUBSTEPS * genesis_batch.PHYSICS_DT_S
    )


def test_demonstrations_recorded_at_another_rate_are_refused(tmp_path: Path) -> None:
    """Counter world acts at 10 Hz, and its recordings have 10 steps per second."""
    path = write(tmp_path / "data", played())
    config = DemonstrationConfig(dataset=path)
    (env,) = groups(2, 1)
    collect_demonstrations(Sees(), (env,), config, 0)
    env.spec = replace(env.spec, control_hz=15.0)
    with pytest.raises(UserError, match="has 10 steps per second, the environment 15"):
        collect_demonstrations(Sees(), (env,), config, 0)


PUBLISHED = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}


def test_the_horizon_is_the_published_one_without_waiting_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500 instead of 600 steps cost another benchmark 10 points."""
    assert {suite: limit(suite) for suite in PUBLISHED} == PUBLISHED
    assert simulator_options(LiberoConfig())["wait_steps"] == 10
    assert scene.WAIT.tolist() == [0, 0, 0, 0, 0, 0, -1], "gripper open, in robosuite's sign"
    monkeypatch.setitem(LIMITS, "libero_10", 500)
    assert {suite: limit(suite) for suite in PUBLISHED} != PUBLISHED


STACK = {
    "renderer": "egl: llvmpipe",
    "rendering": "exact",
    "convention": "rot180, axis_angle, minus_opens",
    "wait_steps": 10,
    "wait_gripper": "open",
}


@pytest.mark.parametrize(
    ("mujoco", "rendering", "words_of_it"),
    [
        ("2.3.7", "exact", "no"),
        ("3.3.2", "lazy", "no"),
        ("3.3.3", "exact", "renders darker"),
        ("3.17.0", "exact", "renders darker"),
        ("2.3.7", "fast", "no antialiasing"),
    ],
)
def test_a_result_names_differences_from_the_reference(
    monkeypatch: pytest.MonkeyPatch, mujoco: str, rendering: str, words_of_it: str
) -> None:
    """MuJoCo 3.3.3 moved published checkpoints from 88 to 68 %; everything else that changes a result is named, too."""
    monkeypatch.setattr(simulator, "version", lambda name: mujoco if name == "mujoco" else "1.0")
    found = simulator.stack(STACK | {"rendering": rendering})
    assert words_of_it in found["differs_from_reference"] and found["mujoco"] == mujoco
    assert found.keys() >= {
        "renderer",
        "rendering",
        "convention",
        "wait_steps",
        "robosuite",
        "numpy",
        "python",
    }


def test_an_error_in_libero_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIBERO's own reset retries after any error, without end; only a failed random placement may be retried."""

    class RandomizationError(Exception): ...

    errors = ModuleType("robosuite.utils.errors")
    errors.RandomizationError = RandomizationError  # type: ignore[attr-defined]
    for name, module in (
        ("robosuite", ModuleType("robosuite")),
        ("robosuite.utils", ModuleType("utils")),
        (errors.__name__, errors),
    ):
        monkeypatch.setitem(__import__("sys").modules, name, module)
    attempts = iter([RandomizationError(), None])

    def drawn() -> int:
        if (error := next(attempts)) is not None:
            raise error
        return 7

    def broken() -> int:
        raise KeyError("asset")

    def never() -> int:
        raise RandomizationError

    assert scene.until_placed(drawn) == 7
    with pytest.raises(KeyError):
        scene.until_placed(broken)
    with pytest.raises(RuntimeError, match="no place"):
        scene.until_placed(never)


def test_libero_draws_from_its_own_seed_and_restores_the_generator() -> None:
    """LIBERO's ``env.seed`` seeds numpy's global generator, which other code uses, too."""
    np.random.seed(1)
    expected = np.random.rand(3)[1:]
    np.random.seed(1)
    np.random.rand()
    with scene.drawn_from(0):
        first = np.random.rand(4)
    assert np.array_equal(np.random.rand(2), expected), "as if nothing had been drawn in between"
    with scene.drawn_from(0):
        assert np.array_equal(np.random.rand(4), first)
    with scene.drawn_from(7):
        assert not np.array_equal(np.random.rand(4), first)

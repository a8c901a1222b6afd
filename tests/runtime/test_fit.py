"""A policy that the environment would misunderstand is refused before the first episode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Convention, EnvSpec, PolicySpec, ToolUnits
from rlinf_vla.envs.libero.conventions import native
from rlinf_vla.runtime.fit import check_fit, connect, fitted, remarks

POLICY = PolicySpec(8, 7, 0, {"base": (224, 224)})
LIBERO = {"gripper": "minus_opens", "state": "axis_angle", "flip": "rot180"}
BRIDGE, PANDA = ToolUnits(1.0, 1.0), ToolUnits(0.1, 0.1)


class Policy:
    name = "any"
    sees_depth = False

    def __init__(self, convention: Convention | None = None, **others: Any) -> None:
        self.spec = replace(POLICY, convention=convention or Convention(), **others)
        self.told: tuple[str, ...] = ()

    def fit_instructions(self, instructions: tuple[str, ...]) -> None:
        self.told = instructions


def env(**others: Any) -> EnvSpec:
    return EnvSpec(
        1, 7, 8, 20.0, 100, {"base": (256, 256)}, ("task",), torch.device("cpu"), **others
    )


def libero(**options: str) -> EnvSpec:
    told = native(LIBERO | options)
    return env(native=Convention(**told | {"tool": ToolUnits(*told["tool"])}))


def refusal(policy: Any, spec: EnvSpec) -> str:
    with pytest.raises(UserError) as caught:
        check_fit(policy, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Group:
    """A vector environment, and the cameras whose images it was told to show as JPEG, too."""

    def __init__(self) -> None:
        self.spec = env()
        self.jpeg = list[str]()

    def add_jpeg(self, cameras: list[str]) -> None:
        self.jpeg = cameras


def test_environments_pass_images_through_jpeg_for_the_policies_that_need_it() -> None:
    groups = [Group(), Group()]
    for wanted in (True, False):
        connect(Policy(Convention(jpeg=wanted)), groups)  # type: ignore[arg-type]
        assert [group.jpeg for group in groups] == [["base"] if wanted else []] * 2
    with pytest.raises(UserError, match="the policy's actions have 4 dimensions"):
        connect(Policy(action_dim=4), groups)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "needed"),
    [(libero(), "close_positive"), (env(tool=PANDA), "open_positive")],
    ids=["libero", "common"],
)
def test_a_gripper_from_0_to_1_does_not_drive_one_of_plus_minus_1(
    spec: EnvSpec, needed: str
) -> None:
    told = refusal(Policy(Convention(gripper="zero_to_one")), spec)
    assert (
        "the policy's gripper action means: 0 closes, 1 opens" in told
        and f"set model.options.gripper={needed}" in told
    )
    check_fit(Policy(Convention(gripper=needed)), spec)  # type: ignore[arg-type]


def test_a_gripper_of_the_opposite_sign_is_refused() -> None:
    told = refusal(
        Policy(Convention(gripper="close_positive"), env={"convention": "openvla"}), env(tool=PANDA)
    )
    assert (
        "set model.options.gripper=open_positive, or with env=libero set env.convention=openvla"
        in told
    )


def test_metres_are_not_sent_to_an_arm_for_which_1_is_less() -> None:
    told = refusal(Policy(Convention(BRIDGE)), env(tool=PANDA))
    assert (
        "an action of 1 means 1 m and 1 rad to the policy, 0.1 m and 0.1 rad to the environment: choose another env.control_mode"
        in told
    )
    assert "0.05 m and 0.5 rad" in refusal(Policy(Convention(BRIDGE)), libero())
    check_fit(Policy(Convention(PANDA)), env(tool=ToolUnits(0.1, 0.1)))  # type: ignore[arg-type]


def test_rotations_count_only_in_actions_that_have_them() -> None:
    position_only = replace(env(tool=ToolUnits(0.1, 0.0)), action_dim=4)
    check_fit(Policy(Convention(PANDA), action_dim=4), position_only)  # type: ignore[arg-type]
    assert "0.1 m and 0 rad" in refusal(Policy(Convention(PANDA)), env(tool=ToolUnits(0.1, 0.0)))


def test_a_state_of_the_same_size_and_another_layout_is_refused() -> None:
    policy = Policy(Convention(state="axis_angle"), state_dim=8)
    assert (
        "needs state as axis_angle, the environment gives quaternion: set env.state=axis_angle"
        in refusal(policy, libero(state="quaternion"))
    )
    check_fit(policy, libero())  # type: ignore[arg-type]
    check_fit(Policy(Convention(state="axis_angle")), libero(state="quaternion"))  # type: ignore[arg-type]  # reads no state


def test_motions_are_known_whatever_the_states_are() -> None:
    """A deadline and limits act on motions; LIBERO's own gripper has the other sign."""
    joints = Convention(BRIDGE, "open_positive", "qpos", "upright")
    assert env(tool=PANDA).motion == PANDA and env(native=joints).motion == BRIDGE
    assert libero().motion is None and env().motion is None


def test_a_policy_of_one_suite_of_libero_does_not_play_another() -> None:
    policy = Policy(suite="libero_10")
    others = replace(libero(), tasks=("libero_10-0", "libero_spatial-0"))
    assert (
        "the policy was trained on libero_10 alone, env.suite has libero_spatial-0: set env.suite=libero_10"
        in refusal(policy, others)
    )
    for tasks in (("libero_10-0", "libero_10_swap-1"), ("PushCube",)):
        check_fit(policy, replace(libero(), tasks=tasks))  # type: ignore[arg-type]
    check_fit(Policy(), others)  # type: ignore[arg-type]


def test_a_state_of_another_size_is_refused() -> None:
    assert "the policy's state has 9 numbers, the environment's 8" in refusal(
        Policy(state_dim=9), env()
    )


def test_distances_are_shown_only_to_a_policy_that_reads_them() -> None:
    cameras = {"base": (224, 224), "base_depth": (224, 224)}
    policy = Policy(images=cameras)
    spec = replace(env(), images=cameras)
    assert "image 'base_depth' shows distances, which model=any cannot read" in refusal(
        policy, spec
    )
    policy.sees_depth = True
    check_fit(policy, spec)  # type: ignore[arg-type]


def test_small_images_are_enlarged_only_by_a_policy_with_bars() -> None:
    """A checkpoint of SmolVLA was trained on images that it enlarges: rendering larger ones would show it others."""
    small = replace(env(), images={"base": (100, 100)})
    assert "set env.image_size=224" in refusal(Policy(), small)
    check_fit(Policy(bars=1.0), small)  # type: ignore[arg-type]


def test_images_turned_otherwise_are_refused() -> None:
    policy = Policy(Convention(images="rot180"), env={"convention": "openvla"})
    assert (
        "needs images as rot180, the environment gives upright: with env=libero set env.convention=openvla"
        in refusal(policy, libero(flip="upright"))
    )


def test_what_is_not_known_is_not_compared() -> None:
    for convention in (Convention(), Convention(BRIDGE, "zero_to_one", "axis_angle", "rot180")):
        check_fit(Policy(convention, state_dim=8), env())  # type: ignore[arg-type]
    check_fit(Policy(), libero())  # type: ignore[arg-type]


def test_the_policy_learns_all_instructions_and_remarks_are_said() -> None:
    policy = Policy()
    check_fit(policy, env(instructions=("one", "another")))  # type: ignore[arg-type]
    assert policy.told == ("one", "another")
    assert remarks(policy.spec, env()) == [
        "image base: rendered at 256x256, resized once, to the policy's 224x224"
    ]
    assert remarks(policy.spec, replace(env(), images={"base": (224, 224)})) == []


@dataclass
class Node:
    convention: str | None = None
    cameras: list[str] | None = None


def test_null_keys_of_the_environment_get_what_the_policy_needs() -> None:
    needs = replace(POLICY, env={"convention": "openvla", "cameras": ["base", "wrist"], "other": 1})
    assert fitted(Node(), needs) == Node("openvla", ["base", "wrist"])
    assert fitted(Node(convention="common"), needs) == Node("common", ["base", "wrist"])
    assert fitted(Node(), POLICY) == Node()

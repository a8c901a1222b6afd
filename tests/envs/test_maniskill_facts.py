"""What must hold within a simulator of ManiSkill, asked of scripts that start one in their own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.envs.maniskill import vulkan
from rlinf_vla.envs.maniskill.plates_splits import MOVE_STEP, OBJECTS_APART, SPLITS
from tests.skips import needs

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.slow,
    needs("maniskill"),
]


def asked(name: str, *words: str) -> dict[str, Any]:
    """Answer of a script, which has a simulator in its own process."""
    driver = vulkan.find()
    assert driver is not None, "no Vulkan driver: run `rlinf-vla doctor --fix`"
    environment = {**os.environ, **driver.environment}
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, str(script), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return asked("maniskill_facts.py")


@pytest.fixture(scope="module")
def plates() -> dict[str, Any]:
    return asked("plates_facts.py")


def test_the_experts_succeed() -> None:
    success = asked("maniskill_facts.py", "experts")
    assert min(success["alone"].values()) >= 0.8, success
    assert success["in_poses"] == 1.0
    assert min(success["under_noise"].values()) >= 0.6, success


@pytest.mark.nightly
def test_a_positive_rotation_turns_in_the_positive_direction(facts: dict[str, Any]) -> None:
    for axis, turn in enumerate(facts["turns"]):
        assert turn[axis] > 0.15, facts["turns"]
        assert all(abs(part) < 0.1 for other, part in enumerate(turn) if other != axis), facts[
            "turns"
        ]


def test_an_episode_ends_with_its_success_unless_told_otherwise(facts: dict[str, Any]) -> None:
    assert facts["after_a_success"] == {"True": [True, True, True], "False": [False, False, True]}


def test_low_poly_visuals_do_not_change_the_physics(facts: dict[str, Any]) -> None:
    assert facts["low_poly_is_the_same_physics"]


def test_the_gpu_backend_as_a_batch_of_one_is_the_cpu_backend(facts: dict[str, Any]) -> None:
    assert facts["a_batch_of_one_is_the_cpu_backend"]


def test_a_batch_forgets_the_contacts_of_the_last_episode(facts: dict[str, Any]) -> None:
    assert facts["reset_while_grasping"] == {"before": 1.0, "after": 0.0, "reward": 0.0}


def test_a_reset_of_one_environment_keeps_the_targets_of_the_others(facts: dict[str, Any]) -> None:
    only_the_second = [False, True, False]
    every = [True] * 3
    assert facts["targets_after_a_reset"] == {
        "PDJointPosController": only_the_second,
        "PDEEPoseController": only_the_second,
        "mask": every,
    }


def test_fast_paths_have_the_bits_of_maniskill(facts: dict[str, Any]) -> None:
    """So do whole episodes, in another test: a batch does not use them."""
    assert facts["poses_have_the_same_bits"]
    assert facts["pictures_have_the_same_bits"]


def test_inverse_kinematics_does_not_depend_on_other_packages(facts: dict[str, Any]) -> None:
    """SAPIEN would take the Python of ``pin`` if that is installed, for instance beside franky's simulator."""
    assert facts["kinematics"] == "sapien.pysapien_pinocchio"


def test_put_on_plate_draws_layouts_without_collisions(facts: dict[str, Any]) -> None:
    layouts = facts["layouts"]
    assert layouts["apart"] >= 0.08
    assert layouts["to_plate"] >= 0.09
    assert min(layouts["targets"]) > 60


def test_put_on_plate_names_the_cube(facts: dict[str, Any]) -> None:
    for text, colour in facts["instructions"]:
        assert text == f"put the {colour} cube on the plate"
    assert {colour for _, colour in facts["instructions"]} == {"red", "green", "blue"}


def test_put_on_plate_rewards_grasping_then_placing(facts: dict[str, Any]) -> None:
    rewards = [reward for reward in facts["progress_rewards"] if reward]
    assert rewards == [0.5, 0.5], "half at the grasp and half at the end of an expert's episode"


@pytest.mark.nightly
def test_the_expert_solves_every_split_of_put_on_plate_25() -> None:
    success = asked("plates_facts.py", "experts")
    solved, rewards = success["in_training"]
    assert solved >= 0.8
    assert rewards == [0.5, 0.5], "half at the grasp and half at the end of an expert's episode"
    assert list(success["splits"]) == list(SPLITS)
    assert min(success["splits"].values()) >= 0.5, success


LOOKS_THE_SAME = {"main", "unseen_instruction", "moved_object"}
SAYS_OTHERWISE = {
    "unseen_object",
    "unseen_receptacle",
    "unseen_instruction",
    "two_unseen_objects",
    "two_unseen_receptacles",
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_of_put_on_plate_25_starts_as_training_does_but_for_its_change(
    plates: dict[str, Any], split: str
) -> None:
    seen = plates["splits"][split]
    assert seen["image"] == (split not in LOOKS_THE_SAME)
    assert seen["text"] == (split in SAYS_OTHERWISE)
    assert seen["state"] == (split == "robot_pose")
    assert seen["is_a_blend"] == (split in LOOKS_THE_SAME or split.startswith(("noise", "texture")))
    if split.startswith("noise"):
        assert seen["changed"] > 0.98
    elif split.startswith("texture"):
        assert 0.05 < seen["changed"] < 0.6, "robot, object and receptacle alone"
    moved = 0.0 if split != "position" else 0.04
    assert moved <= seen["object"] <= moved + (0.011 if split != "position" else 0.4), (
        "places are the same; heights of objects differ"
    )


def test_an_episode_of_put_on_plate_25_repeats(plates: dict[str, Any]) -> None:
    assert plates["repeats"]
    assert plates["a_batch_of_one_is_the_cpu_backend"]


def test_the_object_moves_once_in_the_middle_of_an_episode(plates: dict[str, Any]) -> None:
    distances = plates["moves"]["distances"]
    assert max(distances[:MOVE_STEP]) < 0.002
    assert min(distances[MOVE_STEP:]) > OBJECTS_APART - 0.005
    assert plates["moves"]["from_the_end"] < 0.005


def test_layouts_of_several_environments_are_those_of_each_alone() -> None:
    answer = asked("row_draws_facts.py")
    assert answer["rows"]
    assert all(answer["refused"].values()), answer
    assert all(answer["tasks"].values()), answer

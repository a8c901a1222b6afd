"""A scene file that uses all features, run in Genesis."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.envs.genesis.kernels import cache_dir
from rlinf_vla.envs.genesis.loading import read_scene
from rlinf_vla.envs.genesis.scene import Box, Cylinder, Inside, Lifted, Mesh, Sphere
from tests.skips import needs

SCENE = Path(__file__).with_name("fixtures") / "everything.yaml"

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.genesis,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    needs("genesis"),
]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    command = [
        sys.executable,
        str(Path(__file__).with_name("genesis_facts.py")),
        str(cache_dir(None)),
        str(SCENE),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_file_uses_all_features() -> None:
    scene, _ = read_scene(SCENE)
    assert {type(thing.shape) for thing in scene.things.values()} == {Mesh, Box, Sphere, Cylinder}
    assert {type(predicate) for predicate in scene.success} == {Lifted, Inside}
    assert scene.things["ghost"].fixed and not scene.things["ghost"].collision


def test_objects_are_where_the_file_puts_them(facts: dict[str, Any]) -> None:
    """The mesh too, whose own origin is a corner."""
    standing = facts["standing"]
    assert all(way < 0.003 for way in standing["moved"].values()), standing
    expected = {"wedge": 0.0, "cube": 0.0, "stand": 0.0, "ball": 0.06, "ghost": 0.22}
    assert standing["low"] == pytest.approx(expected, abs=0.003)


def test_objects_without_collision_are_passed_through(facts: dict[str, Any]) -> None:
    """The ghost is where the hand is."""
    assert facts["standing"]["tool_moved"] < 0.01


def test_predicates_hold_one_by_one(facts: dict[str, Any]) -> None:
    lifted, inside = facts["standing"]["holds"]
    assert lifted == [True] * 4 and inside == [False] * 4


def test_the_expert_succeeds(facts: dict[str, Any]) -> None:
    assert sum(facts["solved"]) >= 3, facts["solved"]
    assert set(facts["told"]) == {
        f"put the {name} at the right, and leave the ball on its stand"
        for name in ("wedge", "cube")
    }


def test_every_camera_sees_something(facts: dict[str, Any]) -> None:
    assert facts["images"].keys() == {"base", "side"}
    assert all(
        shape == [2, 48, 48, 3] and contrast > 10 for shape, contrast in facts["images"].values()
    )


def test_low_poly_visuals_are_the_same_physics(facts: dict[str, Any]) -> None:
    """Every number of every state, through contacts too."""
    assert facts["low_poly_is_the_same_physics"] and facts["looks_differ"]

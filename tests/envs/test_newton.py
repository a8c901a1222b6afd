"""Tests with Newton. Warp compiles its kernels once per machine, which takes minutes, and stores them in the user's cache."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files as package_files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.envs.newton.config import NewtonConfig
from rlinf_vla.envs.newton.plugin import plugin
from rlinf_vla.testing.env import NUM_ENVS, assert_same_row, episodes, random_actions
from tests.envs.outlined import outlined
from tests.envs.pick_cube import PICK_CUBE, PickCubeConformance, PutOnPlateTests
from tests.skips import needs

real = [pytest.mark.simulator, pytest.mark.timeout(1800), needs("newton")]
"""Of tests that start Newton."""


def make(groups: int = 1, num_envs: int = NUM_ENVS, **config: Any) -> list[VectorEnv]:
    return plugin.create(NewtonConfig(num_envs=groups * num_envs, **config), groups)


class TestPickCube(PickCubeConformance):
    pytestmark = real

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return make(groups=2, **PICK_CUBE)

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        assert outlined(plugin, env, NewtonConfig(**PICK_CUBE))


@pytest.fixture(scope="module")
def plates() -> Iterator[VectorEnv]:
    (env,) = make(task="PutOnPlate", num_envs=5, image_size=64)
    yield env
    env.close()


class TestPutOnPlate(PutOnPlateTests):
    pytestmark = real

    def test_the_image_shows_all(self, plates: VectorEnv) -> None:
        image = plates.reset(episodes(*range(5))).images["base"].float()
        red, green, blue = image.unbind(-1)
        for colour, others in ((red, (green, blue)), (green, (red, blue)), (blue, (red, green))):
            seen = (colour > 100) & (colour > 2 * others[0]) & (colour > 2 * others[1])
            assert (seen.flatten(1).sum(1) > 5).sum() >= 4, "the arm may hide one"
        plate = (image > 180).all(-1)[:, 20:, 40:]
        assert (plate.flatten(1).sum(1) > 30).all(), (
            "white, to the right: the camera looks at the robot"
        )


class TestBatchSizes:
    pytestmark = real

    @pytest.mark.nightly
    def test_an_episode_does_not_depend_on_the_size_of_the_batch(self) -> None:
        several, alone = make(num_envs=3)[0], make(num_envs=1)[0]
        try:
            actions = random_actions(several, 10, seed=2)
            several.reset(episodes(7, 8, 9))
            alone.reset(episodes(8))
            assert_same_row(
                several.step(actions).observation, 1, alone.step(actions[1:2]).observation, 0
            )
        finally:
            several.close()
            alone.close()


def test_importing_the_plugin_imports_no_simulator() -> None:
    code = "import sys, rlinf_vla.envs.newton.plugin; sys.exit(bool({'newton', 'warp', 'mujoco'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("config", "groups", "message"),
    [
        ({"task": "PickCub"}, 1, "env.task=PickCub is unknown: did you mean PickCube?"),
        ({"cameras": ["bas"]}, 1, "did you mean base?"),
        ({"num_envs": 10}, 4, "env.num_envs=10 cannot be shared by 4 groups: use 8"),
        ({"tasks": ["PickCube", "PutOnPlate"]}, 1, "choose one with"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(
    config: dict[str, Any], groups: int, message: str
) -> None:
    with pytest.raises(UserError) as error:
        plugin.create(NewtonConfig(**config), groups)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_tasks_are_listed_and_a_sweep_has_a_part_per_task() -> None:
    assert {task.name: task.has_expert for task in plugin.tasks()} == {
        "PickCube": True,
        "PutOnPlate": True,
    }
    parts = plugin.suites(NewtonConfig(tasks=["PickCube", "PutOnPlate"]))
    assert [part.tasks for part in parts] == [("PickCube",), ("PutOnPlate",)]


@needs("maniskill")
def test_the_panda_has_the_numbers_of_a_published_model() -> None:
    """Masses, joint limits and places of the links, in ManiSkill's file."""
    maniskill = find_spec("mani_skill")  # which finds the package, but imports nothing
    assert maniskill is not None
    own = ElementTree.parse(str(package_files("rlinf_vla.envs.newton").joinpath("panda.xml")))
    published = ElementTree.parse(
        Path(str(maniskill.origin)).parent / "assets" / "robots" / "panda" / "panda_v2.urdf"
    )
    for name in [f"link{i}" for i in range(8)] + ["hand"]:
        body = own.find(f".//body[@name='{name}']")
        assert body is not None
        mass = published.find(f"./link[@name='panda_{name}']/inertial/mass")
        assert mass is not None
        assert sum(float(geom.attrib["mass"]) for geom in body.findall("geom")) == pytest.approx(
            float(mass.attrib["value"]), abs=1e-6
        )
    for i in range(1, 8):
        body = own.find(f".//body[@name='link{i}']")
        joint = published.find(f"./joint[@name='panda_joint{i}']")
        assert body is not None and joint is not None
        place, limit, hinge = joint.find("origin"), joint.find("limit"), body.find("joint")
        assert place is not None and limit is not None and hinge is not None
        assert numbers(body.get("pos", "0 0 0")) == numbers(place.attrib["xyz"])
        roll = float(place.attrib["rpy"].split()[0])
        w, x, *rest = numbers(body.get("quat", "1 0 0 0"))
        assert 2 * math.atan2(x, w) == pytest.approx(roll) and rest == [0, 0]
        assert numbers(hinge.attrib["range"]) == [
            float(limit.attrib["lower"]),
            float(limit.attrib["upper"]),
        ]
        assert numbers(hinge.attrib["actuatorfrcrange"])[1] == float(limit.attrib["effort"])


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split()]

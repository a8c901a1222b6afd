"""Tests of the perturbed suites. ``libero_plus_facts.py`` plays them once for all tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import Episodes
from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.distractors import choices
from rlinf_vla.envs.libero.perturbations import DIMENSIONS, SEVERITIES, Draw, Perturbation, draw
from rlinf_vla.envs.libero.plugin import episode_limit, has_expert, plugin, simulator_options
from rlinf_vla.envs.libero.rewordings import NOUNS, VERBS, rewordings
from rlinf_vla.envs.libero.sensor_noise import KINDS, SensorNoise
from rlinf_vla.envs.libero.suites import LIMITS, PLUS, of_suite
from tests.skips import needs

pytestmark = needs("libero")

BASE = "libero_spatial"
PICTURES = np.random.RandomState(0).randint(0, 256, (8, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    from rlinf_vla.envs import mujoco_gl as gl

    environment = {**os.environ, **gl.find("auto", None).environment()}
    script = Path(__file__).with_name("libero_plus_facts.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.nightly
@pytest.mark.simulator
@pytest.mark.timeout(900)
class TestFacts:
    @pytest.mark.parametrize("severity", ["_2", "_4"])
    @pytest.mark.parametrize("dimension", DIMENSIONS)
    def test_a_perturbation_changes_what_it_says_and_nothing_else(
        self, facts: dict[str, Any], dimension: str, severity: str
    ) -> None:
        found = facts["changes"][f"{BASE}_plus_{dimension}{severity}"]
        assert found["instruction"] == (dimension == "language")
        assert (found["base"] > 0) == (dimension != "language")
        if dimension not in (
            "background",
            "distractors",
        ):  # a camera at the wrist need not see them
            assert (found["wrist"] > 0) == (dimension in ("light", "layout", "initial_state"))
        if (
            dimension == "distractors"
        ):  # MuJoCo solves their contacts together with those of the task
            assert found["largest"] < 1e-6
        else:
            assert found["trajectory"] == (dimension in ("layout", "initial_state"))
        assert (found["arm"] > 0) == (dimension == "initial_state")
        assert (found["objects"] > 0) == (dimension == "layout")
        assert found["rest"] == 0

    def test_the_unperturbed_suite_is_as_before_between_perturbed_episodes(
        self, facts: dict[str, Any]
    ) -> None:
        found = facts["changes"][BASE]
        assert not any(found.values()), found

    def test_the_severity_is_the_size_of_the_change(self, facts: dict[str, Any]) -> None:
        small, large = (
            {each: facts["changes"][f"{BASE}_plus_{each}_{number}"] for each in DIMENSIONS}
            for number in (2, 4)
        )
        assert small["initial_state"]["arm"] == pytest.approx(0.2) and large["initial_state"][
            "arm"
        ] == pytest.approx(0.4)
        assert (
            small["layout"]["objects"] <= 0.02
            and small["layout"]["objects"] < large["layout"]["objects"] <= 0.04
        )
        for dimension in ("camera", "light", "background", "sensor_noise", "distractors"):
            assert small[dimension]["base"] < large[dimension]["base"], dimension

    def test_an_episode_repeats_to_the_bit_and_another_seed_is_perturbed_otherwise(
        self, facts: dict[str, Any]
    ) -> None:
        assert all(facts["again"].values()), facts["again"]
        changed = {name for name, differs in facts["another seed"].items() if differs}
        assert changed == {
            name for name in facts["another seed"] if name != BASE and "language" not in name
        }
        assert (
            facts["instructions"][f"{BASE}_plus_language"]
            != facts["instructions of another seed"][f"{BASE}_plus_language"]
        )

    def test_displaced_objects_stay_where_they_are(self, facts: dict[str, Any]) -> None:
        """In these seeds the stored state has a bowl on the rim of the plate."""
        assert max(facts["drifts"]) < 0.002, facts["drifts"]

    def test_distractors_are_seen_and_touch_nothing_at_the_start(
        self, facts: dict[str, Any]
    ) -> None:
        assert len({tuple(each["names"]) for each in facts["distracted"].values()}) > 1
        for episode, found in facts["distracted"].items():
            assert len(found["names"]) == len(set(found["names"])) == int(episode[0])
            assert not found["touch"] and min(found["pixels"]) >= 3, found
            assert not {name.removeprefix("distractor_") for name in found["names"]} & {
                name[:-2] for name in found["held"]
            }

    def test_distractors_stand_still_and_others_stay_parked(self, facts: dict[str, Any]) -> None:
        for found in facts["distracted"].values():
            assert (
                found["moved"] < 0.002
                and found["parked"]
                and max(abs(each + 2) for each in found["parked"]) < 1e-6
            ), found

    def test_distractors_do_not_change_what_success_is(self, facts: dict[str, Any]) -> None:
        found = facts["distracted"]["2, 3"]
        assert (
            not found["standing"]
            and not found["success with a distractor in its place"]
            and found["success"]
        ), found

    def test_distractors_do_not_change_a_drawn_initial_state(self, facts: dict[str, Any]) -> None:
        found = facts["drawn"]
        assert (
            found["base"] > 0
            and found["arm"] == found["objects"] == found["rest"] == 0
            and found["largest"] < 1e-6
        ), found

    def test_a_suite_without_severity_draws_it(self, facts: dict[str, Any]) -> None:
        for dimension in DIMENSIONS:
            severity = draw(Perturbation(dimension, 0), 0, 3).severity
            if severity in (2, 4):
                named = f"{BASE}_plus_{dimension}"
                assert facts["digests"][named] == facts["digests"][f"{named}_{severity}"]

    def test_episodes_that_share_a_scene_are_independent(self, facts: dict[str, Any]) -> None:
        assert facts["interleaved"]

    def test_every_instruction_is_listed(self, facts: dict[str, Any]) -> None:
        assert {
            *facts["instructions"].values(),
            *facts["instructions of another seed"].values(),
        } <= set(facts["listed"])

    def test_simulator_processes_show_the_same_bits(self, facts: dict[str, Any]) -> None:
        from tests.envs.libero_plus_facts import NAMES, OPTIONS, SEED, digest

        (env,) = plugin.create(LiberoConfig(**OPTIONS, num_envs=len(NAMES), processes=2), 1)
        seen = env.reset(
            Episodes.first_attempts(torch.arange(len(NAMES)), torch.full((len(NAMES),), SEED))
        )
        env.close()
        for row, name in enumerate(NAMES):
            images = {camera: seen.images[camera][row].numpy() for camera in OPTIONS["cameras"]}
            assert digest(images, seen.state[row].numpy()) == facts["digests"][name][0], name
            assert seen.instruction[row] == facts["instructions"][name]


def test_distractors_are_not_in_the_scene_and_not_named() -> None:
    assert "milk" not in choices(["milk"], "") and "milk" not in choices([], "pick up the milk")
    assert "cookies" not in choices([], "pick up the black bowl next to the cookie box")
    assert {"tomato_sauce", "bbq_sauce"} & {
        *choices([], "put both the alphabet soup and the tomato sauce in the basket")
    } == set()
    assert "salad_dressing" not in choices(["new_salad_dressing"], "")
    for task in (task for suite in LIMITS for task in of_suite(suite)):
        text = task.bddl.read_text()
        found = choices(
            re.findall(r"- (\w+)", text[text.index("(:objects") : text.index("(:obj_of_interest")]),
            task.instruction,
        )
        assert len(found) >= SEVERITIES, task.name


def test_the_perturbed_suites() -> None:
    assert len(PLUS) == 5 * 8 * 6
    for suite, (base, perturbation) in PLUS.items():
        assert suite.startswith(f"{base}_plus_{perturbation.dimension}")
    tasks, plain = of_suite("libero_goal_plus_camera_3"), of_suite("libero_goal")
    assert [task.name for task in tasks] == [
        f"libero_goal_plus_camera_3-{number}" for number in range(10)
    ]
    assert [(task.bddl, task.init_states, task.instruction) for task in tasks] == [
        (each.bddl, each.init_states, each.instruction) for each in plain
    ]
    parts = plugin.suites(LiberoConfig(suites=["libero_10", "libero_10_plus_light"], tasks=[1]))
    assert [(part.name, part.tasks, episode_limit(part.config)) for part in parts] == [
        ("libero_10", ("libero_10-1",), 520),
        ("libero_10_plus_light", ("libero_10_plus_light-1",), 520),
    ]
    assert has_expert(of_suite("libero_object_plus_layout")[0]) and not has_expert(tasks[0])


def test_the_severity_does_not_change_the_direction() -> None:
    for dimension in DIMENSIONS:
        draws = [draw(Perturbation(dimension, severity), 1, 2**40 + 7) for severity in range(6)]
        assert [each.severity for each in draws[1:]] == [1, 2, 3, 4, 5] and 1 <= draws[
            0
        ].severity <= 5
        assert len({float(each.random.uniform()) for each in draws}) == 1
    drawn = {draw(Perturbation("light", 0), 0, seed).severity for seed in range(50)}
    assert drawn == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("kind", KINDS)
def test_sensor_noise_grows_with_the_severity_and_repeats(kind: str) -> None:
    changed = []
    for severity in (1, 2, 3, 4, 5):
        noise = SensorNoise(Draw("sensor_noise", severity, np.random.RandomState(1)))
        noise.kind = kind
        first, second = noise(PICTURES, 4), noise(PICTURES, 4)
        assert (
            first.shape == PICTURES.shape
            and first.dtype == np.uint8
            and np.array_equal(first, second)
        )
        assert np.array_equal(first, noise(PICTURES, 5)) == (kind != "gaussian_noise")
        changed.append(np.abs(first.astype(float) - PICTURES).mean())
    # ImageNet-C's strengths of these two do not change a picture's mean more and more
    pairs = [(changed[0], changed[4])] if kind in ("glass_blur", "fog") else pairwise(changed)
    assert all(a < b for a, b in pairs) and changed[0] > 1, changed


def test_all_kinds_of_sensor_noise_occur() -> None:
    assert {
        SensorNoise(draw(Perturbation("sensor_noise", 3), 0, seed)).kind for seed in range(50)
    } == set(KINDS)


INSTRUCTIONS = (
    sorted({task.instruction for suite in LIMITS for task in of_suite(suite)})
    if plugin.tasks()
    else []
)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_every_instruction_has_rewordings(severity: int) -> None:
    assert len(INSTRUCTIONS) == 112
    for instruction in INSTRUCTIONS:
        found = rewordings(instruction, severity)
        assert found and instruction not in found and len(set(found)) == len(found)
        assert severity != 2 or all(instruction in each for each in found)


def test_the_rules_cover_the_vocabulary() -> None:
    """Every verb and noun of the instructions has alternatives; the rest are words of position."""
    known = "|".join(sorted((*VERBS, *NOUNS), key=len, reverse=True))
    rest = {word for each in INSTRUCTIONS for word in re.sub(rf"\b({known})\b", "", each).split()}
    positions = {
        "and",
        "it",
        "the",
        "on",
        "in",
        "of",
        "to",
        "at",
        "from",
        "next",
        "between",
        "under",
        "inside",
        "top",
        "both",
        "them",
    }
    assert rest <= positions | {"left", "right", "middle", "front", "back"}, rest
    assert all(
        key not in alternatives for table in (VERBS, NOUNS) for key, alternatives in table.items()
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"suite": "libero_spatial_plus_camera_6"},
            "env.suite=libero_spatial_plus_camera_6 is unknown: did you mean libero_spatial_plus_camera",
        ),
        ({"suite": "libero_spatial_plus_lights"}, "did you mean libero_spatial_plus_light"),
        (
            {"suite": "libero_spatial_plus_camera", "cameras": ["wrist"]},
            "changes the images of agentview alone",
        ),
        (
            {"suite": "libero_goal_plus_sensor_noise_2", "cameras": ["wrist"]},
            "which env.cameras does not show: add base",
        ),
        (
            {"suite": "libero_goal_plus_language", "instruction": "bddl"},
            "not env.instruction=bddl: use auto or file_name",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        simulator_options(LiberoConfig(**config))
    assert message in str(error.value) and "\n" not in str(error.value)

"""PutOnPlate25's episodes, without a simulator: what a split changes, and how often each value is drawn."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from rlinf_vla.envs.maniskill.plates_parts import (
    OBJECTS,
    RECEPTACLES,
    SEEN_OBJECTS,
    SEEN_RECEPTACLES,
)
from rlinf_vla.envs.maniskill.plates_splits import (
    OBJECTS_APART,
    RECEPTACLE_APART,
    RECEPTACLES_APART,
    SPLITS,
    UNSEEN_WORDINGS,
    UNSEEN_YAWS,
    WORDING,
    YAWS,
    Episode,
    draw,
    pairs,
    places,
)
from rlinf_vla.envs.maniskill.plates_tables import (
    OVERLAYS,
    SEEN_TABLES,
    TABLES,
    overlay,
    table_texture,
)
from rlinf_vla.envs.maniskill.tasks import TASKS

PLACES = {"object_place", "receptacle_place", "third_place", "yaw"}
CHANGES = {
    "main": set(),
    "unseen_table": {"table"},
    "texture_weak": set(),  # the image alone
    "texture_strong": set(),
    "noise_weak": set(),
    "noise_strong": set(),
    "unseen_object": {"object"},
    "unseen_receptacle": {"receptacle"},
    "unseen_instruction": {"wording"},
    "two_objects": {"second_object"},
    "two_unseen_objects": {"object", "second_object"},
    "two_receptacles": {"second_receptacle", "third_place"},
    "two_unseen_receptacles": {"receptacle", "second_receptacle", "third_place"},
    "position": PLACES,
    "robot_pose": {"robot_pose"},
    "moved_object": set(),  # where the object is at first
    "camera": {"camera"},
}


def drawn(split: str, count: int = 300, start: int = 0) -> list[Episode]:
    return [
        draw(SPLITS[split], np.random.RandomState(seed)) for seed in range(start, start + count)
    ]


def differences(one: Episode, other: Episode) -> set[str]:
    return {
        field.name
        for field in fields(Episode)
        if not np.array_equal(getattr(one, field.name), getattr(other, field.name))
    }


def test_the_sets_have_the_sizes_of_the_papers() -> None:
    assert (len(OBJECTS), SEEN_OBJECTS) == (25, 16)
    assert (len(RECEPTACLES), SEEN_RECEPTACLES) == (17, 1)
    assert (TABLES, SEEN_TABLES) == (21, 16)
    assert len(UNSEEN_WORDINGS) == 16
    assert len(places(False)) == 36
    assert len(places(True)) == 28


def test_everything_looks_different_and_has_a_name_of_its_own() -> None:
    assert len({thing.name for thing in (*OBJECTS, *RECEPTACLES)}) == 42
    assert (
        len(
            {
                tuple(sorted((part.shape, part.size, part.colour) for part in thing.parts))
                for thing in (*OBJECTS, *RECEPTACLES)
            }
        )
        == 42
    )
    assert len({table_texture(table).tobytes() for table in range(TABLES)}) == TABLES
    assert len({overlay(index, 16, 16).tobytes() for index in range(OVERLAYS)}) == OVERLAYS


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: thing.name)
def test_an_object_stands_on_the_table_and_fits_between_the_fingers(thing: Any) -> None:
    bottoms = [part.at[2] - part.half[2] for part in thing.parts]
    assert min(bottoms) == pytest.approx(0.0, abs=1e-9)
    assert thing.radius < 0.036, "the fingers open to 0.04 m on each side"
    assert min(bottoms) + 0.014 <= thing.grip < max(part.top for part in thing.parts)


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_changes_what_it_says_and_nothing_else(split: str) -> None:
    changed = [
        differences(one, other) for one, other in zip(drawn(split), drawn("main"), strict=True)
    ]
    assert set().union(*changed) == CHANGES[split]
    always = CHANGES[split] - {"third_place", "object_place", "receptacle_place"}
    assert all(always <= each for each in changed)


def test_only_its_split_moves_the_object_or_changes_the_image() -> None:
    assert [name for name, split in SPLITS.items() if split.moves] == ["moved_object"]
    noise = {name: split.noise for name, split in SPLITS.items() if split.noise}
    assert noise == {
        "noise_weak": 0.3,
        "noise_strong": 0.5,
        "texture_weak": 0.3,
        "texture_strong": 0.5,
    }
    assert {name for name, split in SPLITS.items() if split.foreground} == {
        "texture_weak",
        "texture_strong",
    }


@pytest.mark.parametrize(
    ("split", "attribute"),
    [
        ("unseen_table", "table"),
        ("unseen_object", "object"),
        ("unseen_receptacle", "receptacle"),
        ("unseen_instruction", "wording"),
        ("position", "yaw"),
        ("two_unseen_objects", "object"),
        ("two_unseen_objects", "second_object"),
        ("two_unseen_receptacles", "receptacle"),
        ("two_unseen_receptacles", "second_receptacle"),
        ("two_receptacles", "second_receptacle"),
    ],
)
def test_training_shows_nothing_of_an_evaluation(split: str, attribute: str) -> None:
    seen_in_main = {
        getattr(each, attribute.removeprefix("second_")) for each in drawn("main", 1000)
    }
    evaluated = {getattr(each, attribute) for each in drawn(split, 1000)}
    assert not seen_in_main & evaluated


def test_the_places_around_the_grid_are_not_on_it() -> None:
    apart = np.linalg.norm(places(True)[:, None] - places(False)[None], axis=2)
    assert apart.min() > 0.04
    assert not set(np.round(YAWS % np.pi, 6)) & set(np.round(UNSEEN_YAWS % np.pi, 6))


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_shown_is_apart(split: str) -> None:
    for each in drawn(split):
        assert np.linalg.norm(each.object_place - each.receptacle_place) > RECEPTACLE_APART
        if each.second_receptacle is not None:
            assert each.second_receptacle != each.receptacle
            assert np.linalg.norm(each.third_place - each.receptacle_place) > RECEPTACLES_APART
            assert np.linalg.norm(each.third_place - each.object_place) > RECEPTACLE_APART
        else:
            assert each.second_object != each.object
            assert np.linalg.norm(each.third_place - each.receptacle_place) > RECEPTACLE_APART
            assert np.linalg.norm(each.third_place - each.object_place) > OBJECTS_APART


@pytest.mark.parametrize(
    ("split", "attribute", "values"),
    [
        ("main", "object", range(16)),
        ("main", "table", range(16)),
        ("main", "receptacle", range(1)),
        ("main", "wording", (WORDING,)),
        ("main", "yaw", YAWS),
        ("unseen_object", "object", range(16, 25)),
        ("unseen_receptacle", "receptacle", range(1, 17)),
        ("unseen_table", "table", range(16, 21)),
        ("unseen_instruction", "wording", UNSEEN_WORDINGS),
        ("two_receptacles", "second_receptacle", range(1, 17)),
        ("two_objects", "second_object", range(16)),
    ],
)
def test_every_value_is_drawn_equally_often(split: str, attribute: str, values: Any) -> None:
    found = [getattr(each, attribute) for each in drawn(split, 3000)]
    counts = np.array([found.count(value) for value in values])
    assert counts.sum() == 3000
    expected = 3000 / len(values)
    assert ((counts - expected) ** 2 / expected).sum() < len(values) + 4 * np.sqrt(
        2 * len(values)
    ), counts


@pytest.mark.parametrize(("split", "unseen"), [("main", False), ("position", True)])
def test_every_pair_of_places_is_drawn(split: str, unseen: bool) -> None:
    found = {(*each.object_place, *each.receptacle_place) for each in drawn(split, 8000)}
    assert found == {(*first, *second) for first, second in pairs(unseen)}


def test_the_instruction_names_the_object_and_the_receptacle() -> None:
    for split in (
        "main",
        "unseen_object",
        "unseen_receptacle",
        "unseen_instruction",
        "two_objects",
        "two_receptacles",
    ):
        for each in drawn(split, 50):
            assert OBJECTS[each.object].name in each.instruction
            assert RECEPTACLES[each.receptacle].name in each.instruction
    assert drawn("main", 1)[0].instruction == "put the bread on the plate"


def test_every_split_is_a_task() -> None:
    tasks = {entry.split: name for name, entry in TASKS.items() if entry.split}
    assert list(tasks) == list(SPLITS)
    assert tasks["main"] == "PutOnPlate25"
    assert tasks["two_unseen_objects"] == "PutOnPlate25TwoUnseenObjects"


def test_the_recipe_evaluates_every_split() -> None:
    from rlinf_vla.cli import compose

    recipe = compose.load("eval", ["recipe=maniskill_eval_putonplate25"])
    assert sorted(recipe.env.tasks) == sorted(name for name, entry in TASKS.items() if entry.split)

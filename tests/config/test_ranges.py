"""Every number of a recipe has a finite range, defined only in its schema; values outside are refused in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    Interval,
    Name,
    Named,
    NonEmpty,
    OneOf,
    Positive,
    Probability,
    Range,
    check_values,
    unwrapped,
)
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins
from rlinf_vla.robots.real_cell import CameraConfig
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.recipes import Configs

SCHEMAS: dict[str, type] = {"recipe": Recipe, "camera": CameraConfig}
SCHEMAS |= {f"algorithm={name}": node for name, node in Configs("algorithm").items()}
SCHEMAS |= {f"env={name}": node for name, node in Configs("env").items()}
SCHEMAS |= {f"robot={name}": robot.Config for name, robot in plugins.robots().items()}
SCHEMAS |= {f"reward={name}": reward.Config for name, reward in plugins.rewards().items()}
SCHEMAS |= {f"model={name}": model.Config for name, model in plugins.models().items()}

ABSURD = [math.nan, math.inf, -math.inf, -1, 1e308, 10**30]


def numbers(hint: Any, key: str) -> Iterator[tuple[str, type, list[Any]]]:
    """Every number that a field of this type may hold, in lists, dictionaries and nodes too: its key, int or float, its rules."""
    plain, rules, _ = unwrapped(hint)
    if plain in (int, float):
        yield key, plain, rules
    elif is_dataclass(plain):
        hints = get_type_hints(plain, include_extras=True)
        for each in fields(plain):
            yield from numbers(hints[each.name], f"{key}.{each.name}")
    else:
        for i, each in enumerate(get_args(plain)):
            yield from numbers(each, f"{key}<{i}>")


NUMBERS = {
    key: (kind, rules) for name, node in SCHEMAS.items() for key, kind, rules in numbers(node, name)
}


def test_the_numbers_are_found() -> None:
    found = {
        "recipe.seed",
        "recipe.cluster.roles.robot.resources<1>",
        "recipe.cluster.nodes<0>.price_per_hour",
        "algorithm=ppo.gamma",
    }
    assert (
        found
        | {"algorithm=grpo.success_range<0>", "env=libero.tasks<0>", "model=pi0.delta_mask<0>"}
        <= NUMBERS.keys()
    )


def test_every_number_has_one_range() -> None:
    """As ``Annotated[float, Range(0, 1)]``, or by a name of config/ranges.py."""
    assert [
        key
        for key, (_, rules) in NUMBERS.items()
        if sum(isinstance(rule, Range) for rule in rules) != 1
    ] == []


def a_recipe() -> Recipe:
    return recipes.read(compose.load("train", ["recipe=maniskill_ppo", "cluster=8gpu"]))


def paths(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Of each field that may hold numbers: its key, the node that has it, its name there, and its type."""
    hints = get_type_hints(type(node), include_extras=True)
    for each in fields(node):
        value = getattr(node, each.name)
        key = f"{prefix}{each.name}"
        if is_dataclass(value):
            yield from paths(value, f"{key}.")
        elif any(map(is_dataclass, get_args(unwrapped(hints[each.name])[0]))):  # a list of nodes
            for entry in value[:1]:
                yield from paths(entry, f"{key}[0].")
        elif any(numbers(hints[each.name], "")):
            yield key, node, each.name, unwrapped(hints[each.name])[0]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_defaults_are_within_their_ranges(name: str) -> None:
    check_values(a_recipe() if name == "recipe" else SCHEMAS[name]())


@pytest.mark.parametrize("name", SCHEMAS)
def test_absurd_numbers_are_refused(name: str) -> None:
    """Alone, or in a list or a dictionary: within the range, or refused in one line that names the key, the value and the range."""
    node = a_recipe() if name == "recipe" else SCHEMAS[name]()
    for key, owner, field_name, plain in list(paths(node)):
        saved = getattr(owner, field_name)
        at = {list: "[0]", dict: ".some"}.get(get_origin(plain), "")
        ((_, _, rules),) = numbers(get_type_hints(type(owner), include_extras=True)[field_name], "")
        for value in ABSURD:
            setattr(owner, field_name, {"[0]": [value], ".some": {"some": value}}.get(at, value))
            within = all(rule.allows(value) for rule in rules)
            assert not (within and not math.isfinite(value)), f"{key}={value}"
            complaint = refusal(node)
            if not within:
                assert complaint is not None and complaint.startswith(
                    f"{key}{at}={value} is out of range: use "
                ), complaint
            elif at != "[0]":  # a list may be of the wrong length, too
                assert complaint is None, complaint
        setattr(owner, field_name, saved)


def refusal(node: Any) -> str | None:
    try:
        check_values(node)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


# the rules


@dataclass
class Inner:
    share: Probability = 0.5


@dataclass
class Everything:
    count: Annotated[int, Range(1, 9)] = 1
    bare: float = 0.0
    text: str = "nan"
    word: Name = "word"
    choice: Annotated[str, OneOf("this", "that")] = "this"
    maybe: Positive | None = None
    numbers: Annotated[list[Probability], NonEmpty()] = field(default_factory=lambda: [0.0])
    interval: Annotated[list[Probability], Interval()] | None = None
    shares: dict[str, Probability] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    several: list[Inner] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    anything: Any = None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"count": 0}, "count=0 is out of range: use a whole number from 1 to 9"),
        ({"count": True}, "count=True is out of range: use a whole number from 1 to 9"),
        ({"bare": math.nan}, "bare=nan is out of range: use a number from "),
        ({"word": "-1"}, "word=-1 is no name: use a name, not a number"),
        ({"word": "-inf"}, "word=-inf is no name"),
        ({"word": ""}, "word= is no name"),
        ({"choice": "these"}, "choice=these is not known: use this or that"),
        (
            {"maybe": 0.0},
            "maybe=0.0 is out of range: use a number above 0 and at most 1000000, or null",
        ),
        ({"numbers": []}, "numbers=[] is empty: use a list of at least one element"),
        ({"numbers": [0.5, 2.0]}, "numbers[1]=2.0 is out of range: use a number from 0 to 1"),
        (
            {"interval": [0.9, 0.1]},
            "interval=[0.9,0.1] is no interval: use a list of two numbers, the smaller one first",
        ),
        ({"interval": [0.9]}, "interval=[0.9] is no interval"),
        ({"interval": [0.1, 0.2, 0.3]}, "interval=[0.1,0.2,0.3] is no interval"),
        ({"interval": [0.1, math.nan]}, "interval[1]=nan is out of range"),
        ({"shares": {"a": 1.0, "b": -1.0}}, "shares.b=-1.0 is out of range"),
        ({"inner": Inner(2.0)}, "inner.share=2.0 is out of range"),
        ({"several": [Inner(), Inner(-1.0)]}, "several[1].share=-1.0 is out of range"),
        ({"texts": [[1]]}, "texts[0]=[1] cannot be used: use text"),
        ({"anything": Inner(2.0)}, "anything.share=2.0 is out of range"),
        (
            {
                "maybe": 1.0,
                "interval": [0.5, 0.5],
                "several": [Inner()],
                "anything": {"x": 5.0, "y": None},
                "text": "5",
            },
            None,
        ),
        ({"anything": {"x": math.inf}}, "anything.x=inf is out of range"),
    ],
)
def test_a_rule_is_described(changes: dict[str, Any], complaint: str | None) -> None:
    found = refusal(Everything(**changes))
    assert (
        found is None if complaint is None else found is not None and found.startswith(complaint)
    ), found


@given(st.floats() | st.integers(), st.booleans(), st.booleans())
def test_a_range_includes_its_bounds(value: float, above: bool, below: bool) -> None:
    allowed = Range(-1, 2.5, above=above, below=below).allows(value)
    assert allowed == (
        (value > -1 if above else value >= -1) and (value < 2.5 if below else value <= 2.5)
    )


@given(st.floats())
def test_a_string_is_no_number(value: float) -> None:
    assert not Named().allows(str(value)) and Named().allows(f"{value}-x")


@pytest.mark.parametrize(("low", "high"), [(0, math.inf), (-math.inf, 0), (math.nan, 1), (2, 1)])
def test_a_range_has_two_ends(low: float, high: float) -> None:
    with pytest.raises(AssertionError):
        Range(low, high)

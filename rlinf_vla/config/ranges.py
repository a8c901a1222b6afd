"""Declare and check the allowed values of recipe fields: ``gamma: Annotated[float, Range(0, 1)]``.

OmegaConf ignores the metadata of ``Annotated``; ``check_values`` reads it. Plug-ins annotate their
own dataclasses in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from rlinf_vla.config.errors import UserError


class Rule(Protocol):
    """A constraint on the value of a field; ``str(rule)`` completes the sentence "use ..."."""

    fault: ClassVar[str]

    def allows(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both finite.

    ``above`` excludes ``low``, ``below`` excludes ``high``.
    """

    fault: ClassVar[str] = "is out of range"
    low: float
    high: float
    above: bool = False
    below: bool = False

    def __post_init__(self) -> None:
        assert math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high

    def allows(self, value: Any) -> bool:
        """Return whether ``value`` is a number in the range; false for NaN and bool."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return (
            self.low <= value <= self.high
            and not (self.above and value == self.low)
            and not (self.below and value == self.high)
        )

    def __str__(self) -> str:
        low, high = (
            f"{bound:.0f}" if bound == round(bound) and abs(bound) < 1e16 else f"{bound:g}"
            for bound in (self.low, self.high)
        )
        if self.low == self.high:
            return low
        if not (self.above or self.below):
            return f"a number from {low} to {high}"
        return f"a number {'above' if self.above else 'of at least'} {low} and {'below' if self.below else 'at most'} {high}"


FINITE = Range(-math.nextafter(math.inf, 0), math.nextafter(math.inf, 0))
"""The range of a number whose field declares none."""


@dataclass(frozen=True)
class OneOf:
    """One of these strings."""

    fault: ClassVar[str] = "is not known"
    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def allows(self, value: Any) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return " or ".join(
            [", ".join(self.names[:-1]), self.names[-1]] if len(self.names) > 1 else self.names
        )


@dataclass(frozen=True)
class Matches:
    """A string that fully matches ``pattern``; ``described`` is its description in words."""

    fault: ClassVar[str] = "cannot be used"
    pattern: str
    described: str

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.described


@dataclass(frozen=True)
class Named:
    """The name of a choice. Numbers are refused, because no choice is named by one."""

    fault: ClassVar[str] = "is no name"

    def allows(self, value: Any) -> bool:
        try:
            float(value)
        except (TypeError, ValueError):
            return isinstance(value, str) and value.strip() != ""
        return False

    def __str__(self) -> str:
        return "a name, not a number"


@dataclass(frozen=True)
class NonEmpty:
    """A list with at least one element."""

    fault: ClassVar[str] = "is empty"

    def allows(self, value: Any) -> bool:
        return len(value) > 0

    def __str__(self) -> str:
        return "a list of at least one element"


@dataclass(frozen=True)
class Interval:
    """A list of two numbers, the smaller one first."""

    fault: ClassVar[str] = "is no interval"

    def allows(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and value[0] <= value[1]

    def __str__(self) -> str:
        return "a list of two numbers, the smaller one first, such as [0.1,0.9]"


TEXT = Matches(r"(?s:.*)", "text")
"""The rule of a string without another one: OmegaConf accepts lists in a list of strings."""

_UNSAID: dict[Any, list[Rule]] = {int: [FINITE], float: [FINITE], str: [TEXT]}

MOST = 10**9

Count = Annotated[int, Range(1, MOST)]
CountOrZero = Annotated[int, Range(0, MOST)]
Size = Annotated[int, Range(1, 65536)]
"""Size of a layer, batch or image side; workers, environments or threads on one machine."""
SizeOrZero = Annotated[int, Range(0, 65536)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, 1e6, above=True)]
NonNegative = Annotated[float, Range(0, 1e6)]
Probability = Annotated[float, Range(0, 1)]
"""Also used for fractions and discounts."""
LearningRate = Annotated[float, Range(0, 1, above=True)]
Seconds = Annotated[float, Range(0, 1e8, above=True)]
"""Up to three years."""
Hertz = Annotated[float, Range(0, 1e4, above=True)]
EnvCount = Annotated[int, Range(1, 10**6)]
ImageSize = Annotated[int, Range(16, 1024)]
"""Length of one side in pixels."""
Name = Annotated[str, Named()]
"""The name of a choice: a plug-in, a task, an operator."""
Label = Annotated[str, Matches(r"(?s:.*\S.*)", "text that is not blank")]
"""A key of external data, which may be a number."""


OUTSIDE = {"outside": True}
"""Metadata of a configuration field that names a program, an import, an output path or a machine;
if a recipe comes from a file, the user must give such a field on the command line."""


def check_values(node: Any, prefix: str = "") -> None:
    """Raise UserError for the first field of ``node`` whose value violates its annotation.

    ``node`` is a dataclass; nested dataclasses are checked too. ``prefix``: the recipe key of
    ``node``, followed by a dot. NaN and infinities are refused even without an annotation.
    """
    hints = get_type_hints(type(node), include_extras=True)
    for field in fields(node):
        _check(f"{prefix}{field.name}", getattr(node, field.name), hints[field.name])


def _check(key: str, value: Any, hint: Any) -> None:
    if is_dataclass(value):
        return check_values(value, f"{key}.")
    plain, rules, optional = unwrapped(hint)
    if value is None and optional:
        return None
    for element, of, at in _elements(value, plain):
        _check(f"{key}{at}", element, of)
    for rule in rules or _UNSAID.get(type(value) if plain is Any else plain, []):
        if not rule.allows(value):
            text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
            whole = (
                str(rule).replace("a number", "a whole number", 1) if plain is int else str(rule)
            )
            raise UserError(
                f"{key}={text} {rule.fault}: use {whole}{', or null' if optional else ''}"
            )
    return None


def unwrapped(hint: Any) -> tuple[Any, list[Rule], bool]:
    """Return the bare type of ``hint``, its rules, and whether None is allowed."""
    if get_origin(hint) is Annotated:
        plain, rules, optional = unwrapped(hint.__origin__)
        return (
            plain,
            [*rules, *(rule for rule in hint.__metadata__ if hasattr(rule, "allows"))],
            optional,
        )
    if get_origin(hint) in (Union, UnionType):
        inner, *others = (argument for argument in get_args(hint) if argument is not NoneType)
        plain, rules, _ = (Any, [], False) if others else unwrapped(inner)
        return plain, rules, NoneType in get_args(hint)
    return hint, [], False


def _elements(value: Any, plain: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield each element of a list or dictionary, its type and the suffix of its key."""
    arguments = get_args(plain)
    if isinstance(value, list):
        yield from (
            (element, arguments[0] if arguments else Any, f"[{i}]")
            for i, element in enumerate(value)
        )
    elif isinstance(value, dict):
        yield from (
            (element, arguments[1] if arguments else Any, f".{name}")
            for name, element in value.items()
        )

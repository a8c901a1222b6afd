"""Which values a field of a recipe's dataclasses may have, written as an annotation: ``gamma: Annotated[float, Range(0, 1)]``.

OmegaConf ignores what ``Annotated`` adds to a type; ``check_values`` reads it. Plug-ins annotate their own dataclasses in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from rlinf_vla.types import UserError


class Rule(Protocol):
    """What an annotation demands of a value; ``str(rule)`` completes the sentence "use ..."."""

    fault: ClassVar[str]

    def allows(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, which are finite; ``above`` and ``below`` exclude ``low`` and ``high`` themselves."""

    fault: ClassVar[str] = "is out of range"
    low: float
    high: float
    above: bool = False
    below: bool = False

    def __post_init__(self) -> None:
        assert math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high

    def allows(self, value: Any) -> bool:
        """Neither NaN nor what is no number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return self.low <= value <= self.high and not (self.above and value == self.low) and not (self.below and value == self.high)

    def __str__(self) -> str:
        low, high = (f"{bound:.0f}" if bound == round(bound) and abs(bound) < 1e16 else f"{bound:g}" for bound in (self.low, self.high))
        if self.low == self.high:
            return low
        if not (self.above or self.below):
            return f"a number from {low} to {high}"
        return f"a number {'above' if self.above else 'of at least'} {low} and {'below' if self.below else 'at most'} {high}"


FINITE = Range(-math.nextafter(math.inf, 0), math.nextafter(math.inf, 0))
"""Of a number whose field names no range."""


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
        return " or ".join([", ".join(self.names[:-1]), self.names[-1]] if len(self.names) > 1 else self.names)


@dataclass(frozen=True)
class Matches:
    """A string that matches the whole of ``pattern``, which ``described`` says in words."""

    fault: ClassVar[str] = "cannot be used"
    pattern: str
    described: str

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.described


@dataclass(frozen=True)
class Named:
    """The name of a choice. A number is refused: no choice has one as its name."""

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
    """A list of something."""

    fault: ClassVar[str] = "is empty"

    def allows(self, value: Any) -> bool:
        return len(value) > 0

    def __str__(self) -> str:
        return "a list of at least one"


@dataclass(frozen=True)
class Interval:
    """A list of two numbers, the lesser one first."""

    fault: ClassVar[str] = "is no interval"

    def allows(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and value[0] <= value[1]

    def __str__(self) -> str:
        return "a list of two numbers, the lesser one first, such as [0.1,0.9]"


TEXT = Matches(r"(?s:.*)", "text")
"""Of a string whose field says no more: OmegaConf lets lists pass as elements of a list of strings."""

_UNSAID: dict[Any, list[Rule]] = {int: [FINITE], float: [FINITE], str: [TEXT]}

MOST = 10**9

Count = Annotated[int, Range(1, MOST)]
CountOrZero = Annotated[int, Range(0, MOST)]
Size = Annotated[int, Range(1, 65536)]
"""Of a layer, a batch or an image's side, and of workers, environments or threads of one machine."""
SizeOrZero = Annotated[int, Range(0, 65536)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, 1e6, above=True)]
NonNegative = Annotated[float, Range(0, 1e6)]
Probability = Annotated[float, Range(0, 1)]
"""Also shares and discounts."""
LearningRate = Annotated[float, Range(0, 1, above=True)]
Seconds = Annotated[float, Range(0, 1e8, above=True)]
"""Up to three years."""
Hertz = Annotated[float, Range(0, 1e4, above=True)]
EnvCount = Annotated[int, Range(1, 10**6)]
ImageSize = Annotated[int, Range(16, 1024)]
"""Pixels of one side."""
Name = Annotated[str, Named()]
"""Of a choice: a plug-in, a task, a person."""
Label = Annotated[str, Matches(r"(?s:.*\S.*)", "text that is not blank")]
"""A key of somebody's data, which may be a number."""


def check_values(node: Any, prefix: str = "") -> None:
    """Raises UserError for the first field of the dataclass ``node``, or of one inside it, whose value its annotation does not allow.

    ``prefix``: the recipe's key of ``node`` and a point. NaN and infinities are refused without an annotation, too.
    """
    hints = get_type_hints(type(node), include_extras=True)
    for each in fields(node):
        _check(f"{prefix}{each.name}", getattr(node, each.name), hints[each.name])


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
            shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
            whole = str(rule).replace("a number", "a whole number", 1) if plain is int else str(rule)
            raise UserError(f"{key}={shown} {rule.fault}: use {whole}{', or null' if optional else ''}")
    return None


def unwrapped(hint: Any) -> tuple[Any, list[Rule], bool]:
    """A type without its annotations and without None, the rules among them, and whether it may be None."""
    if get_origin(hint) is Annotated:
        plain, rules, optional = unwrapped(hint.__origin__)
        return plain, [*rules, *(each for each in hint.__metadata__ if hasattr(each, "allows"))], optional
    if get_origin(hint) in (Union, UnionType):
        inner, *others = (each for each in get_args(hint) if each is not NoneType)
        plain, rules, _ = (Any, [], False) if others else unwrapped(inner)
        return plain, rules, NoneType in get_args(hint)
    return hint, [], False


def _elements(value: Any, plain: Any) -> Iterator[tuple[Any, Any, str]]:
    """Of a list or a dictionary: each element, its type and how its key goes on."""
    arguments = get_args(plain)
    if isinstance(value, list):
        yield from ((element, arguments[0] if arguments else Any, f"[{i}]") for i, element in enumerate(value))
    elif isinstance(value, dict):
        yield from ((element, arguments[1] if arguments else Any, f".{name}") for name, element in value.items())

"""Read mappings, lists and plain values; each error is one line that begins with its location."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from rlinf_vla.config.errors import UserError

from ..options import one_of
from .scene import TARGET, Interval, Vector


class YamlNode:
    """A value of the document and its location."""

    def __init__(self, where: str, value: Any) -> None:
        self.where = where
        self.value = value

    def error(self, what: str) -> UserError:
        return UserError(f"{self.where} {what}")

    def wrong(self, wanted: str) -> UserError:
        text = " ".join(str(self.value).split())
        return UserError(f"{self.where}={text[:60]} must be {wanted}")

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def __getitem__(self, key: str) -> YamlNode:
        separator = ": " if self.where.endswith((".yaml", ".yml")) else "."
        return YamlNode(f"{self.where}{separator}{key}", self.value[key])

    def only(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        self.mapping()
        keys = [*required, *optional]
        for key in self.value:
            if key not in keys:
                one_of(str(key), keys, f"{self.where} key")
        for key in required:
            if key not in self.value:
                raise self.error(f"lacks {key}")

    def given(self, **readers: Callable[[YamlNode], Any]) -> dict[str, Any]:
        """Read those keys that are there, each by its reader."""
        return {key: read(self[key]) for key, read in readers.items() if key in self}

    def children(self) -> list[tuple[str, YamlNode]]:
        self.mapping()
        for key in self.value:
            if (
                not isinstance(key, str)
                or not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", key)
                or key == TARGET
            ):
                raise self[key].error(f"is not a valid name: letters, digits and _, not {TARGET}")
        return [(key, self[key]) for key in self.value]

    def items(self) -> list[YamlNode]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [YamlNode(f"{self.where}[{i}]", item) for i, item in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.wrong("a sentence")
        return " ".join(self.value.split())

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def whole(self, low: int) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < low:
            raise self.wrong(f"a whole number, at least {low}")
        return self.value

    def number(self, low: float, high: float) -> float:
        value = self.value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.wrong(f"a number between {low:g} and {high:g}")
        return float(value)

    def numbers(self, counts: Collection[int], low: float, high: float) -> Vector:
        if not isinstance(self.value, list) or len(self.value) not in counts:
            raise self.wrong(f"a list of {' or '.join(map(str, counts))} numbers")
        return tuple(item.number(low, high) for item in self.items())

    def interval(self, low: float, high: float) -> Interval:
        first, last = self.numbers((2,), low, high)
        if first > last:
            raise self.wrong("[low, high]")
        return first, last

    def one_of(self, known: Collection[str]) -> str:
        if not isinstance(self.value, str) or self.value not in known:
            one_of(" ".join(str(self.value).split())[:60], known, self.where)
            raise self.wrong(f"one of {', '.join(known)}")
        return self.value

    def mapping(self) -> None:
        if not isinstance(self.value, dict):
            raise self.wrong("a mapping of keys to values")

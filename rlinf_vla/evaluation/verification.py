"""Whether a result can be made again: what to play again, whether it agrees, and what differs in what it was made on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vla.evaluation.results import Episode
from rlinf_vla.evaluation.statistics import mcnemar_exact

SIGNIFICANCE = 0.05
"""A smaller p-value is no chance any more."""
OUTCOME = ("instruction", "success", "steps", "return")
"""What a repeated episode must have the same, bit for bit, on the same stack."""


@dataclass(frozen=True)
class Verdict:
    """``different``: the episodes that came out otherwise, as (kept, again). ``p_value``: of "both succeed equally often"."""

    played: int
    different: list[tuple[Episode, Episode]]
    p_value: float
    exact: bool
    """Whether every episode had to be the same."""

    @property
    def agrees(self) -> bool:
        return not self.different if self.exact else self.p_value >= SIGNIFICANCE


def judge(kept: Sequence[Episode], again: Sequence[Episode], exact: bool) -> Verdict:
    """The same episodes in the same order, as they were kept and as they were played again."""
    pairs = list(zip(kept, again, strict=True))
    different = [(old, new) for old, new in pairs if any(old[name] != new[name] for name in OUTCOME)]
    return Verdict(len(pairs), different, mcnemar_exact([old["success"] for old in kept], [new["success"] for new in again]), exact)


def sample(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """``count`` of them, spread evenly over the list: over its policies and tasks, that is. All where there are not so many."""
    total = len(episodes)
    return [episodes[index * total // count] for index in range(count)] if count < total else list(episodes)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """``KEY was X, is Y`` for everything under ``keys`` that is not the same; nested mappings one by one."""
    found = []
    for name in keys:
        old, new = _flat(before.get(name), name), _flat(now.get(name), name)
        found += [f"{each} was {old.get(each)}, is {new.get(each)}" for each in old | new if old.get(each) != new.get(each)]
    return found


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {full: each for part, child in value.items() for full, each in _flat(child, f"{name}.{part}").items()}

"""Verify a saved result: select episodes to repeat, compare outcomes, list environment changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vla.evaluation.results import Episode
from rlinf_vla.evaluation.statistics import mcnemar_exact

SIGNIFICANCE = 0.05
"""A smaller p-value counts as a disagreement."""
OUTCOME = ("instruction", "success", "steps", "return")
"""Fields of a repeated episode that must be bit-identical on the same software and hardware."""


@dataclass(frozen=True)
class Verdict:
    """Comparison of saved and repeated episodes.

    ``different``: (saved, repeated) pairs that differ. ``p_value``: of "both succeed equally
    often".
    """

    played: int
    different: list[tuple[Episode, Episode]]
    p_value: float
    exact: bool
    """Whether every episode must be identical."""

    @property
    def agrees(self) -> bool:
        return not self.different if self.exact else self.p_value >= SIGNIFICANCE


def compare_outcomes(kept: Sequence[Episode], again: Sequence[Episode], exact: bool) -> Verdict:
    """Compare the saved with the repeated outcomes of the same episodes in the same order."""
    pairs = list(zip(kept, again, strict=True))
    different = [(old, new) for old, new in pairs if any(old[name] != new[name] for name in OUTCOME)]
    return Verdict(len(pairs), different, mcnemar_exact([old["success"] for old in kept], [new["success"] for new in again]), exact)


def sample(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Return ``count`` episodes (or all), evenly spaced in the list, so over policies and tasks."""
    total = len(episodes)
    return [episodes[index * total // count] for index in range(count)] if count < total else list(episodes)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return ``KEY was X, is Y`` for each changed value under ``keys``, nested ones included."""
    found = []
    for name in keys:
        old, new = _flat(before.get(name), name), _flat(now.get(name), name)
        found += [f"{each} was {old.get(each)}, is {new.get(each)}" for each in old | new if old.get(each) != new.get(each)]
    return found


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {full: each for part, child in value.items() for full, each in _flat(child, f"{name}.{part}").items()}

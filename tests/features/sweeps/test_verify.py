from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.features.sweeps.provenance import differing
from rlinf_vla.features.sweeps.verify import compare_outcomes, sample

trees = st.recursive(
    st.integers(0, 3) | st.none(),
    lambda each: st.dictionaries(st.sampled_from("abc"), each),
    max_leaves=6,
)


def played(*outcomes: bool, steps: int = 5) -> list[dict[str, Any]]:
    return [
        {"instruction": "push", "success": won, "steps": steps, "return": 1.0} for won in outcomes
    ]


def test_on_the_same_stack_every_episode_counts() -> None:
    assert compare_outcomes(played(True, False), played(True, False), exact=True).agrees
    later = compare_outcomes(played(True, False), played(True, False, steps=6), exact=True)
    assert not later.agrees and len(later.different) == 2 and later.p_value == 1.0
    assert compare_outcomes(played(True, False), played(True, False, steps=6), exact=False).agrees


@pytest.mark.parametrize(("lost", "agrees"), [(0, True), (5, True), (6, False), (20, False)])
def test_on_another_stack_a_statistical_test_decides(lost: int, agrees: bool) -> None:
    """Five changes of one kind have p = 2/32, six have 2/64."""
    verdict = compare_outcomes(
        played(*[True] * 20), played(*[False] * lost, *[True] * (20 - lost)), exact=False
    )
    assert verdict.agrees is agrees and verdict.played == 20 and len(verdict.different) == lost


def test_too_few_episodes_cannot_agree_if_some_changed() -> None:
    assert compare_outcomes(played(*[True] * 5), played(*[True] * 5, steps=6), exact=False).agrees
    for lost in (1, 5):
        verdict = compare_outcomes(
            played(*[True] * 5), played(*[False] * lost, *[True] * (5 - lost)), exact=False
        )
        assert verdict.changed == lost and not verdict.agrees


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_sample_is_spread_and_in_order(total: int, count: int) -> None:
    chosen = [
        each["number"] for each in sample([{"number": number} for number in range(total)], count)
    ]
    assert len(set(chosen)) == len(chosen) == min(total, count) and chosen == sorted(chosen)
    gaps = [after - before for before, after in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(trees, trees)
def test_only_differences_are_listed(before: Any, now: Any) -> None:
    assert differing({"key": before, "other": 1}, {"key": before, "other": 2}, ["key"]) == []
    found = differing({"key": before}, {"key": now}, ["key"])
    assert (found == []) == (leaves(before) == leaves(now))
    assert all(each.startswith("key") for each in found)


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Without those that are None, which means absent."""
    if isinstance(tree, dict):
        return {
            full: leaf
            for name, child in tree.items()
            for full, leaf in leaves(child, f"{path}.{name}").items()
        }
    return {} if tree is None else {path: tree}

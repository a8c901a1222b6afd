"""The shares of trainer ranks, computed from given speeds."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.training.ranks import LEAST_UPDATES, TOLERANCE, WINDOW, TrainerSplit


def after(speeds: Sequence[float], updates: int = LEAST_UPDATES) -> TrainerSplit:
    subject = TrainerSplit(len(speeds), True)
    for _ in range(updates):
        subject.observe(speeds)
    return subject


@given(st.lists(st.floats(1.0, 10.0), min_size=2, max_size=5), st.floats(0.01, 100.0))
def test_shares_are_proportional_to_speeds(speeds: list[float], scale: float) -> None:
    shares = after([speed * scale for speed in speeds]).shares
    expected = [speed / sum(speeds) for speed in speeds]
    tolerance = 1e-9 if shares else TOLERANCE
    even = [1 / len(speeds)] * len(speeds)
    assert (shares or even) == pytest.approx(expected, rel=tolerance * 1.1)


@given(st.lists(st.floats(1.0, 1.0 + TOLERANCE), min_size=2, max_size=5))
def test_nearly_equal_ranks_keep_the_even_split_exactly(speeds: list[float]) -> None:
    assert after(speeds, 2 * WINDOW).shares == []


def test_a_change_needs_several_updates_and_no_single_one_counts() -> None:
    subject = after([2.0, 1.0], LEAST_UPDATES - 1)
    assert subject.shares == []
    subject.observe([2.0, 1.0])
    assert subject.shares == pytest.approx([2 / 3, 1 / 3])
    before = subject.shares
    subject.observe([1.0, 50.0])
    subject.observe([2.04, 1.0])
    assert subject.shares is before, "neither one slow update nor noise changes the shares"


def test_ranks_that_become_equal_return_to_the_even_split() -> None:
    subject = after([2.0, 1.0])
    for _ in range(WINDOW):
        subject.observe([1.0, 1.01])
    assert subject.shares == []


def test_every_rank_keeps_some_rows_so_that_it_is_measured() -> None:
    assert after([1000.0, 1.0]).shares == pytest.approx([1 / 1.05, 0.05 / 1.05])
    subject = after([2.0, 1.0])
    before = subject.shares
    for _ in range(WINDOW):
        subject.observe([2.0, 0.0])
    assert subject.shares is before, "an update in which a rank had no row measures nothing"


def test_an_even_split_measures_and_saves_nothing() -> None:
    for subject in (TrainerSplit(2, False), TrainerSplit(1, True)):
        for _ in range(WINDOW):
            subject.observe([3.0, 1.0])
        assert subject.shares == [] and subject.save() == {}


def test_a_resumed_run_goes_on_as_the_interrupted_one() -> None:
    subject = after([3.0, 1.0])
    resumed = TrainerSplit(2, True)
    resumed.restore(json.loads(json.dumps(subject.save())))
    assert resumed.shares == subject.shares != []
    for speeds in ([1.0, 1.0], [1.0, 1.2], [1.1, 1.0]):
        subject.observe(speeds)
        resumed.observe(speeds)
        assert resumed.shares == subject.shares
    other = TrainerSplit(3, True)
    other.restore(subject.save())
    other.restore({"policy_version": 3})
    assert other.shares == [], "another number of ranks begins evenly, as an older checkpoint does"

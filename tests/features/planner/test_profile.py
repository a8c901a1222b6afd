from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.errors import UserError
from rlinf_vla.features.planner.profile import Profile, fit, read_profile
from tests.features.planner.made_up import profile

POSITIVE = st.floats(1e-4, 10.0)


@given(
    st.floats(0.0, 1.0),
    POSITIVE,
    st.lists(st.integers(1, 500), min_size=2, max_size=6, unique=True),
)
def test_a_linear_cost_is_fitted(fixed: float, per_item: float, sizes: list[int]) -> None:
    found = fit(sizes, [fixed + per_item * size for size in sizes])
    for size in sizes:
        assert found[0] + found[1] * size == pytest.approx(fixed + per_item * size, rel=1e-4)


@given(st.lists(st.tuples(st.integers(1, 500), POSITIVE), min_size=1, max_size=6))
def test_fitted_costs_are_nonnegative_and_optimal(measured: list[tuple[int, float]]) -> None:
    sizes, costs = [size for size, _ in measured], [cost for _, cost in measured]

    def misfit(fixed: float, per_item: float) -> float:
        return sum(((fixed + per_item * size) / cost - 1) ** 2 for size, cost in measured)

    fixed, per_item = fit(sizes, costs)
    assert fixed >= 0 and per_item >= 0
    for change in (0.9, 1.1):
        assert misfit(fixed, per_item) <= misfit(fixed * change, per_item) + 1e-6
        assert misfit(fixed, per_item) <= misfit(fixed, per_item * change) + 1e-6


def test_one_size_gives_no_fixed_cost() -> None:
    assert fit([4, 4], [2.0, 2.0]) == pytest.approx((0.0, 0.5))


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    known = profile(episodes=((3, False), (4, True)), crowding=0.1)
    known.write(tmp_path / "deep" / "profile.json")
    assert read_profile(tmp_path / "deep" / "profile.json") == known


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cores": 0}, "cores"),
        ({"operations": {"fly": {"fixed": 1.0}}}, "fly is no operation"),
        ({"operations": {"act": {"fixed": -1.0}}}, "at least 0"),
        ({"operations": {"act": {"fixed": "much"}}}, "every number"),
        ({"operations": {"act": {"speed": 1.0}}}, "speed"),
        ({"operations": {"act": {"on": "tpu"}}}, "cpu or gpu"),
        ({"bytes": {"weights": float("nan")}}, "finite"),
        ({"episodes": [[1]]}, "not a profile"),
        ({"mood": "good"}, "mood"),
    ],
)
def test_a_wrong_profile_is_one_line_that_names_the_file(
    tmp_path: Path, change: dict[str, object], word: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(profile()) | change))
    with pytest.raises(UserError) as caught:
        read_profile(path)
    assert (
        word in str(caught.value)
        and str(path) in str(caught.value)
        and "\n" not in str(caught.value)
    )


@pytest.mark.parametrize("text", [None, "{", "[]", "3", '"profile"', "{}"])
def test_an_invalid_profile(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        read_profile(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_other_document_is_refused(document: object) -> None:
    with pytest.raises(UserError):
        Profile.of(document)


def test_crowding_increases_costs() -> None:
    crowded = profile(crowding=0.5)
    assert [crowded.crowded(busy, 2) for busy in (0, 1, 2, 7)] == [1.0, 1.0, 1.5, 1.5]
    assert crowded.crowded(2, 3) == 1.25 and crowded.crowded(4, 1) == 1.0

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.core.io import step_name, step_of


@given(iterations=st.integers(0, 10**9))
def test_a_name_has_its_number(iterations: int) -> None:
    assert step_of(step_name(iterations)) == iterations


@given(first=st.integers(0, 999_999), second=st.integers(0, 999_999))
def test_names_are_ordered_as_their_numbers(first: int, second: int) -> None:
    assert (step_name(first) < step_name(second)) == (first < second)


@pytest.mark.parametrize(
    "name", ["step_", "step_1.old", ".step_000001", "step_²", "before", "step_-1"]
)
def test_other_names_have_no_number(name: str) -> None:
    assert step_of(name) is None

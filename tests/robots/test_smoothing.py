from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.robots.smoothing import Average, Windows

TICK = 0.01
limits = st.tuples(st.floats(0.05, 2), st.floats(2, 9), st.floats(50, 2000))


def travel(
    windows: Windows, speed: float, seed: int, ticks: int = 400
) -> tuple[np.ndarray, np.ndarray]:
    """A reference that jumps at full speed and then rests, and its smoothed command."""
    draw = np.random.default_rng(seed)
    directions = np.repeat(draw.normal(size=(ticks // 10, 3)), 10, axis=0)
    steps = speed * TICK * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    reference = np.concatenate(
        [
            np.cumsum(steps, axis=0),
            np.repeat(steps.sum(0, keepdims=True), windows.length + 3, axis=0),
        ]
    )
    average = Average(windows)
    average.rest(np.zeros(3))
    return reference, np.array([average.push(point) for point in reference])


@given(limits, limits, st.integers(0, 2**31))
def test_speed_acceleration_and_jerk_stay_within_their_limits(
    translation: tuple[float, float, float], rotation: tuple[float, float, float], seed: int
) -> None:
    try:
        windows = Windows.of(TICK, translation, rotation)
    except ValueError:
        return
    _, out = travel(windows, translation[0], seed)
    out = np.concatenate([np.zeros((3, 3)), out])
    for order, limit in enumerate(translation, 1):
        assert np.linalg.norm(np.diff(out, order, axis=0), axis=1).max() / TICK**order <= limit * (
            1 + 1e-6
        )


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**31))
def test_it_stays_in_every_box_of_the_reference_and_stops_in_time(
    first: int, second: int, seed: int
) -> None:
    windows = Windows(first, second)
    reference, out = travel(windows, 1.0, seed)
    assert (out >= np.minimum(reference.min(0), 0) - 1e-12).all() and (
        out <= np.maximum(reference.max(0), 0) + 1e-12
    ).all()
    assert out[-3:] == pytest.approx(np.repeat(reference[-1:], 3, axis=0), abs=1e-12)
    stop = 400 + windows.length
    assert out[stop - 1 :] == pytest.approx(
        np.repeat(reference[-1:], len(out) - stop + 1, axis=0), abs=1e-12
    )


def test_against_two_averages_computed_by_hand() -> None:
    first, second = 5, 3
    reference, out = travel(Windows(first, second), 1.0, 0)
    padded = np.concatenate([np.zeros((first + second, 3)), reference])
    once = np.array([padded[end - first : end].mean(0) for end in range(first, len(padded) + 1)])
    twice = np.array([once[end - second : end].mean(0) for end in range(second, len(once) + 1)])
    assert out == pytest.approx(twice[-len(out) :], abs=1e-12)


def test_a_rotation_speed_beyond_its_acceleration_is_refused() -> None:
    with pytest.raises(ValueError, match="turning at full speed"):
        Windows.of(TICK, (0.2, 4, 100), (2.0, 1.0, 500))

"""Bound speed, acceleration and jerk of goals in steps by two cascaded moving averages.

A reference point moves straight to each goal, at speed V at most. The command is its moving average
over ``first`` ticks, averaged again over ``second``: Biagiotti and Melchiorri 2012, "FIR filters
for online trajectory planning with time- and frequency-domain specifications". With ticks of t
seconds, in the Euclidean norm, for finite differences of the command:

* the command is a weighted mean of reference points, so it stays in any convex set that holds them;
* speed is a mean of the reference's speeds: at most V. The path length within any window of time is
  at most the reference's longest within such a window;
* acceleration is a mean of ``(velocity now - velocity first ticks ago) / (first t)``: at most
  ``2 V / (first t)``;
* jerk is at most ``4 V / (first second t^2)``, by the same argument;
* when the reference stands, the command stands after at most ``first + second - 2`` ticks.

A stop within all limits therefore exists from every state: keep the reference where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.features.realworld.robot import Vector

_SLACK = 0.98
"""Fraction of the rotation limits that is used: finite differences are not derivatives."""


@dataclass(frozen=True)
class Windows:
    """Lengths of the two moving averages, in ticks."""

    first: int
    second: int
    """At most ``first``."""

    @property
    def length(self) -> int:
        """Ticks from the end of the reference's motion until the command stands."""
        return self.first + self.second - 2

    @classmethod
    def of(
        cls,
        tick_s: float,
        translation: tuple[float, float, float],
        rotation: tuple[float, float, float],
    ) -> Windows:
        """Return the shortest windows that keep speed, acceleration and jerk of both motions.

        Raises ValueError if the rotation's acceleration or jerk is too small for its speed.

        Rotations are averaged as rotation vectors w. The angular velocity is J(w) w'; the left
        Jacobian J is the integral of the rotations exp(s w) over s from 0 to 1, so ``|J| <= 1``,
        ``|J'| <= |w'| / 2`` and ``|J''| <= |w''| / 2 + |w'|^2 / 3``. This bounds the
        w'' and w''' that keep angular acceleration and jerk within their limits.
        """
        speed, acceleration, jerk = rotation
        free = _SLACK * acceleration - speed**2 / 2
        free_jerk = _SLACK * jerk - 1.5 * speed * max(free, 0) - speed**3 / 3
        if free <= 0 or free_jerk <= 0:
            raise ValueError(
                "turning at full speed already takes all of the rotation's acceleration or jerk"
            )
        return cls.within(tick_s, (translation, (speed, free, free_jerk)))

    @classmethod
    def within(cls, tick_s: float, motions: Iterable[tuple[float, float, float]]) -> Windows:
        """Return the shortest windows that keep acceleration and jerk of each motion, given as
        (speed, acceleration, jerk) of a vector or a single number."""
        first = second = 1
        for v, a, j in motions:
            least = 2 * v / (a * tick_s)
            product = 4 * v / (j * tick_s**2)
            one = max(math.ceil(least), math.ceil(math.sqrt(product)))
            first = max(first, one)
            second = max(second, math.ceil(product / one))
        return cls(first, second)


class Average:
    """Apply both moving averages to a reference ``[D]``, for any D."""

    def __init__(self, windows: Windows) -> None:
        weights = np.convolve(
            np.full(windows.first, 1 / windows.first), np.full(windows.second, 1 / windows.second)
        )
        self._weights = weights[::-1] / weights.sum()
        self._size = len(weights)
        self._past: NDArray[np.float64] = np.zeros((0, 0))
        self._end = 0

    def rest(self, at: Vector) -> None:
        """Restart as if the reference had always been ``at``."""
        self._past = np.tile(at, (2 * self._size, 1))
        self._end = self._size

    def push(self, reference: Vector) -> Vector:
        """Add the reference of the next tick; return its command."""
        if self._end == 2 * self._size:  # keeps the past contiguous
            self._past[: self._size] = self._past[self._size :]
            self._end = self._size
        self._past[self._end] = reference
        self._end += 1
        command: Vector = self._weights @ self._past[self._end - self._size : self._end]
        return command

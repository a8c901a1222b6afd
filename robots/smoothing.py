"""Goals in steps become motions of bounded speed, acceleration and jerk: the average of an average of where the goals were.

A reference point travels straight to each goal, at most V fast. The command is its moving average over ``first`` ticks, averaged again over
``second``: Biagiotti and Melchiorri 2012, "FIR filters for online trajectory planning with time- and frequency-domain specifications".
With ticks of t seconds, in the Euclidean norm, for finite differences of what comes out:

* the command is a weighted mean of reference points, so whatever convex set holds those holds it;
* speed is a mean of the reference's speeds: at most V, and no window's way is longer than the reference's longest;
* acceleration is a mean of ``(velocity now - velocity first ticks ago) / (first t)``: at most ``2 V / (first t)``;
* jerk likewise at most ``4 V / (first second t^2)``;
* when the reference stands, the command stands after ``first + second - 2`` ticks at most, all of this kept.

So no state is ever reached from which a stop within all limits does not exist: to stop is to leave the reference where it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.robot import Vector

_SLACK = 0.98
"""Of the limits of rotations: finite differences are not derivatives."""


@dataclass(frozen=True)
class Windows:
    first: int
    second: int
    """Ticks; never longer than ``first``."""

    @property
    def length(self) -> int:
        """Ticks until the command stands."""
        return self.first + self.second - 2

    @classmethod
    def of(cls, tick_s: float, translation: tuple[float, float, float], rotation: tuple[float, float, float]) -> Windows:
        """The shortest within speed, acceleration and jerk of both. Raises ValueError where the rotation's are too small for its speed.

        Rotations are averaged as rotation vectors w. The true angular velocity is J(w) w', J the left Jacobian: an integral of rotations
        exp(s w) over s from 0 to 1, so ``|J| <= 1``, ``|J'| <= |w'| / 2``, ``|J''| <= |w''| / 2 + |w'|^2 / 3``. Hence what w'' and w''' may
        be so that the angular acceleration and jerk keep their limits.
        """
        speed, acceleration, jerk = rotation
        free = _SLACK * acceleration - speed**2 / 2
        free_jerk = _SLACK * jerk - 1.5 * speed * max(free, 0) - speed**3 / 3
        if free <= 0 or free_jerk <= 0:
            raise ValueError("turning at full speed already takes all of the rotation's acceleration or jerk")
        first = second = 1
        for v, a, j in (translation, (speed, free, free_jerk)):
            least = 2 * v / (a * tick_s)
            product = 4 * v / (j * tick_s**2)
            one = max(math.ceil(least), math.ceil(math.sqrt(product)))
            first, second = max(first, one), max(second, math.ceil(product / one))
        return cls(first, second)


class Average:
    """The two moving averages over the reference's past, in any number of dimensions ``[D]``."""

    def __init__(self, windows: Windows) -> None:
        weights = np.convolve(np.full(windows.first, 1 / windows.first), np.full(windows.second, 1 / windows.second))
        self._weights = weights[::-1] / weights.sum()
        self._size = len(weights)
        self._past: NDArray[np.float64] = np.zeros((0, 0))
        self._end = 0

    def rest(self, at: Vector) -> None:
        """As if the reference had always been there."""
        self._past = np.tile(at, (2 * self._size, 1))
        self._end = self._size

    def push(self, reference: Vector) -> Vector:
        """The command, one tick on."""
        if self._end == 2 * self._size:  # so that the past always lies in one piece
            self._past[: self._size] = self._past[self._size :]
            self._end = self._size
        self._past[self._end] = reference
        self._end += 1
        command: Vector = self._weights @ self._past[self._end - self._size : self._end]
        return command

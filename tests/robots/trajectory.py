"""The true motion of the simulated arm, which the simulator publishes every 5 ms."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_vla.features.realworld.robot import RobotError
from rlinf_vla.robots.simulated.client import SimulatedCell
from rlinf_vla.robots.simulated.scene import SimulatorState


def fastest(truth: SimulatorState) -> float:
    """Of the joints, radians per second."""
    return float(np.abs(truth.joint_velocities).max())


class Trajectory:
    """``samples``: (monotonic seconds, ``of`` applied to the truth). Records until it is closed."""

    def __init__(self, cell: SimulatedCell, of: Callable[[SimulatorState], Any] = fastest) -> None:
        self.samples: list[tuple[float, Any]] = []
        self._cell = cell
        self._of = of
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        last = 0.0
        while not self._closed.wait(0.004):
            with contextlib.suppress(RobotError):  # it ends
                truth = self._cell.truth()
                if truth.time != last:
                    last = truth.time
                    self.samples.append((last, self._of(truth)))

    def forget(self) -> None:
        self.samples = []

    def last_moving(self, since: float, still: float) -> float:
        """The last time at which it was faster than ``still``, or ``since``."""
        return max(
            (when for when, speed in self.samples if when >= since and speed > still), default=since
        )

    def close(self) -> None:
        self._closed.set()

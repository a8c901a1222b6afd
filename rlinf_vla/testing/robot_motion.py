"""Move a robot in tests as a policy does, and wait until it stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core.robot import Robot, RobotPlugin, RobotState, ToolPose, ToolTarget

POLL_S = 0.05
STEPS = 10
"""Targets of one motion."""
PART = 0.4
"""Of an action of 1, in each of these steps."""
STILL_M = 0.001
"""A tool that moves less in ``REST_S`` stands still."""
REST_S = 0.3
FORWARD, BACK, UP = np.array([1.0, 0, 0]), np.array([-1.0, 0, 0]), np.array([0, 0, 1.0])


def distance(first: RobotState, second: RobotState) -> float:
    """Return metres between the tools of two states."""
    assert np.isfinite([first.pose.position, second.pose.position]).all(), "the tool's position is not finite"
    return float(np.linalg.norm(first.pose.position - second.pose.position))


class RobotMotion:
    """Drive robots of ``plugin``. Override ``now`` and ``sleep`` for a robot with another clock."""

    plugin: RobotPlugin
    settle_s = 8.0
    """Maximum time until an order has taken effect and the arm stands still."""

    def now(self) -> float:
        """Return the time of the robot's clock in seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = self.now() + self.settle_s
        while not condition():
            assert self.now() < deadline, f"not within {self.settle_s:g} s: {what}"
            self.sleep(POLL_S)

    def acknowledge(self, robot: Robot) -> None:
        """Acknowledge until the fault is gone, as an operator does."""

        def sound() -> bool:
            if robot.observe().fault is not None:
                robot.acknowledge("tester")
            return robot.observe().fault is None

        self.wait_until(sound, "an acknowledged fault is cleared")

    def wait_still(self, robot: Robot) -> RobotState:
        """Wait until the tool stands still; return the state. Observes, as a living policy does."""

        def still() -> bool:
            first = robot.observe()
            for _ in range(round(REST_S / POLL_S)):
                self.sleep(POLL_S)
                if distance(robot.observe(), first) > STILL_M:
                    return False
            return True

        self.wait_until(still, "the arm stands still")
        return robot.observe()

    def command(self, robot: Robot, position: NDArray[np.float64], width: float | None = None) -> None:
        """Send a target with the current orientation, valid for two and a half periods."""
        state, period = robot.observe(), 1 / robot.spec.control_hz
        robot.command(ToolTarget(ToolPose(position, state.pose.quaternion), width), self.now() + 2.5 * period)

    def move(self, robot: Robot, direction: NDArray[np.float64], width: float | None = None) -> float:
        """Send targets along ``direction`` as a policy does; return their length in metres."""
        position, step = robot.observe().pose.position.copy(), PART * robot.spec.translation_m
        for _ in range(STEPS):
            position = position + step * direction
            self.command(robot, position, width)
            self.sleep(1 / robot.spec.control_hz)
        return STEPS * step

    @contextmanager
    def connected(self, config: Any) -> Iterator[Robot]:
        """Yield a robot at its rest position, without a fault."""
        assert self.plugin.simulated, "this suite moves the arm: test the plug-in with a simulated one"
        with closing(self.plugin.make(config)) as robot:
            robot.connect(60)
            if robot.observe().fault is not None:
                self.acknowledge(robot)
            robot.home(60)
            yield robot

    def seen(self, config: Any) -> RobotState:
        """Return the state after a connection of its own."""
        with closing(self.plugin.make(config)) as robot:
            robot.connect(60)
            return self.wait_still(robot)

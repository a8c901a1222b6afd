"""Move a robot in tests as a policy does, and wait until it stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_vla.features.realworld.action_space import JointSpace, ToolSpace
from rlinf_vla.features.realworld.robot import (
    JointTarget,
    Robot,
    RobotPlugin,
    RobotState,
    Target,
    ToolPose,
    ToolState,
    ToolTarget,
    Vector,
)

POLL_S = 0.05
STEPS = 10
"""Targets of one motion."""
PART = 0.4
"""Of an action of 1, in each of these steps."""
REST_S = 0.3
Direction = tuple[int, float]
"""Axis of the base, or number of a joint; sign."""
FORWARD = (0, 1.0)
BACK = (0, -1.0)
UP = (2, 1.0)
DOWN = (2, -1.0)


@dataclass(frozen=True)
class Scale:
    """Distances in metres of the tool, or in the units of a JointSpace.

    still: an arm that moves less in ``REST_S`` stands still. near: two visits of one place differ
    by less. far: beyond every limit.
    """

    still: float
    near: float
    far: float


def scale(robot: Robot) -> Scale:
    return (
        Scale(0.001, 0.02, 10.0)
        if isinstance(robot.spec.space, ToolSpace)
        else Scale(0.5, 2.0, 10_000.0)
    )


def place(state: RobotState) -> Vector:
    """Return the tool's position ``[3]``, or that of the joints ``[J]``."""
    return state.pose.position if isinstance(state, ToolState) else state.joints


def distance(first: RobotState, second: RobotState) -> float:
    """Return the distance between the places of two states."""
    assert np.isfinite([place(first), place(second)]).all(), "the arm's position is not finite"
    return float(np.linalg.norm(place(first) - place(second)))


def openings(robot: Robot, state: RobotState) -> Vector:
    """Return how far each gripper is open, from 0 to 1."""
    space = robot.spec.space
    if isinstance(state, ToolState):
        assert isinstance(space, ToolSpace), "a robot with a JointSpace has no ToolState"
        return np.array([state.gripper_width / space.gripper_width_m])
    assert isinstance(space, JointSpace), "a robot with a ToolSpace has ToolStates"
    lower, upper = np.array(space.lower), np.array(space.upper)
    return ((state.joints - lower) / (upper - lower))[space.is_gripper]


def one_action(robot: Robot, direction: Direction) -> Vector:
    """Return how an action of 1 in this direction moves the place."""
    space = robot.spec.space
    (axis, sign) = direction
    length = (
        np.full(3, space.translation_m) if isinstance(space, ToolSpace) else np.array(space.step)
    )
    return np.where(np.arange(len(length)) == axis, sign * length, 0.0)


def target(
    robot: Robot, state: RobotState, position: Vector, opening: float | None = None
) -> Target:
    """Return a target at this place, with the orientation of ``state``; None keeps the grippers."""
    space = robot.spec.space
    if isinstance(space, ToolSpace):
        assert isinstance(state, ToolState)
        return ToolTarget(
            ToolPose(position, state.pose.quaternion),
            None if opening is None else opening * space.gripper_width_m,
        )
    if opening is None:
        return JointTarget(position)
    lower, upper = np.array(space.lower), np.array(space.upper)
    return JointTarget(np.where(space.is_gripper, lower + opening * (upper - lower), position))


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
        """Wait until the arm stands still; return the state. Observes, as a living policy does."""

        def still() -> bool:
            first = robot.observe()
            for _ in range(round(REST_S / POLL_S)):
                self.sleep(POLL_S)
                if distance(robot.observe(), first) > scale(robot).still:
                    return False
            return True

        self.wait_until(still, "the arm stands still")
        return robot.observe()

    def command(self, robot: Robot, position: Vector, opening: float | None = None) -> None:
        """Send a target with the current orientation, valid for two and a half periods."""
        robot.command(
            target(robot, robot.observe(), position, opening),
            self.now() + 2.5 / robot.spec.control_hz,
        )

    def move(self, robot: Robot, direction: Direction, opening: float | None = None) -> float:
        """Send targets along ``direction`` as a policy does; return the length of the way."""
        position = place(robot.observe()).copy()
        step = PART * one_action(robot, direction)
        for _ in range(STEPS):
            position = position + step
            self.command(robot, position, opening)
            self.sleep(1 / robot.spec.control_hz)
        return STEPS * float(np.linalg.norm(step))

    @contextmanager
    def connected(self, config: Any) -> Iterator[Robot]:
        """Yield a robot at its rest position, without a fault."""
        assert self.plugin.simulated, (
            "this suite moves the arm: test the plug-in with a simulated one"
        )
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

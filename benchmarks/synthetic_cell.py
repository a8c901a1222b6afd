"""A robot and a camera with a given time cost and no hardware, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlinf_vla.features.realworld.action_space import ToolSpace
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.robot import (
    Frame,
    Intervention,
    RobotError,
    RobotSpec,
    RobotState,
    Target,
    ToolPose,
    ToolState,
    ToolTarget,
)

REST = ToolPose(np.array([0.45, 0.0, 0.3]), np.array([0.0, 1.0, 0.0, 0.0]))


SPACE = ToolSpace(translation_m=0.05, rotation_rad=0.25, gripper_width_m=0.08)


class SyntheticRobot:
    """A robot that reaches every target at once. ``cost``: seconds per observation or command."""

    def __init__(self, clock: Clock, control_hz: float, cost: float = 0.0) -> None:
        self.spec = RobotSpec("synthetic", control_hz, 1 / control_hz, SPACE)
        self._clock = clock
        self._cost = cost
        zeros = np.zeros(7)
        self.state = ToolState(clock.now(), zeros, zeros, REST, np.zeros(6), SPACE.gripper_width_m)
        self.commands: list[tuple[float, ToolTarget, float]] = []
        """(time of the command, target, valid until)."""
        self.observed: list[float] = []
        """Times of observation."""

    def connect(self, timeout_s: float) -> None: ...

    def observe(self) -> RobotState:
        self.observed.append(self._clock.now())
        pass_time(self._clock, self._cost)
        return replace(self.state, time=self._clock.now())

    def command(self, target: Target, valid_until: float) -> None:
        assert isinstance(target, ToolTarget)
        pass_time(self._clock, self._cost)
        self.commands.append((self._clock.now(), target, valid_until))
        self.state = replace(self.state, pose=target.pose, commanded=target)

    def interventions(self) -> list[Intervention]:
        return []

    def stop(self, why: str) -> None:
        self.state = replace(self.state, fault=self.state.fault or why)

    def acknowledge(self, operator: str) -> None:
        self.state = replace(self.state, fault=None)

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        if (why := objection()) is not None:
            self.stop(why)
            raise RobotError(why)
        self.state = replace(self.state, pose=REST)

    def close(self) -> None: ...


class SyntheticCamera:
    """A camera whose images are grey and taken on request; ``cost``: seconds per image."""

    def __init__(self, clock: Clock, name: str, size: tuple[int, int], cost: float = 0.0) -> None:
        self.name = name
        self._clock = clock
        self._cost = cost
        self._image = np.full((*size, 3), 128, np.uint8)
        self._count = 0

    def start(self) -> None: ...

    def latest(self) -> Frame:
        pass_time(self._clock, self._cost)
        self._count += 1
        return Frame(self._clock.now(), self._count, self._image)

    def close(self) -> None: ...


def pass_time(clock: Clock, seconds: float) -> None:
    if seconds:
        clock.sleep_until(clock.now() + seconds)

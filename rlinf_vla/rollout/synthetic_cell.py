"""A robot and a camera of stated cost, which need no hardware: what the control loop is measured and tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlinf_vla.robot import Frame, Intervention, RobotError, RobotSpec, RobotState, ToolPose, ToolTarget
from rlinf_vla.rollout.clock import Clock

REST = ToolPose(np.array([0.45, 0.0, 0.3]), np.array([0.0, 1.0, 0.0, 0.0]))


class SyntheticRobot:
    """Stands where it was last told to be. ``cost``: seconds that observing it and commanding it take each."""

    def __init__(self, clock: Clock, control_hz: float, cost: float = 0.0) -> None:
        self.spec = RobotSpec("synthetic", control_hz, translation_m=0.05, rotation_rad=0.25, gripper_width_m=0.08, lag_s=1 / control_hz)
        self._clock, self._cost = clock, cost
        zeros = np.zeros(7)
        self.state = RobotState(clock.now(), REST, zeros, zeros, np.zeros(6), self.spec.gripper_width_m)
        self.commands: list[tuple[float, ToolTarget, float]] = []
        """(when, target, valid until)."""
        self.observed: list[float] = []
        """When it was looked at."""

    def connect(self, timeout_s: float) -> None: ...

    def observe(self) -> RobotState:
        self.observed.append(self._clock.now())
        pass_time(self._clock, self._cost)
        return replace(self.state, time=self._clock.now())

    def command(self, target: ToolTarget, valid_until: float) -> None:
        pass_time(self._clock, self._cost)
        self.commands.append((self._clock.now(), target, valid_until))
        self.state = replace(self.state, pose=target.pose, commanded=target)

    def interventions(self) -> list[Intervention]:
        return []

    def stop(self, why: str) -> None:
        self.state = replace(self.state, fault=self.state.fault or why)

    def acknowledge(self, person: str) -> None:
        self.state = replace(self.state, fault=None)

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        if (why := objection()) is not None:
            self.stop(why)
            raise RobotError(why)
        self.state = replace(self.state, pose=REST)

    def close(self) -> None: ...


class SyntheticCamera:
    """One grey picture after the other, each taken when it is asked for."""

    def __init__(self, clock: Clock, name: str, size: tuple[int, int], cost: float = 0.0) -> None:
        self.name, self._clock, self._cost = name, clock, cost
        self._image, self._count = np.full((*size, 3), 128, np.uint8), 0

    def start(self) -> None: ...

    def latest(self) -> Frame:
        pass_time(self._clock, self._cost)
        self._count += 1
        return Frame(self._clock.now(), self._count, self._image)

    def close(self) -> None: ...


def pass_time(clock: Clock, seconds: float) -> None:
    if seconds:
        clock.sleep_until(clock.now() + seconds)

"""The suite of robot plug-ins on two arms of seven joints each: a toy passes, and broken ones fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from rlinf_vla.benchmarks.synthetic_cell import SyntheticCamera
from rlinf_vla.features.realworld.action_space import Action, JointSpace
from rlinf_vla.features.realworld.robot import (
    Camera,
    Finding,
    Intervention,
    JointTarget,
    Robot,
    RobotError,
    RobotSpec,
    RobotState,
    Scene,
    Target,
)
from rlinf_vla.testing.robot import RobotConformance
from tests.features.realworld.virtual_time import VirtualClock

NAMES = tuple(
    f"{arm}_{joint}"
    for arm in ("left", "right")
    for joint in ("1", "2", "3", "4", "5", "6", "gripper")
)
GRIPPERS = ("left_gripper", "right_gripper")
LOWER = tuple(0.0 if name in GRIPPERS else -90.0 for name in NAMES)
UPPER = tuple(100.0 if name in GRIPPERS else 90.0 for name in NAMES)
STEP = tuple(20.0 if name in GRIPPERS else 5.0 for name in NAMES)
HOME = np.array([50.0 if name in GRIPPERS else 0.0 for name in NAMES])


@dataclass
class Config:
    name: str = "two_arms"
    relative: bool = True


class TwoArms:
    """Reaches every target at once, within its limits."""

    def __init__(self, config: Config, clock: VirtualClock) -> None:
        self.spec = RobotSpec(
            "two_arms", 10.0, 0.1, JointSpace(NAMES, LOWER, UPPER, STEP, GRIPPERS, config.relative)
        )
        self._clock = clock
        self.connected = False
        self.state = RobotState(clock.now(), HOME, np.zeros(14))
        self._changes: list[Intervention] = []

    def connect(self, timeout_s: float) -> None:
        self.connected = True

    def close(self) -> None:
        self.connected = False

    def observe(self) -> RobotState:
        return replace(self.state, time=self._clock.now())

    def command(self, target: Target, valid_until: float) -> None:
        if not self.connected or self.state.fault is not None:
            raise RobotError(self.state.fault or "not connected")
        assert isinstance(target, JointTarget)
        if not np.isfinite(target.positions).all():
            raise RobotError("a target is not finite")
        positions = np.clip(target.positions, LOWER, UPPER)
        for before, after in zip(target.positions, positions, strict=True):
            if before != after:
                self._changes.append(Intervention(self._clock.now(), "limit", before, after))
        self.state = replace(self.state, joints=positions, commanded=JointTarget(positions))

    def interventions(self) -> list[Intervention]:
        found = self._changes
        self._changes = []
        return found

    def stop(self, why: str) -> None:
        self.state = replace(self.state, fault=self.state.fault or why)

    def acknowledge(self, operator: str) -> None:
        self.state = replace(self.state, fault=None)

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        if (why := self.state.fault or objection()) is not None:
            self.stop(why)
            raise RobotError(why)
        self.state = replace(self.state, joints=HOME)


class Lift:
    """Raise both arms."""

    task = "Lift"
    by_hand = False
    has_expert = True
    instructions = ("lift",)

    def __init__(self, relative: bool) -> None:
        self._relative = relative

    def arrange(self, seed: int) -> str:
        return "lift"

    def succeeded(self, state: RobotState) -> bool | None:
        return bool(state.joints[0] > 10)

    def expert(self, state: RobotState) -> Action | None:
        return np.full(14, 1.0 if self._relative else 30.0, np.float32)


class Plugin:
    Config = Config
    simulated = True
    kind: type[TwoArms] = TwoArms

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def make(self, config: Config) -> Robot:
        return self.kind(config, self.clock)

    def cameras(self, config: Config) -> list[Camera]:
        return [
            SyntheticCamera(self.clock, name, (8, 8))
            for name in ("front", "left_wrist", "right_wrist")
        ]

    def scene(self, config: Config) -> Scene:
        return Lift(config.relative)

    def check(self, config: Config) -> Iterator[Finding]:
        yield Finding("toy", True, "there")

    def diagnose(self) -> Iterator[Finding]:
        yield Finding("toy", True, "needs nothing")

    def order(self, config: Config | None, order: str, operator: str) -> list[str]:
        raise RobotError("nothing to order")


class TestTwoArms(RobotConformance):
    made: type[Plugin] = Plugin

    @cached_property
    def clock(self) -> VirtualClock:
        return VirtualClock(100.0)

    @cached_property
    def plugin(self) -> Plugin:
        return self.made(self.clock)

    def now(self) -> float:
        return self.clock.now()

    def sleep(self, seconds: float) -> None:
        self.clock.sleep_until(self.clock.now() + seconds)


class TestTwoArmsWithAbsoluteActions(TestTwoArms):
    @pytest.fixture
    def config(self) -> Config:
        return Config(relative=False)


def exchanged(self: TwoArms, target: Target, valid_until: float) -> None:
    assert isinstance(target, JointTarget)
    TwoArms.command(self, JointTarget(np.roll(target.positions, 7)), valid_until)


def closed(self: TwoArms, target: Target, valid_until: float) -> None:
    """The right gripper does not move."""
    assert isinstance(target, JointTarget)
    TwoArms.command(self, JointTarget(np.append(target.positions[:-1], 0.0)), valid_until)


def unlimited(self: TwoArms, target: Target, valid_until: float) -> None:
    assert isinstance(target, JointTarget)
    self.state = replace(self.state, joints=target.positions, commanded=target)


def spec(**changes: Any) -> dict[str, Any]:
    def __init__(self: TwoArms, *arguments: Any) -> None:
        TwoArms.__init__(self, *arguments)
        self.spec = replace(self.spec, space=replace(self.spec.space, **changes))

    return {"__init__": __init__}


SPEC, STATE = "test_its_spec_is_complete", "test_a_state_is_complete"
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "thirteen names": (spec(joint_names=NAMES[1:]), SPEC),
    "two joints of one name": (spec(joint_names=(NAMES[1], *NAMES[1:])), SPEC),
    "a gripper that is no joint": (spec(grippers=("claw",)), SPEC),
    "no range": (spec(lower=UPPER), SPEC),
    "thirteen joints": (
        {
            "observe": lambda self: replace(
                TwoArms.observe(self), joints=HOME[1:], joint_velocities=HOME[1:]
            )
        },
        STATE,
    ),
    "an open gripper beyond its range": (
        {"observe": lambda self: replace(TwoArms.observe(self), joints=HOME * 3)},
        STATE,
    ),
    "arms exchanged": ({"command": exchanged}, "test_it_follows_targets"),
    "one gripper only": ({"command": closed}, "test_the_gripper_closes_and_opens"),
    "no limits": ({"command": unlimited}, "test_a_target_beyond_its_limits_is_cut_and_reported"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_robot_fails(mistake: str) -> None:
    methods, name = BROKEN[mistake]
    suite = TestTwoArms()
    suite.made = type("BrokenPlugin", (Plugin,), {"kind": type("Broken", (TwoArms,), methods)})
    given = {"config": Config(), "robot": suite.plugin.make(Config())}
    given["robot"].connect(60)
    check = getattr(suite, name)
    with pytest.raises((AssertionError, RobotError, ValueError)):
        check(**{key: given[key] for key in inspect.signature(check).parameters})

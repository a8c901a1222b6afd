"""The suite of robot plug-ins, on a virtual clock: the toy robot passes, and each check fails for a robot that breaks the protocol."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from rlinf_vla.benchmarks.synthetic_cell import REST, SyntheticCamera
from rlinf_vla.features.realworld.robot import (
    CellError,
    Finding,
    Frame,
    Intervention,
    Robot,
    RobotError,
    RobotState,
    ToolPose,
    ToolTarget,
)
from rlinf_vla.testing.robot import RobotConformance
from tests.cli.toy_robot import ToyArm, ToyConfig, ToyPlugin
from tests.features.realworld.toy_cell import ToyScene
from tests.features.realworld.virtual_time import VirtualClock

UP = np.array([0.0, 0.0, 1.0])


class VirtualSuite(RobotConformance):
    """The suite on the clock of its plug-in, which restarts for each test."""

    made: Callable[[VirtualClock], ToyPlugin] = ToyPlugin

    @cached_property
    def clock(self) -> VirtualClock:
        return VirtualClock(100.0)

    @cached_property
    def plugin(self) -> ToyPlugin:
        return self.made(self.clock)

    def now(self) -> float:
        return self.clock.now()

    def sleep(self, seconds: float) -> None:
        self.clock.sleep_until(self.clock.now() + seconds)


class Picky(ToyPlugin):
    """Refuses a missing cell."""

    def make(self, config: ToyConfig) -> Robot:
        if config.hz == 1000.0:
            raise CellError(self.why)
        return super().make(config)

    why = "cell.yaml has no hz of 1000"


class TestToy(VirtualSuite):
    made = Picky
    wrong_configs = ({"hz": 1000.0},)


def arm(**methods: Any) -> Callable[[VirtualClock], ToyPlugin]:
    """Return the plug-in whose arm has other methods."""
    kind = type("BrokenArm", (ToyArm,), methods)

    class Plugin(ToyPlugin):
        def make(self, config: ToyConfig) -> Robot:
            return kind(config, self.clock)

    return Plugin


def seen(change: Callable[[RobotState], dict[str, Any]]) -> Callable[[VirtualClock], ToyPlugin]:
    """Return the plug-in whose arm reports other states."""

    def observe(self: ToyArm) -> RobotState:
        state = ToyArm.observe(self)
        return replace(state, **change(state))

    return arm(observe=observe)


def pose(state: RobotState, position: Any = None, quaternion: Any = None) -> dict[str, Any]:
    at = state.pose
    return {
        "pose": ToolPose(
            at.position if position is None else position,
            at.quaternion if quaternion is None else quaternion,
        )
    }


def spec(**changes: Any) -> Callable[[VirtualClock], ToyPlugin]:
    def __init__(self: ToyArm, *arguments: Any) -> None:
        ToyArm.__init__(self, *arguments)
        self.spec = replace(self.spec, **changes)

    return arm(__init__=__init__)


def plugin(**methods: Any) -> Callable[[VirtualClock], ToyPlugin]:
    return type("BrokenPlugin", (ToyPlugin,), methods)


def scene(**methods: Any) -> Callable[[VirtualClock], ToyPlugin]:
    return plugin(scene=lambda self, config: type("BrokenScene", (ToyScene,), methods)())


def camera(**methods: Any) -> Callable[[VirtualClock], ToyPlugin]:
    kind = type("BrokenCamera", (SyntheticCamera,), methods)
    return plugin(cameras=lambda self, config: [kind(self.clock, "front", (8, 8))])


def frame(change: Callable[[Frame], dict[str, Any]]) -> Callable[[VirtualClock], ToyPlugin]:
    def latest(self: SyntheticCamera) -> Frame:
        found = SyntheticCamera.latest(self)
        return replace(found, **change(found))

    return camera(latest=latest)


def once(self: Any) -> None:
    if getattr(self, "closed", False):
        raise RuntimeError("it is closed already")
    self.closed = True


def drifts(self: ToyArm) -> RobotState:
    if self.commands:
        self.state = replace(
            self.state,
            pose=ToolPose(self.state.pose.position + 0.01 * UP, self.state.pose.quaternion),
        )
    return ToyArm.observe(self)


def one_array(self: ToyArm) -> RobotState:
    """The arm keeps one array, which it overwrites."""
    state = ToyArm.observe(self)
    self.array = vars(self).get("array", state.pose.position.copy())
    self.array[:] = state.pose.position
    return replace(state, **pose(state, self.array))


def commanded(change: Callable[[ToolTarget], ToolTarget]) -> Callable[[VirtualClock], ToyPlugin]:
    """Return the plug-in whose arm pursues another target than commanded."""
    return arm(command=lambda self, target, until: ToyArm.command(self, change(target), until))


def elsewhere(position: Callable[[Any], Any]) -> Callable[[VirtualClock], ToyPlugin]:
    return commanded(
        lambda target: replace(
            target, pose=ToolPose(position(target.pose.position), target.pose.quaternion)
        )
    )


def unlimited(self: ToyArm, target: ToolTarget, valid_until: float) -> None:
    if self.state.fault is not None or not np.isfinite(target.pose.position).all():
        raise RobotError("no")
    self.state = replace(self.state, pose=target.pose, commanded=target)


def whatever(self: ToyArm, target: ToolTarget, valid_until: float) -> None:
    self.state = replace(self.state, pose=target.pose, commanded=target)


def stop_forgets(self: ToyArm, why: str) -> None:
    self.state = replace(self.state, fault=why)


def in_a_fault(self: ToyArm, target: ToolTarget, valid_until: float) -> None:
    self.state = replace(self.state, pose=target.pose)


def home_in_a_fault(
    self: ToyArm, timeout_s: float, objection: Callable[[], str | None] = lambda: None
) -> None:
    self.state = replace(self.state, pose=REST)


def home_elsewhere(
    self: ToyArm, timeout_s: float, objection: Callable[[], str | None] = lambda: None
) -> None:
    ToyArm.home(self, timeout_s, objection)
    self.homes = getattr(self, "homes", 0) + 1
    self.state = replace(
        self.state, pose=ToolPose(REST.position + 0.05 * self.homes, REST.quaternion)
    )


def home_forgets(
    self: ToyArm, timeout_s: float, objection: Callable[[], str | None] = lambda: None
) -> None:
    if (why := objection()) is not None:
        raise RobotError(why)
    ToyArm.home(self, timeout_s)


def needs_connection(self: ToyArm, why: str) -> None:
    if not self.connected:
        raise RobotError("not connected")


def again(self: ToyArm) -> list[Intervention]:
    return self._changes


def moves(self: ToyPlugin, config: ToyConfig) -> Iterator[Finding]:
    type(self).place = REST.position + 0.1
    yield Finding("toy", True, "there")


def placed(self: ToyPlugin, config: ToyConfig) -> Robot:
    made = ToyArm(config, self.clock)
    made.state = replace(
        made.state, pose=ToolPose(getattr(type(self), "place", REST.position), REST.quaternion)
    )
    return made


@dataclass
class NoName:
    name: str = ""
    hz: float = 20.0
    fault: str = "fault"


@dataclass
class Changing(ToyConfig):
    def __post_init__(self) -> None:
        self.hz += 1


def talks(self: ToyPlugin, config: ToyConfig) -> Robot:
    if config.hz == 1000.0:
        raise CellError("cell.yaml\nhas no hz of 1000")
    return ToyArm(config, self.clock)


SPEC = "test_its_spec_is_complete"
STATE = "test_a_state_is_complete"
FOLLOWS = "test_it_follows_targets"
LIMITS = "test_a_target_beyond_its_limits_is_cut_and_reported"
STOP = "test_a_stop_latches_until_it_is_acknowledged"
CAMERAS = "test_cameras_deliver_new_images"
SCENE = "test_its_scene_lays_out_episodes"
CHECK = "test_check_moves_nothing"
ANY_TIME = "test_stop_and_close_are_possible_at_any_time"
ORDER = "test_another_process_can_stop_it"
RECIPE = "test_its_config_fits_into_a_recipe"
CONFIG = "test_a_wrong_config_is_refused_in_one_line"
TIMED = "test_timings_are_seconds_since_the_last_call"
BROKEN: dict[str, tuple[Callable[[VirtualClock], ToyPlugin], str]] = {
    "a rate of zero": (spec(control_hz=0.0), SPEC),
    "no name": (spec(name=""), SPEC),
    "an infinite lag": (spec(lag_s=np.inf), SPEC),
    "float32": (seen(lambda state: {"joints": state.joints.astype(np.float32)}), STATE),
    "six joints": (seen(lambda state: {"joints": state.joints[:6]}), STATE),
    "a wrench that is not finite": (seen(lambda state: {"wrench": state.wrench + np.nan}), STATE),
    "a quaternion of another length": (
        seen(lambda state: pose(state, quaternion=2 * state.pose.quaternion)),
        STATE,
    ),
    "millimetres": (seen(lambda state: {"gripper_width": 80.0}), STATE),
    "a fault at rest": (
        arm(
            observe=lambda self: replace(
                ToyArm.observe(self), fault=(self._changes and None) or "tired"
            )
        ),
        STATE,
    ),
    "time that stands": (seen(lambda state: {"time": 100.0}), STATE),
    "another clock": (seen(lambda state: {"time": state.time + 1e6}), STATE),
    "states that change": (arm(observe=one_array), "test_a_state_stays_as_it_was"),
    "mirrored": (
        elsewhere(lambda at: at * [1, -1, 1] if at[1] else at * [-1, 1, 1] + [0.9, 0, 0]),
        FOLLOWS,
    ),
    "axes exchanged": (
        elsewhere(lambda at: REST.position + (at - REST.position)[[1, 0, 2]]),
        FOLLOWS,
    ),
    "half the way": (elsewhere(lambda at: REST.position + 0.3 * (at - REST.position)), FOLLOWS),
    "does not say what it was told": (seen(lambda state: {"commanded": None}), FOLLOWS),
    "fingers that never move": (
        commanded(lambda target: replace(target, gripper_width=None)),
        "test_the_gripper_closes_and_opens",
    ),
    "fingers the wrong way": (
        commanded(
            lambda target: (
                target
                if target.gripper_width is None
                else replace(target, gripper_width=0.08 - target.gripper_width)
            )
        ),
        "test_the_gripper_closes_and_opens",
    ),
    "coasts": (arm(observe=drifts), "test_it_holds_when_targets_cease"),
    "goes to NaN": (arm(command=whatever), "test_a_malformed_target_moves_nothing"),
    "no limits": (arm(command=unlimited), LIMITS),
    "limits in silence": (arm(interventions=lambda self: []), LIMITS),
    "reports twice": (arm(interventions=again), LIMITS),
    "a stop that does nothing": (arm(stop=lambda self, why: None), STOP),
    "the last reason": (arm(stop=stop_forgets), STOP),
    "commands in a fault": (arm(command=in_a_fault), STOP),
    "home in a fault": (arm(home=home_in_a_fault), STOP),
    "faults for ever": (arm(acknowledge=lambda self, operator: None), STOP),
    "a stop that needs a connection": (arm(stop=needs_connection), ANY_TIME),
    "closed once": (arm(close=once), ANY_TIME),
    "commands after it was closed": (arm(close=lambda self: None), ANY_TIME),
    "another home each time": (arm(home=home_elsewhere), "test_home_is_one_place"),
    "an objection unheard": (arm(home=home_in_a_fault), "test_an_objection_stops_the_way_home"),
    "an objection forgotten": (arm(home=home_forgets), "test_an_objection_stops_the_way_home"),
    "an order that nobody obeys": (
        plugin(order=lambda self, config, order, operator: ["toy: stopped"]),
        ORDER,
    ),
    "an order that says nothing": (plugin(order=lambda self, config, order, operator: []), ORDER),
    "timings that are dates": (arm(timings=lambda self: {"safety": [1.7e9]}), TIMED),
    "timings that are never taken": (arm(timings=lambda self: {}), TIMED),
    "a frozen camera": (frame(lambda found: {"number": 1}), CAMERAS),
    "frames of another clock": (frame(lambda found: {"time": found.time + 1e6}), CAMERAS),
    "grey images": (frame(lambda found: {"image": found.image[..., 0]}), CAMERAS),
    "a camera closed once": (camera(close=once), CAMERAS),
    "no instruction": (scene(arrange=lambda self, seed: ""), SCENE),
    "an expert that is none": (scene(expert=lambda self, state: None), SCENE),
    "an expert that goes too far": (
        scene(expert=lambda self, state: np.full(4, 2, np.float32)),
        SCENE,
    ),
    "an expert by chance": (
        scene(expert=lambda self, state: np.random.rand(4).astype(np.float32)),
        SCENE,
    ),
    "success in percent": (scene(succeeded=lambda self, state: 50), SCENE),
    "a check that moves": (plugin(check=moves, make=placed), CHECK),
    "a check of nothing": (plugin(check=lambda self, config: iter(())), CHECK),
    "a config without a name": (plugin(Config=NoName), RECIPE),
    "a config that changes": (plugin(Config=Changing), RECIPE),
    "a wrong config that is taken": (ToyPlugin, CONFIG),
    "a page about a wrong config": (plugin(make=talks), CONFIG),
}


def run(made: Callable[[VirtualClock], ToyPlugin], name: str) -> None:
    """Run one check on a robot that is only connected."""

    class Suite(VirtualSuite):
        wrong_configs = ({"hz": 1000.0},)

    Suite.made = made
    suite = Suite()
    given = {"config": suite.plugin.Config(), "robot": suite.plugin.make(ToyConfig())}
    given["robot"].connect(60)
    check = getattr(suite, name)
    check(**{key: given[key] for key in inspect.signature(check).parameters})


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_robot_fails(mistake: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, RobotError, RuntimeError, pytest.fail.Exception)):
        run(*BROKEN[mistake])


def test_each_check_can_fail() -> None:
    checks = {name for name in vars(RobotConformance) if name.startswith("test_")}
    assert checks == {name for _, name in BROKEN.values()}


def test_an_arm_that_is_not_simulated_is_not_moved() -> None:
    suite = VirtualSuite()
    suite.plugin = plugin(simulated=False, make=lambda self, config: pytest.fail("it is made"))(
        suite.clock
    )
    with (
        pytest.raises(AssertionError, match="moves the arm"),
        suite.connected(suite.plugin.Config()),
    ):
        pass

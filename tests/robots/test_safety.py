from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vla.benchmarks import robot_safety_trials as safety_trials
from rlinf_vla.benchmarks.robot_safety_trials import Follower, usage
from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.robot import RobotError, RobotState, ToolPose, ToolTarget
from rlinf_vla.robots import cell_file, kinematics
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.safety import SafetyFilter
from rlinf_vla.robots.smoothing import Average

SHIPPED = cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell)
CELL = dataclasses.replace(SHIPPED, servo_hz=100.0)
ROOMY = safety_trials.roomy(CELL)
TICK = 1 / CELL.servo_hz
ALL_OF_IT = 1 + 1e-6

Goals = list[tuple[ToolTarget | None, int]]


def started(cell: Cell = CELL) -> tuple[SafetyFilter, Follower]:
    filter_, follower = SafetyFilter(cell), Follower(cell)
    filter_.start(follower.state())
    return filter_, follower


def go(
    filter_: SafetyFilter, follower: Follower, goal: ToolTarget | None, ticks: int = 10
) -> Counter[str]:
    """Rules reported meanwhile."""
    told: Counter[str] = Counter()
    for _ in range(ticks):
        filtered = filter_.step(goal, follower.state(), TICK)
        assert filtered.fault is None
        told.update(each.rule for each in filtered.interventions)
        follower.follow(filtered.command)
    return told


def away(
    step: tuple[float, float, float] = (0, 0, 0),
    turn: tuple[float, float, float] = (0, 0, 0),
    width: float | None = None,
) -> ToolTarget:
    quaternion = rotations.multiply(rotations.from_vector(turn), CELL.home.quaternion.tolist())
    return ToolTarget(ToolPose(CELL.home.position + step, np.array(quaternion)), width)


# --- any input

odd = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(
    [1e300, -1e300, 5e-324, math.nan, math.inf]
)
near = st.floats(-1, 1)
positions = (
    st.lists(near, min_size=3, max_size=3)
    | st.lists(odd, min_size=3, max_size=3)
    | st.lists(odd, max_size=5)
)
whole = (
    st.lists(near, min_size=4, max_size=4)
    .filter(lambda q: math.hypot(*q) > 0.01)
    .map(rotations.unit)
)
quaternions = whole | st.lists(odd, min_size=4, max_size=4)
widths = st.none() | st.floats(0, 0.08) | odd
made = st.builds(
    lambda p, q, w: ToolTarget(ToolPose(np.array(p, np.float64), np.array(q, np.float64)), w),
    positions,
    quaternions,
    widths,
)
sequences = st.lists(st.tuples(st.none() | made, st.integers(1, 25)), max_size=12)


@pytest.mark.parametrize("cell", [SHIPPED, ROOMY], ids=["shipped", "roomy"])
@settings(max_examples=30)
@given(sent=sequences)
def test_no_command_outside_the_limits_leaves_for_any_input(cell: Cell, sent: Goals) -> None:
    filter_ = SafetyFilter(cell)
    played = safety_trials.run_trial(cell, filter_, iter(sent))
    assert played.fault is None
    used = usage(cell, played)
    assert max(used.values()) <= ALL_OF_IT and used["joint_margin_rad"] < 0.5, used


@pytest.mark.parametrize("cell", [SHIPPED, ROOMY], ids=["shipped", "roomy"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), actions=st.integers(1, 80))
def test_it_stops_from_any_state_within_all_limits_and_the_stated_time(
    cell: Cell, seed: int, actions: int
) -> None:
    draw = np.random.default_rng(seed)
    filter_ = SafetyFilter(cell)

    def sent() -> Iterator[tuple[ToolTarget | None, int]]:
        hostile = safety_trials.goals(draw, cell, lambda: filter_.admitted)
        yield from ((next(hostile), int(draw.integers(1, 12))) for _ in range(actions))
        yield None, cell.windows.length + 3

    played = safety_trials.run_trial(cell, filter_, sent())
    assert played.fault is None
    used = usage(cell, played)
    assert max(used.values()) <= ALL_OF_IT and used["joint_margin_rad"] < 0.5, used
    standing = played.commands[-3:]
    assert standing == pytest.approx(np.repeat(standing[-1:], 3, axis=0), abs=1e-12)
    begun = played.commands[-cell.windows.length - 4, :3]
    assert math.dist(begun, standing[-1, :3]) <= cell.stop_distance_m + 1e-9


@pytest.mark.parametrize("cell", [SHIPPED, ROOMY], ids=["shipped", "roomy"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), actions=st.integers(1, 10))
def test_an_admitted_goal_passes_unchanged(cell: Cell, seed: int, actions: int) -> None:
    """The filter is idempotent: in the same state, the admitted goal makes the same command, without an intervention."""
    draw = np.random.default_rng(seed)
    (filter_, follower) = started(cell)
    for goal, _ in zip(
        safety_trials.goals(draw, cell, lambda: filter_.admitted), range(actions), strict=False
    ):
        again = copy.deepcopy(filter_)
        for _ in range(int(draw.integers(1, 12))):
            filtered = filter_.step(goal, follower.state(), 1 / cell.servo_hz)
            if again is not None and goal is not None:
                repeated = again.step(filter_.admitted, follower.state(), 1 / cell.servo_hz)
                assert repeated.interventions == []
                assert repeated.command.pose.position == pytest.approx(
                    filtered.command.pose.position, abs=1e-9
                )
                assert abs(
                    repeated.command.pose.quaternion @ filtered.command.pose.quaternion
                ) == pytest.approx(1, abs=1e-9)
                assert repeated.command.gripper_width == filtered.command.gripper_width
            again = None
            follower.follow(filtered.command)


# --- a goal


def test_a_goal_within_the_limits_is_reached_without_intervention() -> None:
    filter_, follower = started()
    goal = away((0.01, -0.015, 0.01), (0.03, 0.02, -0.08), 0.03)
    assert not go(filter_, follower, goal, CELL.ticks_per_step + CELL.windows.length)
    pose = goal.pose
    command = filter_.step(goal, follower.state(), TICK).command
    assert command.pose.position == pytest.approx(pose.position, abs=1e-12)
    assert abs(command.pose.quaternion @ pose.quaternion) == pytest.approx(1, abs=1e-12)
    assert command.gripper_width == 0.03


def test_the_command_goes_straight() -> None:
    filter_, follower = started()
    direction = np.array([0.015, 0.01, 0.005])
    for _ in range(40):
        command = filter_.step(away(tuple(direction)), follower.state(), TICK).command
        follower.follow(command)
        moved = command.pose.position - CELL.home.position
        assert moved == pytest.approx(
            direction * (moved @ direction) / (direction @ direction), abs=1e-12
        )


def test_a_jump_of_a_metre_is_one_step_and_is_reported_once() -> None:
    filter_, follower = started()
    told: list[Any] = []
    jump = away((0, 0, -1))
    for _ in range(60):
        filtered = filter_.step(jump, follower.state(), TICK)
        told += filtered.interventions
        follower.follow(filtered.command)
    assert {each.rule: (each.before, each.after) for each in told} == {
        "workspace_z_m": pytest.approx((CELL.home.position[2] - 1, 0.02)),
        "max_translation_per_step_m": pytest.approx((CELL.home.position[2] - 0.02, 0.025)),
    }
    assert len(told) == 2 and filter_.counts == {
        "workspace_z_m": 1,
        "max_translation_per_step_m": 1,
    }
    assert math.dist(follower.state().pose.position, CELL.home.position) == pytest.approx(0.025)


def test_the_speed_limit_shortens_a_goal_if_it_is_tighter_than_the_step() -> None:
    cell = dataclasses.replace(CELL, max_speed_m_s=0.1)
    filter_, follower = started(cell)
    (told,) = filter_.step(away((0.02, 0, 0)), follower.state(), TICK).interventions
    assert (told.rule, told.before, told.after) == (
        "max_speed_m_s",
        pytest.approx(0.2),
        pytest.approx(0.1),
    )


def test_goals_of_a_second_share_a_budget() -> None:
    filter_, follower = started(dataclasses.replace(CELL, max_translation_per_second_m=0.1))
    rules: Counter[str] = Counter()
    for number in range(30):
        rules += go(filter_, follower, away(((-1) ** number * 0.006, 0, 0)))
    assert rules["max_translation_per_second_m"] > 5
    assert go(filter_, follower, None, 100) == {}, "a second later"
    assert not go(filter_, follower, away((0.01, 0, 0)))


def test_a_quaternion_and_its_negative_are_one_rotation() -> None:
    goal = away((0.01, 0, 0), (0.05, 0, 0.05))
    commands = []
    for sign in (1, -1):
        filter_, follower = started()
        go(
            filter_,
            follower,
            ToolTarget(ToolPose(goal.pose.position, sign * goal.pose.quaternion)),
            30,
        )
        commands.append(follower.state().pose)
    assert (commands[0].quaternion == commands[1].quaternion).all()


def test_beyond_the_limit_of_twist_it_does_not_rotate_the_long_way() -> None:
    filter_, follower = started(ROOMY)
    for number in range(60):  # further and further to the left, through 180 degrees
        go(filter_, follower, away(turn=(0, 0, 0.1 * number)))
    turned = rotations.multiply(
        follower.state().pose.quaternion.tolist(), rotations.inverse(CELL.home.quaternion.tolist())
    )
    about_z = rotations.to_vector(turned)[2]
    assert 1.0 < about_z <= math.radians(150)
    assert filter_.counts["max_twist_deg"] + filter_.counts["joint_margin_rad"] > 0


@pytest.mark.parametrize("joint_end", ["far", "high", "low"])
def test_goals_at_the_joint_limits_stay_out_of_the_margin(joint_end: str) -> None:
    direction = {"far": (0.02, 0.0, 0.0), "high": (-0.01, 0.0, 0.02), "low": (-0.02, 0.0, -0.01)}[
        joint_end
    ]
    filter_, follower = started(ROOMY)
    for _ in range(60):
        go(
            filter_,
            follower,
            ToolTarget(
                ToolPose(
                    filter_.admitted.pose.position + direction, filter_.admitted.pose.quaternion
                )
            ),
        )
        left = np.minimum(
            follower.joints - kinematics.LOWER, kinematics.UPPER - follower.joints
        ).min()
        assert left > 0.9 * ROOMY.joint_margin_rad
    assert filter_.counts["joint_margin_rad"] > 0
    before = follower.state().pose.position
    for _ in range(8):  # slowly where joints would have to be fast
        go(
            filter_,
            follower,
            ToolTarget(
                ToolPose(
                    filter_.admitted.pose.position - direction, filter_.admitted.pose.quaternion
                )
            ),
        )
    assert math.dist(before, follower.state().pose.position) > 0.01, "it may move back"


def test_where_no_joints_reach_the_arm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    filter_, follower = started()
    before = filter_.admitted.pose
    monkeypatch.setattr(kinematics.FrankaKinematics, "reach", lambda *_: None)
    assert go(filter_, follower, away((0.02, 0, 0)))["joint_margin_rad"] > 0
    assert filter_.admitted.pose.position == pytest.approx(before.position, abs=0)


def test_a_blocked_arm_is_not_pulled_further_than_the_lead() -> None:
    filter_, follower = started()
    held = follower.state()
    rules: Counter[str] = Counter()
    for _ in range(20):
        goal = ToolTarget(
            ToolPose(filter_.admitted.pose.position - np.array([0, 0, 0.02]), CELL.home.quaternion)
        )
        for _ in range(10):
            filtered = filter_.step(goal, held, TICK)
            rules.update(each.rule for each in filtered.interventions)
            assert (
                math.dist(filtered.command.pose.position, held.pose.position)
                <= CELL.max_lead_m + 1e-9
            )
    assert rules["max_lead_m"] > 0


# --- malformed


@pytest.mark.parametrize(
    ("position", "quaternion", "width", "rule"),
    [
        ([math.nan, 0, 0], [1, 0, 0, 0], None, "not_finite"),
        ([0.4, -math.inf, 0], [1, 0, 0, 0], None, "not_finite"),
        ([0.4, 0, 0.3], [math.nan] * 4, None, "not_finite"),
        ([0.4, 0, 0.3], [1, 0, 0, 0], math.nan, "not_finite"),
        ([0.4, 0], [1, 0, 0, 0], None, "shape"),
        ([[0.4, 0, 0.3]], [1, 0, 0, 0], None, "shape"),
        ([0.4, 0, 0.3], [1, 0, 0], None, "shape"),
        (["left", 0, 0.3], [1, 0, 0, 0], None, "shape"),
        (None, [1, 0, 0, 0], None, "shape"),
        ([0.4, 0, 0.3], [0, 0, 0, 0], None, "unit_quaternion"),
        ([0.4, 0, 0.3], [1, 1, 0, 0], None, "unit_quaternion"),
        ([0.4, 0, 0.3], [5e-324, 0, 0, 0], None, "unit_quaternion"),
        ([0.4, 0, 0.3], [1e308, 1e308, 1e308, 1e308], None, "unit_quaternion"),
    ],
)
def test_a_malformed_goal_is_refused_and_named(
    position: Any, quaternion: Any, width: float | None, rule: str
) -> None:
    filter_, follower = started()
    go(filter_, follower, away((0.02, 0, 0)), 5)
    ahead = filter_.admitted
    filtered = filter_.step(
        ToolTarget(ToolPose(position, quaternion), width), follower.state(), TICK
    )
    assert [each.rule for each in filtered.interventions] == [rule]
    assert all(
        math.isfinite(each.before) and math.isfinite(each.after) for each in filtered.interventions
    )
    assert math.dist(filter_.admitted.pose.position, CELL.home.position) < math.dist(
        ahead.pose.position, CELL.home.position
    ), "the path ends"
    go(filter_, follower, None, CELL.windows.length + 1)
    assert follower.state().pose.position == pytest.approx(
        filter_.admitted.pose.position, abs=1e-12
    )


def test_the_gripper_width_is_clipped_and_none_keeps_it() -> None:
    filter_, follower = started()
    assert filter_.step(away(), follower.state(), TICK).command.gripper_width is None
    filtered = filter_.step(away(width=0.5), follower.state(), TICK)
    assert filtered.command.gripper_width == 0.08 and [
        each.rule for each in filtered.interventions
    ] == ["gripper_width_m"]
    assert filter_.step(away(width=-1.0), follower.state(), TICK).command.gripper_width == 0.0
    assert filter_.step(away(width=0.02), follower.state(), TICK).command.gripper_width == 0.02
    assert filter_.step(away(), follower.state(), TICK).command.gripper_width == 0.02
    assert filter_.step(None, follower.state(), TICK).command.gripper_width == 0.02


# --- faults


def stays(filter_: SafetyFilter, state: RobotState, goal: ToolTarget) -> str:
    """The fault, after which the arm stops within the stated time and limits although goals continue."""
    before = filter_.admitted.pose.position
    said = ""
    commands = []
    for _ in range(CELL.windows.length + 3):
        filtered = filter_.step(dataclasses.replace(goal), state, TICK)
        assert filtered.fault is not None
        said = said or filtered.fault
        commands.append(filtered.command.pose.position)
    assert commands[-1] == pytest.approx(commands[-3], abs=1e-12)
    assert math.dist(commands[0], commands[-1]) <= CELL.stop_distance_m + 1e-9
    assert math.dist(before, commands[-1]) <= CELL.step_m
    return said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"wrench": np.array([0, 30.0, 30.0, 0, 0, 0])},
            "max_force_n: 42.4 N measured, 40 allowed",
        ),
        (
            {"wrench": np.array([0, 0, 0, 0, -12.5, 0])},
            "max_torque_n_m: 12.5 N m measured, 12 allowed",
        ),
        ({"wrench": np.array([0, 0, math.nan, 0, 0, 0])}, "state: a measurement is not finite"),
        ({"joints": np.full(7, math.inf)}, "state: a measurement is not finite"),
        ({"joints": np.zeros(6)}, "state: arrays of shapes"),
        (
            {"joints": kinematics.UPPER - 0.04},
            "joint_margin_rad: joint 1 is 0.040 rad from its limit, 0.05 allowed",
        ),
        (
            {"pose": ToolPose(CELL.home.position, np.zeros(4))},
            "state: the measured quaternion is not of length 1",
        ),
    ],
)
def test_a_measurement_beyond_a_limit_is_a_fault_and_stops_the_arm(
    change: dict[str, Any], said: str
) -> None:
    filter_, follower = started()
    for number in range(3):
        go(filter_, follower, away((0.02 * (number + 1), 0, 0)))
    assert stays(
        filter_, dataclasses.replace(follower.state(), **change), away((0.1, 0, 0))
    ).startswith(said)


def test_after_a_fault_it_restarts_at_the_arms_position() -> None:
    filter_, follower = started()
    go(filter_, follower, away((0.02, 0, 0)), 40)
    stays(filter_, follower.state(np.array([99.0, 0, 0, 0, 0, 0])), away())
    filter_.start(follower.state())
    assert filter_.step(None, follower.state(), TICK).command.pose.position == pytest.approx(
        follower.state().pose.position, abs=1e-12
    )
    assert not go(filter_, follower, away((0.03, 0, 0)))


def test_the_gate_holds_and_latches_an_error_of_the_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filter_, follower = started()
    go(filter_, follower, away((0.02, 0, 0)))
    last = follower.state().pose
    with monkeypatch.context() as broken:
        broken.setattr(Average, "push", lambda self, reference: np.array([0.6, 0, 0.3, 0, 0, 0]))
        filtered = filter_.step(away(), follower.state(), TICK)
    assert filtered.fault is not None and "violates the limit" in filtered.fault
    assert filtered.command.pose is last
    for _ in range(50):
        filtered = filter_.step(away(), follower.state(), TICK)
        assert filtered.fault is not None and filtered.command.pose is last
    filter_.start(follower.state())
    assert not go(filter_, follower, away((0.01, 0, 0)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"joint_velocities": np.full(7, 0.2)}, "the arm is moving; wait until it stands"),
        (
            {"pose": away((0, 0, 0.1034)).pose},
            "the arm reports its tool 103 mm and 0 deg from where",
        ),
        (
            {"pose": away(turn=(0, 0, math.pi / 4)).pose},
            "the arm reports its tool 0 mm and 45 deg from where",
        ),
        (
            {"joints": kinematics.LOWER + 0.01},
            "joint_margin_rad: joint 1 is 0.010 rad from its limit",
        ),
        ({"joints": np.full(7, math.nan)}, "state: a measurement is not finite"),
    ],
)
def test_it_does_not_start_in_an_invalid_state(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RobotError, match=said):
        SafetyFilter(CELL).start(dataclasses.replace(Follower(CELL).state(), **change))


def test_it_does_not_start_outside_the_workspace_or_the_cone() -> None:
    follower = Follower(CELL)
    follower.joints = follower.joints + 0.8 * np.eye(7)[5]
    state = dataclasses.replace(follower.state(), pose=CELL.arm.pose(follower.joints))
    with pytest.raises(RobotError, match="max_tilt_deg: the tool stands at"):
        SafetyFilter(dataclasses.replace(ROOMY, max_tilt_deg=30.0)).start(state)
    with pytest.raises(
        RobotError,
        match=r"workspace_x_m: the tool stands at .* guide it back by hand, or bring the arm home",
    ):
        SafetyFilter(dataclasses.replace(ROOMY, workspace_x_m=(0.4, 0.6))).start(
            Follower(CELL).state()
        )


@pytest.mark.parametrize(("beyond", "begins"), [(0.0029, True), (0.0031, False)])
def test_an_arm_that_sags_at_a_wall_starts_at_the_wall(beyond: float, begins: bool) -> None:
    state = Follower(CELL).state()
    wall = float(state.pose.position[2]) + beyond
    filter_ = SafetyFilter(dataclasses.replace(ROOMY, workspace_z_m=(wall, wall + 0.3)))
    if begins:
        filter_.start(state)
        assert filter_.step(None, state, TICK).command.pose.position[2] == pytest.approx(
            wall, abs=1e-12
        )
    else:
        with pytest.raises(RobotError, match="workspace_z_m: the tool stands at"):
            filter_.start(state)


def test_a_step_before_the_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before start"):
        SafetyFilter(CELL).step(None, Follower(CELL).state(), TICK)


# --- time


@pytest.mark.parametrize("dt", [0.0, 0.004, -1.0, math.nan])
def test_an_early_tick_repeats_the_last_command(dt: float) -> None:
    filter_, follower = started()
    go(filter_, follower, away((0.02, 0, 0)))
    filtered = filter_.step(away((0.02, 0, 0)), follower.state(), dt)
    assert filtered.command.pose is follower.state().pose
    assert [each.rule for each in filtered.interventions] == ["servo_hz"]


def test_after_a_gap_it_restarts_from_rest_at_its_position() -> None:
    """The arm has stopped meanwhile; continuing at speed would be a jerk."""
    filter_, follower = started()
    go(filter_, follower, away((0.02, 0, 0)), 8)
    stood = follower.state().pose.position
    goal = away((0.02, 0, 0))
    steps = [stood, stood, stood]
    for dt in (0.5, *[TICK] * 60):
        filtered = filter_.step(goal, follower.state(), dt)
        follower.follow(filtered.command)
        steps.append(filtered.command.pose.position)
    for order, limit in (
        (1, CELL.max_speed_m_s),
        (2, CELL.max_acceleration_m_s2),
        (3, CELL.max_jerk_m_s3),
    ):
        assert (
            np.linalg.norm(np.diff(np.array(steps), order, axis=0), axis=1).max()
            * CELL.servo_hz**order
            <= limit * ALL_OF_IT
        )
    assert steps[-1] == pytest.approx(goal.pose.position, abs=1e-12), "the goal is still pursued"
    assert filter_.counts["servo_hz"] == 1


@settings(max_examples=10)
@given(
    st.lists(
        st.floats(0.5, 2).map(lambda part: part * TICK * 0.999 + 1e-5), min_size=60, max_size=60
    )
)
def test_servo_jitter_changes_no_command(dts: list[float]) -> None:
    filters = [started() for _ in range(2)]
    goal = away((0.02, 0.01, 0))
    for dt in dts:
        commands = []
        for (filter_, follower), seconds in zip(filters, (dt, TICK), strict=True):
            filtered = filter_.step(goal, follower.state(), seconds)
            follower.follow(filtered.command)
            commands.append(filtered.command.pose.position)
        assert (commands[0] == commands[1]).all()


def test_a_sent_command_cannot_be_changed_afterwards() -> None:
    filter_, follower = started()
    command = filter_.step(away((0.02, 0, 0)), follower.state(), TICK).command
    with pytest.raises(ValueError, match="read-only"):
        command.pose.position[0] = 1.0

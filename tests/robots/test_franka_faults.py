"""Real franky and libfranka against franky-sim: motions, faults and refusals of the arm. test_chaos_franka.py injects the faults."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from franka_session import CELL_YAML, Session, journal, wait_until
from trajectory import Trajectory

from rlinf_vla.features.realworld.listener import ask
from rlinf_vla.features.realworld.robot import RobotError, ToolPose, ToolTarget
from rlinf_vla.robots.franka import messages
from rlinf_vla.robots.franka.plugin import franka, franka_sim
from rlinf_vla.robots.runtime_folder import ORDERS, STATE
from rlinf_vla.robots.shared_record import SharedRecord
from tests.skips import require

pytestmark = pytest.mark.simulator

STANDS_S = 8.0
"""Simulated time may run slower than real time on a busy machine."""


def test_the_arm_moves_to_its_goal(session: Session) -> None:
    before = session.robot.observe()
    after = session.move(1.5, width=0.0)
    moved = after.pose.position - before.pose.position
    assert moved[0] > 0.03 and moved[1] > 0.01 and moved[2] < -0.03, moved
    assert after.commanded is not None and after.fault is None
    ticks = session.robot.timings()["safety"]
    assert len(ticks) >= session.robot.cell.ticks_per_step and all(
        0 < seconds < 1 for seconds in ticks
    )
    wait_until(lambda: session.robot.observe().gripper_width < 0.01, 5, "the fingers close")
    session.wait_still(STANDS_S)


def test_home_is_that_of_the_cell(session: Session) -> None:
    session.move(1.0)
    session.robot.home(30)
    np.testing.assert_allclose(
        session.robot.observe().joints, session.robot.cell.home_joints_rad, atol=0.02
    )


def test_the_arm_goes_up_before_it_goes_home(session: Session) -> None:
    session.move(3.5, by=(0.018, 0.0, -0.018))
    session.wait_still(STANDS_S)
    begin = session.robot.observe().pose.position
    seen = list[np.ndarray]()
    session.robot.home(30, lambda: seen.append(session.robot.observe().pose.position))
    way = np.array(seen)
    home = session.robot.cell.home.position
    rises = way[way[:, 2] < begin[2] + 0.05]
    assert len(rises) > 3 and np.abs(rises[:, :2] - begin[:2]).max() < 0.01, "straight up"
    assert begin[2] < home[2] - 0.1 and way[:, 2].min() > begin[2] - 0.01
    assert np.abs(session.robot.observe().pose.position - home).max() < 0.01


def test_a_fault_outlives_the_arms_process(session: Session) -> None:
    session.cell.fault("reflex")
    fault = session.wait_fault(10)
    session.reconnect()
    assert session.robot.observe().fault == fault
    session.acknowledge()


def test_a_pressed_user_stop_cannot_be_acknowledged(session: Session) -> None:
    session.cell.fault("user_stop")
    session.wait_fault(10)
    session.robot.acknowledge("tester")
    wait_until(
        lambda: session.robot.observe().fault and session.robot.refusal,
        5,
        "the acknowledgement is refused",
    )
    assert "release it" in str(session.robot.refusal)
    session.cell.fix("user_stop")
    session.acknowledge()


def test_a_stalled_policy_is_a_fault(session: Session) -> None:
    session.move(0.5)
    begun = time.monotonic()
    took = session.wait_still(STANDS_S)
    time.sleep(max(0.0, 2.5 - (time.monotonic() - begun)))
    assert "policy: its process has said nothing" in str(session.robot.observe().fault), took


def test_the_arm_holds_without_goals(session: Session) -> None:
    session.move(0.5)

    def hold() -> bool:
        assert session.robot.observe().fault is None
        return session.speed < 0.02

    wait_until(hold, STANDS_S, "it holds while the policy's process lives")


def test_the_end_of_a_session_stops_the_arm_and_latches_nothing(session: Session) -> None:
    session.move(0.5)
    before = len(journal(session.folder))
    session.robot.close()
    session.wait_still(STANDS_S)
    since = journal(session.folder)[before:]
    assert since[-1]["event"] == "end" and since[-1]["fault"] is None
    assert "fault" not in [each["event"] for each in since]


def test_the_arm_stops_when_its_process_is_killed(session: Session) -> None:
    session.move(0.5)
    killed = session.robot.pid
    os.kill(killed, signal.SIGKILL)
    session.wait_still(STANDS_S)
    with pytest.raises(RobotError, match=r"the arm's process .* ended with exit code -9"):
        session.robot.observe()
    session.reconnect()
    assert session.robot.observe().fault == f"the arm's process {killed} was killed"
    session.acknowledge()


def test_a_signal_stops_the_arm_and_ends_its_process(session: Session) -> None:
    session.move(0.5)
    os.kill(session.robot.pid, signal.SIGTERM)
    session.wait_still(STANDS_S)
    wait_until(lambda: journal(session.folder)[-1]["event"] == "end", 5, "the arm's process ends")
    assert "SIGTERM" in journal(session.folder)[-1]["fault"]


@pytest.mark.parametrize(
    "delay_s",
    [0.0, *(pytest.param(delay, marks=pytest.mark.nightly) for delay in (0.01, 0.03, 0.5)), 0.1],
)
def test_a_stop_during_home_is_never_lost(session: Session, delay_s: float) -> None:
    session.move(1.5)
    session.wait_still(STANDS_S)
    away = session.robot.observe().joints
    ask(session.folder / ORDERS, {"home": True}, 2.0)
    time.sleep(delay_s)
    session.robot.stop("not now")
    session.wait_fault(1)
    session.wait_still(STANDS_S)
    stands = session.robot.observe().joints
    for _ in range(10):
        time.sleep(0.1)
        np.testing.assert_allclose(session.robot.observe().joints, stands, atol=0.005)
    assert (
        np.abs(stands - session.robot.cell.home_joints_rad).max()
        > 0.3 * np.abs(away - session.robot.cell.home_joints_rad).max()
    )


def test_no_joint_exceeds_the_home_speed_of_the_cell(session: Session) -> None:
    session.move(1.5)
    session.wait_still(STANDS_S)
    seen = Trajectory(session.cell)
    session.robot.home(30)
    seen.close()
    fastest = max(speed for _, speed in seen.samples)
    assert (
        0.5 * session.robot.cell.home_speed_rad_s
        < fastest
        < 1.1 * session.robot.cell.home_speed_rad_s
    )


def test_a_stop_during_an_acknowledgement_is_latched_after_it(session: Session) -> None:
    session.cell.fault("tcp_close")
    session.wait_fault(10)
    session.robot.acknowledge("tester")
    session.robot.stop("wait")
    wait_until(
        lambda: session.robot.observe().fault == "policy: wait", 15, "it is the latched fault now"
    )
    assert session.robot.refusal == "policy: wait"
    session.acknowledge()


def test_a_full_disk_stops_the_arm(session: Session) -> None:
    session.robot.close()
    session.robot = franka_sim.make(replace(session.config, journal="/dev/full"))
    session.robot.connect(30)
    with contextlib.suppress(RobotError):
        session.move(
            2.5, by=(0.0, 0.1, 0.0)
        )  # beyond its limit, so that the journal has something to write
    assert session.wait_fault(5).startswith("disk: No space left on device")
    session.wait_still(STANDS_S)
    assert session.robot.pid, "the arm's process lives"


def test_fingers_stop_with_the_arm(session: Session) -> None:
    for width, there in ((0.08, lambda now: now > 0.075), (0.0, lambda now: now < 0.07)):
        session.move(0.3, by=(0.0, 0.0, 0.0), width=width)
        wait_until(
            lambda: there(session.robot.observe().gripper_width),  # noqa: B023
            5,
            f"they move to {width} m",
        )
    session.robot.stop("not there")
    session.wait_fault(1)
    time.sleep(1.0)
    width = session.robot.observe().gripper_width
    time.sleep(1.0)
    assert abs(session.robot.observe().gripper_width - width) < 1e-3 and width > 0.005
    session.acknowledge()
    session.move(1.0, by=(0.0, 0.0, 0.0), width=0.0)
    wait_until(
        lambda: session.robot.observe().gripper_width < 0.01, 5, "the same width is a new command"
    )


def test_an_error_of_the_arms_process_is_latched_and_named(session: Session) -> None:
    session.move(0.5)
    session.robot.command(
        ToolTarget(ToolPose(np.array([1.0]), np.array([]))), 0.0
    )  # an invalid message
    with pytest.raises(RobotError, match=r"ended with exit code 1: IndexError"):
        wait_until(lambda: session.robot.observe() is None, 10, "the arm's process ends")
    session.wait_still(STANDS_S)
    session.reconnect()
    assert str(session.robot.observe().fault).startswith("the arm's process failed: IndexError")
    session.acknowledge()


def test_an_earlier_user_stop_outlives_its_release(session: Session) -> None:
    session.robot.close()
    session.cell.fault("user_stop")
    for _ in range(2):
        session.robot = franka_sim.make(session.config)
        session.robot.connect(30)
        assert str(session.robot.observe().fault).startswith("user stop")
        session.robot.close()
        session.cell.fix("user_stop")
    session.robot = franka_sim.make(session.config)
    session.robot.connect(30)
    session.acknowledge()


def test_another_process_may_stop_the_arm(session: Session) -> None:
    session.move(0.5)
    assert len(franka_sim.order(session.config, "stop", "tester")) == 1
    assert session.wait_fault(5) == "stopped by tester"
    session.wait_still(STANDS_S)
    franka_sim.order(session.config, "acknowledge", "tester")
    wait_until(lambda: session.robot.observe().fault is None, 5, "it is released")


def test_a_persons_stop_in_a_fault_is_acknowledged_on_its_own(session: Session) -> None:
    """The name is not UTF-8."""
    session.robot.stop("a policy's message with a lone surrogate: \ud800")
    assert session.wait_fault(5).endswith(r"surrogate: \ud800")
    lines = franka_sim.order(session.config, "stop", os.fsdecode(b"J\xf6rg"))
    assert lines[0].endswith(r"; stopped by J\udcf6rg")
    franka_sim.order(session.config, "acknowledge", os.fsdecode(b"\xc4da"))
    wait_until(
        lambda: session.robot.observe().fault == r"stopped by J\udcf6rg", 5, "the stop remains"
    )
    with pytest.raises(RobotError, match="stopped by J"):
        session.robot.home(5)
    session.reconnect()
    assert session.robot.observe().fault == r"stopped by J\udcf6rg"
    session.acknowledge()


def test_an_acknowledgement_of_an_earlier_fault_is_refused(session: Session) -> None:
    session.robot.stop("first")
    session.wait_fault(5)
    franka_sim.order(session.config, "stop", "Bob")
    ask(session.folder / ORDERS, {"acknowledge": "Eve"}, 2.0)
    wait_until(
        lambda: (
            messages.unpack(SharedRecord(session.folder / STATE).read() or b"").fault
            == "stopped by Bob"
        ),
        5,
        "it is Bob's now",
    )
    session.robot.acknowledge("a script")  # which has not observed Bob's stop
    wait_until(lambda: session.robot.observe().fault and session.robot.refusal, 5, "it is refused")
    assert session.robot.refusal == session.robot.observe().fault == "stopped by Bob"
    session.acknowledge()


def test_one_process_drives_an_arm(session: Session) -> None:
    other = franka_sim.make(session.config)
    with pytest.raises(RobotError, match=f"driven by process {session.robot.pid} already"):
        other.connect(30)
    assert session.robot.observe().fault is None


def test_malformed_goals_move_nothing(session: Session) -> None:
    before = session.robot.observe().pose
    session.robot.command(
        ToolTarget(ToolPose(np.full(3, np.nan), before.quaternion)), time.monotonic() + 0.25
    )
    wait_until(
        lambda: [each.rule for each in session.robot.interventions()] == ["not_finite"],
        2,
        "it is reported",
    )
    assert np.abs(session.robot.observe().pose.position - before.position).max() < 0.002


def test_without_a_new_command_the_tool_stays_at_the_last_one(session: Session) -> None:
    """A late servo tick: the velocity of the last command does not pull the tool on."""
    from rlinf_vla.robots.franka.driver import FrankyArm

    host = session.robot.found["host"]
    limits = session.robot.cell
    session.robot.close()
    arm = FrankyArm(host, limits)
    try:
        position = arm.measured.pose.position.copy()
        speed = np.array([0.15, 0.0, -0.15])
        for _ in range(30):
            position = position + speed / limits.servo_hz
            arm.track(ToolPose(position, limits.home.quaternion), np.array([*speed, 0.0, 0.0, 0.0]))
            time.sleep(1 / limits.servo_hz)
        time.sleep(1.0)
        assert arm.problem is None
        assert np.abs(arm.measured.pose.position - position).max() < 0.005
        arm.rest()
        wait_until(lambda: not arm.controlled, 5, "the motion ends")
    finally:
        arm.close()
        # libfranka gave this thread the highest real-time priority, which later child processes would inherit
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture
def real_cell(tmp_path: Path) -> str:
    """A cell file like that of a real arm, but with short time limits."""
    path = tmp_path / "mine.yaml"
    path.write_text(CELL_YAML.replace("connect_timeout_s: 10 ", "connect_timeout_s: 1 "))
    return str(path)


def connect(host: str, cell: str) -> None:
    require("franka")
    robot = franka.make(franka.Config(host=host, cell=cell))
    try:
        robot.connect(30)
    finally:
        robot.close()


def test_a_silent_host_is_an_error(real_cell: str) -> None:
    with socket.socket() as server:
        server.bind(("127.9.9.9", 1337))
        server.listen()  # the system accepts connections from here on
        with pytest.raises(
            RobotError, match=r"127.9.9.9 accepted the connection but was silent for 1 s"
        ):
            connect("127.9.9.9", real_cell)


def test_a_host_that_is_off_is_named(real_cell: str) -> None:
    with pytest.raises(RobotError, match=r"127.9.9.8 does not answer.*FCI"):
        connect("127.9.9.8", real_cell)


def test_a_kernel_without_real_time_is_refused(session: Session, real_cell: str) -> None:
    if Path("/sys/kernel/realtime").exists():
        pytest.skip("this kernel has real time")
    host = session.robot.found["host"]
    session.robot.close()
    Path(real_cell).write_text(
        Path(real_cell).read_text().replace("realtime: ignore", "realtime: enforce")
    )
    with pytest.raises(RobotError, match="PREEMPT_RT"):
        connect(host, real_cell)

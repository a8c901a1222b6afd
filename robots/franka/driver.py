"""Drive the arm through franky; only the constructor, ``recover`` and ``close`` block.

Their callers run them in separate threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import franky
import numpy as np

from rlinf_vla.features.realworld.robot import RobotError, ToolPose, Vector

from ..cell import Cell
from ..command_filter import LATEST
from ..homing import way_home
from ..pace import Pace
from .errors import ConnectionLost, explained, is_dead, is_ending, robot_error, words
from .messages import measure, sign_of
from .reflexes import MARGIN, joint_thresholds, tool_thresholds

_JOINT_SPEED_LIMIT_RAD_S = 2.62
"""Limit of the slowest joints (Franka Research 3, joint limits)."""
_DAMPING = np.array([2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
"""Factor on 2 sqrt(stiffness), the critical damping of 1 kg and 1 kg m^2.

The arm's effective mass at the tool is about 4 kg. In franky-sim, a factor of 1 oscillates for a
second after a stop, and 3 in rotations is unstable.
"""
_POSTURE_N_M_RAD, _POSTURE_DAMPING = 10.0, 8.0
"""Weak stiffness towards the rest position and damping (N m s / rad) of the redundant elbow."""
_ENDING_S = 1.0
"""How long a motion may be refused because the previous one has not quite ended."""
_CLOSE_S = 3.0
"""Time to end the reader; libfranka waits 1 s for a state that does not arrive."""
_FADE_S = 0.2
"""Time over which the last torques fade when tracking ends."""


class FrankyArm:
    """One connection. A thread reads the state; a dead connection blocks only that thread."""

    def __init__(self, host: str, cell: Cell) -> None:
        """Connect; blocks for ever if the server accepts but stays silent. Raises RobotError."""
        self._cell = cell
        realtime = (
            franky.RealtimeConfig.Enforce
            if cell.realtime == "enforce"
            else franky.RealtimeConfig.Ignore
        )
        with explained(host):
            self._robot: Any = franky.Robot(host, realtime_config=realtime)
            share = cell.home_speed_rad_s / _JOINT_SPEED_LIMIT_RAD_S
            self._robot.joint_velocity_limit.set(np.full(7, cell.home_speed_rad_s))
            self._robot.relative_dynamics_factor = franky.RelativeDynamicsFactor(1.0, share, share)
            state = self._robot.state
            self._configured = False
            if state.robot_mode == franky.RobotMode.Idle:
                self._configure(state)
        self._motion: Any = None
        self._tracking = threading.Lock()
        self._still: Any = None
        """The last command without its velocity, until it has been sent."""
        self._tracked = 0.0
        """Time of the last command."""
        self.homing = self._home_next = False
        self._breaking = self._broken = False
        """Homing is to be aborted; the arm has accepted the stop."""
        self._begun = self._tried = 0.0
        """Time of the first and the last attempt to start a motion."""
        self.problem = robot_error(state)
        """What prevents motion: an error of the arm, its safety functions or the connection."""
        self._pace = Pace()
        self.measured = measure(state, 1.0, sign_of(cell.reference))
        self._clock: int = state.time.to_msec()
        self._controlled = False
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _configure(self, state: Any) -> None:
        """Set collision thresholds and end effector; an arm that is not idle refuses this."""
        self._robot.set_collision_behavior(
            joint_thresholds(self._cell), tool_thresholds(self._cell)
        )
        tool = franky.Affine(
            self._cell.tool_position_m, _xyzw(np.array(self._cell.tool_quaternion_wxyz))
        )
        self._robot.set_ee((state.F_T_NE.inverse * tool).matrix.flatten(order="F").tolist())
        self._configured = True

    @property
    def controlled(self) -> bool:
        """Whether a motion was running at the last read; disconnecting then causes a reflex."""
        return self._controlled and self.problem is None

    def track(self, pose: ToolPose, velocity: Vector) -> None:
        """Track ``pose`` by impedance control; ``velocity``: tool m/s and rad/s ``[6]``."""
        tool = franky.Affine(pose.position, _xyzw(pose.quaternion))
        reference = franky.CartesianReference(tool, franky.Twist(velocity[:3], velocity[3:]))
        with self._noted(), self._tracking:
            self._still = franky.CartesianReference(tool)
            self._tracked = time.monotonic()
            if self._motion is None:
                cell = self._cell
                motion = franky.CartesianImpedanceTrackingMotion(
                    translational_stiffness=cell.stiffness_n_m,
                    rotational_stiffness=cell.rotation_stiffness_n_m_rad,
                    translational_error_clip=np.full(
                        3, MARGIN * cell.max_force_n / cell.stiffness_n_m
                    ),
                    rotational_error_clip=np.full(
                        3, MARGIN * cell.max_torque_n_m / cell.rotation_stiffness_n_m_rad
                    ),
                    posture_task=franky.PostureTask(
                        np.array(cell.home_joints_rad), _POSTURE_N_M_RAD, _POSTURE_DAMPING
                    ),
                )
                gains = motion.get_gains()
                gains.damping = np.diag(2 * _DAMPING * np.sqrt(np.diag(gains.stiffness)))
                motion.set_gains(gains)
                motion.set_reference(reference)
                self._begin(motion)
                self._motion = motion
            else:
                self._motion.set_reference(reference)

    def _hold_if_late(self) -> None:
        """Set the velocity to 0 if the next command is late.

        Else the damping, which follows the last velocity, pulls the tool centimetres further.
        """
        with self._tracking:
            if (
                self._motion is not None
                and self._still is not None
                and time.monotonic() - self._tracked > LATEST / self._cell.servo_hz
            ):
                self._motion.set_reference(self._still)
                self._still = None

    def home(self) -> None:
        """Start moving to the rest position (``way_home``), joints at ``home_speed_rad_s`` at most.

        Impedance control must be off. ``homing`` is True until the arm is there.
        """
        self.homing = self._home_next = True
        self._breaking = self._broken = False

    def rest(self) -> None:
        """End impedance control: a torque stop motion, then the arm's own controller, hold it."""
        if self._motion is not None:
            self._motion = None
            self._controlled = True
            with self._noted():
                self._robot.move(franky.TorqueStopMotion(ramp_duration=_FADE_S), asynchronous=True)

    def halt(self) -> None:
        """Abort homing. Call until ``homing`` is False: a starting motion accepts no other."""
        self._home_next = False
        self._breaking = True
        if self.homing and not self._broken:
            with self._noted():
                if (
                    self._robot.current_control_signal_type
                    == franky.ControlSignalType.JointPositions
                ):
                    self._robot.move(franky.JointStopMotion(), asynchronous=True)
                    self._broken = True

    def recover(self, timeout: float) -> None:
        """Clear the arm's latched errors, only after an operator's acknowledgement.

        Raises RobotError; ConnectionLost if a new connection is needed.
        """
        deadline = time.monotonic() + timeout
        if self._robot is None:  # the connection was closed and not replaced yet
            raise ConnectionLost
        with explained(self._robot.fci_hostname):
            if self._robot.state.robot_mode == franky.RobotMode.UserStopped:
                raise RobotError("user stop: release it, then acknowledge again")
            while self._robot.has_errors or self._robot.state.robot_mode == franky.RobotMode.Reflex:
                self._robot.recover_from_errors()
                if time.monotonic() > deadline:
                    raise RobotError(f"the arm does not recover: {robot_error(self._robot.state)}")
                time.sleep(0.01)
            if not self._configured:
                self._configure(self._robot.state)
        self.problem = None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._closed = True
        self._reader.join(_CLOSE_S)
        self._robot = self._motion = None

    def _read(self) -> None:
        period = 0.5 / self._cell.servo_hz
        while not self._closed:
            time.sleep(period)
            try:
                state = self._robot.state
                clock = state.time.to_msec()
                if clock != self._clock:  # without a new state, franky returns the old one
                    self._clock = clock
                    self._pace.see(time.monotonic(), clock / 1000)
                    self.measured = measure(state, self._pace.value, self.measured.pose.quaternion)
                if self.problem is None:
                    self.problem = robot_error(state)
                self._hold_if_late()
                self._robot.poll_motion()
                self._controlled = self._robot.is_in_control
                if self.homing and not self._controlled:
                    self._go_home()
            except Exception as error:
                self._fail(error)
                if is_dead(error):
                    return

    def _go_home(self) -> None:
        """Start the requested homing, or end it: no motion is running."""
        if self._home_next:
            self._home_next = False
            way = way_home(self._cell, self.measured.joints)
            self._begin(
                franky.JointWaypointMotion([franky.JointWaypoint(joints) for joints in way])
            )
        else:
            self.homing = False

    def _begin(self, motion: Any) -> None:
        if time.monotonic() - self._tried > _ENDING_S:
            self._begun = time.monotonic()
        self._tried = time.monotonic()
        self._robot.move(motion, asynchronous=True)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if is_ending(error) and time.monotonic() - self._begun < _ENDING_S:
            # the next tick tries again
            self._motion = None
            self._home_next = self.homing and not self._breaking
            return
        self.homing = False
        self._home_next = False
        self._motion = None
        if self.problem is None:
            with contextlib.suppress(Exception):
                self.problem = (
                    robot_error(self._robot.state)
                    if isinstance(error, franky.ControlException)
                    else None
                )
            self.problem = self.problem or (
                str(error) if isinstance(error, RobotError) else words(error)
            )


def _xyzw(quaternion: Vector) -> Vector:
    return np.roll(quaternion, -1)

"""franky-sim's server of one arm, extended by the faults of a real controller.

Faults are a failed connection, a collision of a joint, the user stop and a failing hand. Used only
in the simulator's process. franky-sim itself never refuses a motion. Here, as on the real arm
(Franka Control Interface documentation, "Robot modes"), the arm stops by itself after
``COMMUNICATION_S`` without commands in a motion, and refuses motions after a reflex or a user stop
until an error recovery.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from franky_sim import franka_robot_server
from franky_sim.franka_gripper_protocol import GripperCommand, GripperCommandStatus
from franky_sim.franka_gripper_server import FrankaGripperServer
from franky_sim.franka_robot_protocol import (
    AutomaticErrorRecoveryCommand,
    AutomaticErrorRecoveryStatus,
    BaseCommand,
    MoveCommand,
    MoveStatus,
    RobotCommand,
    RobotMode,
    StateControllerMode,
    StateMotionGeneratorMode,
)
from franky_sim.franka_robot_server import FrankaRobotServer
from numpy.typing import NDArray

COMMUNICATION_S = 0.3
"""The real arm allows 0.02 s; here client and simulator share cores with other processes."""
ERRORS = {"joint_reflex": 6, "cartesian_reflex": 7, "communication_constraints_violation": 25}
"""Bits of ``franka::Errors`` (libfranka, errors.h)."""
FAULTS = ("udp_silence", "tcp_close", "silent", "reflex", "user_stop", "gripper")
_MUTE = {"silent", "udp_silence"}


class _Move(MoveCommand):
    def handle(self, server: ArmServer) -> None:
        refusal = server.refusal
        if refusal is None:
            super().handle(server)
        else:
            self.reply(refusal)


class _Recovery(AutomaticErrorRecoveryCommand):
    def handle(self, server: ArmServer) -> None:
        stopped = server.mode is RobotMode.kUserStopped
        if not stopped:
            server.recover()
        status = (
            AutomaticErrorRecoveryStatus.kCommandRejectedDueToActivatedSafetyFunctions
            if stopped
            else AutomaticErrorRecoveryStatus.kSuccess
        )
        self.reply(status)


class _Hand(FrankaGripperServer):
    broken = False
    _ticks = 0

    def send_state(self) -> None:
        """Send the state at 50 Hz; the real hand is slower."""
        self._ticks += 1
        if self._ticks % 20 == 0:
            super().send_state()

    def _start_motion(
        self, motion_state: Any, command_type: GripperCommand, command_id: int, tcp_socket: Any
    ) -> None:
        if not self.broken:
            super()._start_motion(motion_state, command_type, command_id, tcp_socket)
            return
        self._robot.set_hand_goal(self._robot.hand_width, 0.05, 70.0)
        _aborted(tcp_socket, command_type, command_id)

    def stop(self, command_id: int, tcp_socket: Any) -> None:
        """Stop the hand and report the pending command as aborted to its caller."""
        if self._pending_command_id is not None:
            _aborted(self._pending_tcp_socket, self._pending_command_type, self._pending_command_id)
        super().stop(command_id, tcp_socket)


def _aborted(tcp_socket: Any, command_type: GripperCommand | None, command_id: int) -> None:
    formats = {"command_type_struct": "H", "status_type_struct": "H"}
    BaseCommand.send_response(
        tcp_socket, command_type, command_id, GripperCommandStatus.kAborted, **formats
    )


# The server looks up its parts under these names.
franka_robot_server.MoveCommand = _Move
franka_robot_server.AutomaticErrorRecoveryCommand = _Recovery
franka_robot_server.FrankaGripperServer = _Hand


class ArmServer(FrankaRobotServer):
    """Server of one arm with injectable faults."""

    def __init__(self, robot: Any, hostnames: Iterable[str]) -> None:
        self.mode: RobotMode | None = None
        """Reflex or UserStopped; None without a fault."""
        self.errors: set[int] = set()
        self.wrench: NDArray[np.float64] = np.zeros(6)
        """External wrench on the hand in the base frame: newtons, newton metres."""
        self._active: set[str] = set()
        self._heard = 0.0
        self._answers = self._unanswered = False
        """Whether this motion has received commands (a client reads two or three states before its
        first one); whether the last state has not been answered by one yet."""
        self._arm = robot
        self._modes = StateMotionGeneratorMode.kIdle, StateControllerMode.kOther
        super().__init__(robot, hostnames)

    def inject(self, fault: str) -> None:
        """Inject one of FAULTS."""
        if fault == "tcp_close":
            self._halt(MoveStatus.kAborted)
            self.reset_state()
        elif fault == "reflex":
            self._reflex("joint_reflex")
        elif fault == "user_stop":
            self.mode = RobotMode.kUserStopped
            self._halt(MoveStatus.kPreemptedDueToActivatedSafetyFunctions)
        elif fault == "gripper":
            self.gripper_server.broken = True
        else:
            self._active.add(fault)

    def end(self, fault: str) -> None:
        """Remove the cause of a fault; what the arm latched stays."""
        self._active.discard(fault)
        if fault == "gripper":
            self.gripper_server.broken = False
        elif fault == "user_stop" and self.mode is RobotMode.kUserStopped:
            self.mode = None

    def recover(self) -> None:
        self.mode = None
        self.errors = set()

    @property
    def refusal(self) -> MoveStatus | None:
        """Why no motion may start."""
        if self.mode is RobotMode.kUserStopped:
            return MoveStatus.kCommandRejectedDueToActivatedSafetyFunctions
        return MoveStatus.kCommandNotPossibleRejected if self.mode is RobotMode.kReflex else None

    @property
    def waiting(self) -> bool:
        """Whether to wait for the command that answers the last state sent.

        Simulated time stops meanwhile, for at most ``COMMUNICATION_S``: on a busy machine, torques
        computed for a much older state would make the arm swing.
        """
        return (
            self._answers
            and self._unanswered
            and bool(self.current_motion_id)
            and not self._active & _MUTE
        )

    def process_commands(self) -> None:
        if "silent" in self._active:
            self._watch()
            self._post_process_commands()
        else:
            super().process_commands()

    def send_state(self) -> None:
        if not self._active & _MUTE:
            super().send_state()
            self._unanswered = True

    def start_motion(self, *arguments: Any, **named: Any) -> None:
        self._heard = time.monotonic()
        self._answers = False
        super().start_motion(*arguments, **named)
        self._note_modes()

    def stop_motion(self, send_preemption_signal: bool = True) -> None:
        super().stop_motion(send_preemption_signal)
        self._note_modes()

    def _reset_state(self) -> None:
        super()._reset_state()
        self._modes = StateMotionGeneratorMode.kIdle, StateControllerMode.kOther

    def _handle_udp_command(self, command_data: bytes) -> None:
        if "udp_silence" not in self._active:
            self._heard = time.monotonic()
            self._answers = True
            self._unanswered = False
            super()._handle_udp_command(command_data)

    def _post_process_commands(self) -> None:
        self._watch()
        super()._post_process_commands()

    def _get_state_bytes(self) -> bytes:
        record = self._arm.record()
        record["motion_generator_mode"], record["controller_mode"] = self._modes
        record["robot_mode"] = self.mode or (
            RobotMode.kMove if self.current_motion_id else RobotMode.kIdle
        )
        record["errors"] = 0
        record["errors"][list(self.errors)] = 1
        record["O_F_ext_hat_K"] = record["K_F_ext_hat_K"] = self.wrench
        return bytes(record.tobytes())

    def _note_modes(self) -> None:
        state = self.robot_state
        self._modes = state.motion_generator_mode, state.controller_mode

    def _watch(self) -> None:
        if self.current_motion_id and time.monotonic() - self._heard > COMMUNICATION_S:
            self._reflex("communication_constraints_violation")

    def _reflex(self, error: str) -> None:
        self.mode = RobotMode.kReflex
        self.errors.add(ERRORS[error])
        self._halt(MoveStatus.kReflexAborted)

    def _halt(self, status: MoveStatus) -> None:
        """Hold the arm where it is; the client's motion, if any, ends with ``status``."""
        motion = self.current_motion_id
        self.stop_motion(send_preemption_signal=False)
        if motion:
            BaseCommand.send_response(self._tcp_socket, RobotCommand.kMove, motion, status)
            self.reset_current_motion_id()

"""``python recording_cell.py ... DESCRIPTOR``: a simulated cell that records, at 1 kHz, what its arm receives and does.

Rows of 23 numbers in ``received`` in the cell's folder, one for each new command: the number of the motion, 1 for torques or 0 for
positions, the command ``[7]``, joints ``[7]``, their velocities ``[7]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vla.robots.child_process import serve
from rlinf_vla.robots.simulated import arm, cell, server

RECEIVED = "received"
NUMBERS = 23


class RecordingArm(arm.SimulatedArm):
    file: Any = None
    motion = 0
    moves = False

    def torque_control(self, torques: Sequence[float], has_new_command: bool = True) -> None:
        self.record_command(1.0, torques, has_new_command)
        super().torque_control(torques, has_new_command)

    def joint_position_control(
        self, target_q: Sequence[float], has_new_command: bool = True
    ) -> None:
        self.record_command(0.0, target_q, has_new_command)
        super().joint_position_control(target_q, has_new_command)

    def record_command(self, kind: float, command: Sequence[float], new: bool) -> None:
        if RecordingArm.moves and new:
            state = self.state
            RecordingArm.file.write(
                np.array([RecordingArm.motion, kind, *command, *state.q, *state.dq]).tobytes()
            )


class RecordingServer(server.ArmServer):
    def start_motion(self, *arguments: Any, **named: Any) -> None:
        RecordingArm.moves = True
        RecordingArm.motion = RecordingArm.motion + 1
        super().start_motion(*arguments, **named)

    def stop_motion(self, send_preemption_signal: bool = True) -> None:
        RecordingArm.moves = False
        super().stop_motion(send_preemption_signal)


def make(options: dict[str, Any]) -> cell.SimulatedCell:
    RecordingArm.file = (Path(options["folder"]) / RECEIVED).open("wb", buffering=0)
    arm.SimulatedArm = RecordingArm  # type: ignore[misc]
    cell.ArmServer = RecordingServer
    return cell.SimulatedCell(Path(options["folder"]))


if __name__ == "__main__":
    serve(make)

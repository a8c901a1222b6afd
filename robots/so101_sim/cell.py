"""Main module of the simulated SO-101's process: physics in real time, motors, a socket for orders.

Orders, JSON: ``{"fault": NAME}`` and ``{"end": NAME}`` (client.FAULTS), ``{"place": [x, y, yaw]}``
and ``{}``. The answer names the port and the process, or an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import time
import tty
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.features.realworld.listener import Listener

from ..child_process import serve
from ..shared_record import SharedRecord
from ..simulated.client import ORDERS, TRUTH
from . import scene
from .client import FAULTS, PORT, ROBOT_ID
from .motors import MotorBus, steps

LOOK_EVERY = 5
"""Steps between two polls of orders, and between two publications of the true state."""
CATCH_UP_S = 0.05
"""A delay beyond this is not caught up, so simulated time then runs slower than real time."""
_ELBOW = scene.JOINTS.index("elbow_flex")


class Port:
    """The serial port of one arm: a pseudo-terminal with its motors behind it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bus = MotorBus(scene.RANGE_DEG, scene.HOME_DEG)
        self.master, slave = os.openpty()
        tty.setraw(
            slave
        )  # it stays open: else the master reports an error whenever the driver closes it
        os.set_blocking(self.master, False)
        path.unlink(missing_ok=True)
        path.symlink_to(os.ttyname(slave))

    def serve(self, degrees: NDArray[np.float64]) -> None:
        """Handle what the driver has written, with the joints at these angles."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.master, 4096):
                self.bus.measure(degrees.tolist())
                if answers := self.bus.feed(data):
                    os.write(self.master, answers)


class SO101Cell:
    """Simulation, ports and order socket of one or two arms."""

    def __init__(self, folder: Path, arms: Sequence[str]) -> None:
        self._model = scene.build(arms)
        self._data = mujoco.MjData(self._model)
        self._joints = len(scene.JOINTS) * len(arms)
        self._data.qpos[: self._joints] = np.radians(scene.HOME_DEG * len(arms))
        self._gains = self._model.actuator_gainprm.copy(), self._model.actuator_biasprm.copy()
        mujoco.mj_forward(self._model, self._data)
        self._ports = [Port(folder / f"{arm}{PORT}") for arm in arms]
        self._blocked: float | None = None
        """Where the elbow is held, radians."""
        for arm in arms:
            _write_calibration(folder / f"{'_'.join([ROBOT_ID, *arm.split('_')[:-1]])}.json")
        self._truth = SharedRecord(folder / TRUTH, 8 * (1 + self._model.nq))
        self._listener = Listener(folder / ORDERS)
        self.publish()

    def run(self, owner: Channel) -> None:
        """Run until the owner closes the channel."""
        due = time.monotonic()
        count = 0
        while True:
            while (left := due - time.monotonic()) > 0:
                if select.select([port.master for port in self._ports], [], [], left)[0]:
                    self._serve()
            self._serve()
            self._step()
            count += 1
            if count % LOOK_EVERY == 0:
                self.publish()
                self._obey()
                try:
                    owner.receive(0)
                except ChannelClosed:
                    return
            due += scene.STEP_S
            if (late := time.monotonic() - due) > CATCH_UP_S:
                due += late

    def publish(self) -> None:
        self._truth.write(scene.SimulatorState(time.monotonic(), self._data.qpos).pack())

    def close(self) -> None:
        self._listener.close()
        self._truth.remove()
        for port in self._ports:
            port.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        for port, joints in zip(
            self._ports,
            np.degrees(self._data.qpos[: self._joints]).reshape(len(self._ports), -1),
            strict=True,
        ):
            port.serve(joints)

    def _step(self) -> None:
        model, data = self._model, self._data
        for joint, goal in enumerate(goal for port in self._ports for goal in port.bus.goals_deg()):
            torque = goal is not None
            model.actuator_gainprm[joint] = self._gains[0][joint] if torque else 0.0
            model.actuator_biasprm[joint] = self._gains[1][joint] if torque else 0.0
            data.ctrl[joint] = 0.0 if goal is None else math.radians(goal)
        mujoco.mj_step(model, data)
        if self._blocked is not None:
            data.qpos[_ELBOW] = self._blocked
            data.qvel[_ELBOW] = 0.0

    def _obey(self) -> None:
        for caller, order in self._listener.messages():
            try:
                self._order(order)
                answer: dict[str, Any] = {"host": str(self._ports[0].path), "pid": os.getpid()}
            except (KeyError, ValueError, TypeError) as error:
                answer = {"error": f"{order}: {type(error).__name__} {error}"}
            with contextlib.suppress(ChannelClosed, BlockingIOError):
                caller.send(answer)

    def _order(self, order: dict[str, Any]) -> None:
        for verb in ("fault", "end"):
            if verb not in order:
                continue
            if order[verb] not in FAULTS:
                raise ValueError(f"faults: {', '.join(FAULTS)}")
            begins = verb == "fault"
            if order[verb] == "silent":
                for port in self._ports:
                    port.bus.silent = begins
            else:
                self._blocked = float(self._data.qpos[_ELBOW]) if begins else None
        if "place" in order:
            x, y, yaw = map(float, order["place"])
            if not all(map(math.isfinite, (x, y, yaw))):
                raise ValueError("place needs finite x, y, yaw of the cube")
            self._data.qpos[self._joints :] = [
                x,
                y,
                scene.CUBE_M / 2,
                math.cos(yaw / 2),
                0.0,
                0.0,
                math.sin(yaw / 2),
            ]
            self._data.qvel[self._joints :] = 0.0


def _write_calibration(path: Path) -> None:
    """Write LeRobot's calibration file of this arm, which agrees with its motors."""
    calibration = {
        name: {
            "id": number + 1,
            "drive_mode": 0,
            "homing_offset": 0,
            "range_min": steps(low),
            "range_max": steps(high),
        }
        for number, (name, (low, high)) in enumerate(
            zip(scene.JOINTS, scene.RANGE_DEG, strict=True)
        )
    }
    path.write_text(json.dumps(calibration))


if __name__ == "__main__":
    serve(lambda options: SO101Cell(Path(options["folder"]), options["arms"]))

"""Main module of the simulated cell's process: physics at 1 kHz real time, servers, a socket.

The servers of arm and hand listen on loopback. The socket takes orders in JSON: ``{"fault": NAME}``
and ``{"end": NAME}`` (server.FAULTS), ``{"place": {"cube": [x, y, yaw], "target": [x, y]}}`` and
``{}``. The answer names host and process, or an error.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from franky_sim.simulation_server import LocalHostnames

from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.features.realworld.listener import Listener

from ..child_process import serve
from ..shared_record import SharedRecord
from . import scene
from .arm import TOOL_M
from .client import ORDERS, TRUTH
from .server import FAULTS, ArmServer

STEP_S = 0.001
LOOK_EVERY = 5
"""Steps between two polls of orders, and between two publications of the true state."""
ANSWER_POLL_S = 2e-4
CATCH_UP_S = 0.05
"""A delay beyond this is not caught up, so simulated time then runs slower than real time."""
WRENCH_SMOOTHING = 0.8
"""Weight of the old estimate at each publication: a time constant of about 25 ms."""


class SimulatedCell:
    """Simulation, servers and order socket of one cell."""

    def __init__(self, folder: Path) -> None:
        self._simulator, robot = scene.build()
        self._simulator.init()
        self._server = ArmServer(robot, LocalHostnames())
        self._server.init()
        self._simulator.start()
        self._model = self._simulator.model
        self._data = self._simulator.data
        self._hand = [
            self._model.body(scene.PREFIX + name).id
            for name in ("hand", "left_finger", "right_finger")
        ]
        self._dofs = [
            int(self._model.joint(f"{scene.PREFIX}fr3_joint{joint}").dofadr[0])
            for joint in range(1, 8)
        ]
        self._cube = int(self._model.joint(scene.CUBE).qposadr[0])
        self._truth = SharedRecord(folder / TRUTH, 8 * (14 + self._model.nq))
        self._listener = Listener(folder / ORDERS)
        self.publish()

    def run(self, owner: Channel) -> None:
        """Run until the owner closes the channel."""
        due = time.monotonic()
        steps = 0
        while True:
            self._server.process_commands()
            if self._server.waiting:
                time.sleep(ANSWER_POLL_S)
                continue
            self._simulator.step()
            self._server.send_state()
            steps += 1
            if steps % LOOK_EVERY == 0:
                self.publish()
                self._obey()
                try:
                    owner.receive(0)
                except ChannelClosed:
                    return
            due += STEP_S
            late = time.monotonic() - due
            if late > CATCH_UP_S:
                due += late
            elif late < 0:
                time.sleep(-late)

    def publish(self) -> None:
        """Estimate the wrench on the hand and publish the true state."""
        data = self._data
        mujoco.mj_rnePostConstraint(self._model, data)
        felt = data.cfrc_ext[self._hand].sum(
            axis=0
        )  # torque, force, about the centre of mass of the whole arm
        hand = self._hand[0]
        tool = data.xpos[hand] + data.xmat[hand].reshape(3, 3)[:, 2] * TOOL_M
        torque = felt[:3] + np.cross(
            data.subtree_com[self._model.body_rootid[hand]] - tool, felt[3:]
        )
        self._server.wrench = WRENCH_SMOOTHING * self._server.wrench + (
            1 - WRENCH_SMOOTHING
        ) * np.concatenate([felt[3:], torque])
        cube = data.qpos[self._cube : self._cube + 3]
        truth = scene.SimulatorState(
            time.monotonic(), data.qvel[self._dofs], data.qpos, data.mocap_pos[0], cube
        )
        self._truth.write(truth.pack())

    def close(self) -> None:
        self._listener.close()
        self._truth.remove()
        self._server.cleanup()

    def _obey(self) -> None:
        for caller, order in self._listener.messages():
            try:
                self._order(order)
                answer: dict[str, Any] = {"host": self._server.hostname, "pid": os.getpid()}
            except (KeyError, ValueError, TypeError) as error:
                answer = {"error": f"{order}: {type(error).__name__} {error}"}
            with contextlib.suppress(ChannelClosed, BlockingIOError):
                caller.send(answer)

    def _order(self, order: dict[str, Any]) -> None:
        for verb in ("fault", "end"):
            if verb in order and order[verb] not in FAULTS:
                raise ValueError(f"faults: {', '.join(FAULTS)}")
        if "fault" in order:
            self._server.inject(order["fault"])
        if "end" in order:
            self._server.end(order["end"])
        if "place" in order:
            x, y, yaw = map(float, order["place"]["cube"])
            pose = [
                x,
                y,
                scene.TABLE_Z + scene.CUBE_M / 2,
                math.cos(yaw / 2),
                0.0,
                0.0,
                math.sin(yaw / 2),
            ]
            target = list(map(float, order["place"]["target"]))
            if not np.isfinite([*pose, *target]).all() or len(target) != 2:
                raise ValueError("place needs finite x, y, yaw of the cube and x, y of the target")
            self._data.qpos[self._cube : self._cube + 7] = pose
            self._data.qvel[self._model.joint(scene.CUBE).dofadr[0] :][:6] = 0.0
            self._data.mocap_pos[0, :2] = target


if __name__ == "__main__":
    serve(lambda options: SimulatedCell(Path(options["folder"])))

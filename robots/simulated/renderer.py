"""Main module of the process that renders the simulated cameras.

It reads the true state that the cell publishes, so rendering does not slow the simulation.
Orders, JSON: ``{"freeze": CAMERA}``, ``{"lose": CAMERA}``, ``{"fix": CAMERA}``. Answer: ``{}``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.features.realworld.listener import Listener
from rlinf_vla.features.realworld.robot import Frame

from ..child_process import serve
from ..shared_record import FrameRecord, SharedRecord
from . import scene
from .client import CAMERA_ORDERS, TRUTH, frames_path


class SimulatedCameras:
    """Render and publish the frames of all simulated cameras, and inject camera faults."""

    def __init__(
        self,
        model: Any,
        data: Any,
        show: Callable[[bytes], float],
        folder: Path,
        cameras: list[str],
        height: int,
        width: int,
        hz: float,
    ) -> None:
        """``show``: writes a packed true state into ``data`` and returns its time."""
        self._model = model
        self._data = data
        self._show = show
        self._model.vis.quality.offsamples = 4
        self._renderer = mujoco.Renderer(self._model, height, width)
        # No shadows, and the 3200 triangles of the collision meshes instead of the 242000 of the
        # visual ones: 30 times as fast on a CPU.
        self._option = mujoco.MjvOption()
        self._option.geomgroup[2], self._option.geomgroup[3] = 0, 1
        self._truth = _wait_for(folder / TRUTH)
        self._frames = {
            name: FrameRecord(frames_path(folder, name), (height, width)) for name in cameras
        }
        self._frozen: dict[str, NDArray[np.uint8]] = {}
        self._lost: set[str] = set()
        self._noise = np.random.default_rng(0)
        self._listener = Listener(folder / CAMERA_ORDERS)
        self._number = 0
        self._period = 1.0 / hz
        self.draw()

    def run(self, owner: Channel) -> None:
        """Run until the owner closes the channel."""
        due = time.monotonic()
        while True:
            self.draw()
            for caller, order in self._listener.messages():
                with contextlib.suppress(
                    KeyError, ChannelClosed, BlockingIOError
                ):  # no such camera; who asked is gone
                    self._obey(order)
                    caller.send({})
            due = max(due + self._period, time.monotonic())
            try:
                owner.receive(max(due - time.monotonic(), 1e-3))
            except ChannelClosed:
                return

    def close(self) -> None:
        for frames in self._frames.values():
            frames.remove()

    def draw(self) -> None:
        """Render and publish a frame of every camera that is not lost."""
        data = self._truth.read()
        assert data is not None  # _wait_for has seen a published state
        moment = self._show(data)
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        self._number += 1
        for name, frames in self._frames.items():
            if name in self._lost:
                continue
            frames.write(
                Frame(
                    moment,
                    self._number,
                    self._frozen[name] if name in self._frozen else self._look(name),
                )
            )

    def _look(self, camera: str) -> NDArray[np.uint8]:
        self._renderer.update_scene(self._data, camera=camera, scene_option=self._option)
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        image = self._renderer.render()
        # Sensor-like noise in the lowest bit distinguishes a frozen image from a still scene.
        return image ^ self._noise.integers(0, 2, image.shape, np.uint8)

    def _obey(self, order: dict[str, Any]) -> None:
        for verb, name in order.items():
            if verb == "lose":
                self._lost.add(name)
            elif verb == "freeze":
                last = self._frames[name].read()
                assert last is not None
                self._frozen[name] = last.image
            elif verb == "fix":
                self._lost.discard(name)
                self._frozen.pop(name, None)


def _wait_for(path: Path) -> SharedRecord:
    """Wait for the cell, which starts at the same time; the parent process has a deadline."""
    while True:
        try:
            record = SharedRecord(path)
            if record.read() is not None:
                return record
        except (OSError, ValueError):  # not there, or still empty
            pass
        time.sleep(0.05)


def cameras_of_the_franka(options: dict[str, Any]) -> SimulatedCameras:
    simulator, _ = scene.build()
    simulator.init()
    simulator.start()

    def show(packed: bytes) -> float:
        truth = scene.SimulatorState.unpack(packed)
        simulator.data.qpos[:], simulator.data.mocap_pos[0] = truth.positions, truth.target
        return truth.time

    return SimulatedCameras(
        simulator.model, simulator.data, show, Path(options.pop("folder")), **options
    )


if __name__ == "__main__":
    serve(cameras_of_the_franka)

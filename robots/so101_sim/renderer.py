"""Main module of the process that renders the cameras of the simulated SO-101."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mujoco

from ..child_process import serve
from ..simulated.renderer import SimulatedCameras
from . import scene


def cameras(options: dict[str, Any]) -> SimulatedCameras:
    model = scene.build(options.pop("arms"))
    data = mujoco.MjData(model)

    def show(packed: bytes) -> float:
        truth = scene.SimulatorState.unpack(packed)
        data.qpos[:] = truth.positions
        return truth.time

    return SimulatedCameras(model, data, show, Path(options.pop("folder")), **options)


if __name__ == "__main__":
    serve(cameras)

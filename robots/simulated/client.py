"""Start a simulated cell, or connect to the one that runs in a folder, and control it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlinf_vla.features.realworld.listener import ask
from rlinf_vla.features.realworld.robot import RobotError

from ..child_process import ChildProcess, NotInstalled
from ..shared_record import SharedRecord
from . import scene

ORDERS, TRUTH = "cell.socket", "cell.truth"
CAMERA_ORDERS = "cameras.socket"
GL_BACKENDS = ("egl", "osmesa")
"""OpenGL without a screen: EGL (GPU or Mesa's llvmpipe), else OSMesa (CPU), with equal images."""
ANSWER_S = 10.0
"""Time to wait for an answer; long, because a busy machine delays it."""


def frames_path(folder: Path, camera: str) -> Path:
    """Return the path of a camera's frames."""
    return folder / f"camera-{camera}.frames"


class CellProcesses:
    """The processes of one folder's cell, which end with the process that started them."""

    cell_module: str
    """Main module of the physics, relative to ``robots``."""
    renderer_module: str
    settings: Mapping[str, Any] = MappingProxyType({})
    """More options of both modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[ChildProcess] = []

    def start(self, timeout: float, cameras: list[str], height: int, width: int, hz: float) -> str:
        """Return the cell's host name on loopback; start its processes if none answer.

        Raises RobotError.
        """
        deadline = time.monotonic() + timeout
        # Fails at once if no cell listens. A late cell must not count as dead: a second cell would
        # replace it.
        if _asked(self.folder / ORDERS, {}, timeout / 2) is None:
            (self.folder / TRUTH).unlink(
                missing_ok=True
            )  # from an earlier cell; the cameras wait for the new one
            cell = ChildProcess("the simulated cell", self.cell_module)
            self._children.append(cell)
            cell.begin({"folder": str(self.folder), **self.settings})
            if cameras:
                options = {
                    "folder": str(self.folder),
                    "cameras": cameras,
                    "height": height,
                    "width": width,
                    "hz": hz,
                    **self.settings,
                }
                self._children.append(_cameras(self.renderer_module, options, deadline))
            cell.wait_ready(deadline)
        return str(self.ask({})["host"])

    def fault(self, fault: str) -> None:
        """Inject a fault of the arm, or ``freeze CAMERA`` or ``lose CAMERA``."""
        self._order("fault", fault)

    def fix(self, fault: str) -> None:
        """Remove the cause of a fault; what the arm latched stays."""
        self._order("end", fault)

    def read_truth(self) -> bytes:
        """Return the packed true state of the simulation."""
        try:
            data = SharedRecord(self.folder / TRUTH).read()
        except OSError:
            data = None
        if data is None:
            raise RobotError(f"no simulated cell in {self.folder}")
        return data

    def close(self) -> None:
        """End the processes that were started here. Idempotent."""
        for child in reversed(self._children):
            child.end(2.0)
        self._children.clear()

    def _order(self, verb: str, fault: str) -> None:
        what, _, camera = fault.partition(" ")
        if camera:
            self.ask({what if verb == "fault" else "fix": camera}, CAMERA_ORDERS)
        else:
            self.ask({verb: fault})

    def ask(self, order: dict[str, Any], socket: str = ORDERS) -> dict[str, Any]:
        answer = _asked(self.folder / socket, order, ANSWER_S)
        if answer is None:
            raise RobotError(f"no simulated cell answers in {self.folder}")
        if "error" in answer:
            raise RobotError(f"the simulated cell refuses: {answer['error']}")
        return answer


class SimulatedCell(CellProcesses):
    """A Franka at its table; faults are those of server.FAULTS."""

    cell_module, renderer_module = "simulated.cell", "simulated.renderer"

    def place(self, cube: tuple[float, float, float], target: tuple[float, float]) -> None:
        """Place the cube at x, y (metres) and yaw (radians), and the target at x, y."""
        self.ask({"place": {"cube": cube, "target": target}})

    def truth(self) -> scene.SimulatorState:
        """Return the true state of the simulation, for scripted experts, rewards and tests."""
        return scene.SimulatorState.unpack(self.read_truth())


def _asked(path: Path, order: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """Return the answer, or None if there is none within ``timeout``."""
    with contextlib.suppress(TimeoutError):
        return ask(path, order, timeout)
    return None


def _cameras(module: str, options: dict[str, Any], deadline: float) -> ChildProcess:
    reasons = []
    for backend in GL_BACKENDS:
        # By default Mesa caches compiled shaders in the user's home.
        environment = {
            "MUJOCO_GL": backend,
            "PYOPENGL_PLATFORM": backend,
            "MESA_SHADER_CACHE_DISABLE": "true",
        }
        child = ChildProcess("the simulated cameras", module, variables=environment)
        child.begin(options)
        try:
            child.wait_ready(deadline)
            return child
        except NotInstalled:
            raise
        except RobotError as error:
            reasons.append(f"{backend}: {error}")
    raise RobotError(
        f"no OpenGL that renders without a screen: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6 ({'; '.join(reasons)})"
    )

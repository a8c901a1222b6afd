"""The simulated cell from outside: started when first needed, found again by whoever knows its folder."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from rlinf_vla.robot import RobotError

from ..channel import ask
from ..child import Child, NotInstalled
from ..record import Record
from . import scene

ORDERS, TRUTH = "cell.socket", "cell.truth"
CAMERA_ORDERS = "cameras.socket"
GL_BACKENDS = ("egl", "osmesa")
"""OpenGL without a screen: a GPU or Mesa's llvmpipe, else always the CPU. The images are the same."""
ANSWER_S = 10.0
"""A crowded machine makes it late."""


def frames_path(folder: Path, camera: str) -> Path:
    """Where its pictures are."""
    return folder / f"camera-{camera}.frames"


class SimulatedCell:
    """One cell in one folder. Whoever starts its processes takes them along when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []

    def start(self, timeout: float, cameras: list[str], height: int, width: int, hz: float, python: str | None = None) -> str:
        """The name of its host, on loopback; processes are started where none answer yet. Raises RobotError."""
        deadline = time.monotonic() + timeout
        # Where none listens this fails at once. One that is late must not be taken for dead: a second one would take its place.
        if _asked(self.folder / ORDERS, {}, timeout / 2) is None:
            (self.folder / TRUTH).unlink(missing_ok=True)  # of an earlier cell; the cameras wait for the new one
            cell = Child("the simulated cell", "simulated.cell", python)
            self._children.append(cell)
            cell.begin({"folder": str(self.folder)})
            if cameras:
                options = {"folder": str(self.folder), "cameras": cameras, "height": height, "width": width, "hz": hz}
                self._children.append(_cameras(options, deadline, python))
            cell.wait_ready(deadline)
        return str(self._ask({})["host"])

    def fault(self, fault: str) -> None:
        """Of the arm (server.FAULTS), or ``freeze CAMERA``, ``lose CAMERA``."""
        self._order("fault", fault)

    def mend(self, fault: str) -> None:
        """The cause is gone; what the arm latched stays."""
        self._order("end", fault)

    def place(self, cube: tuple[float, float, float], target: tuple[float, float]) -> None:
        """Cube: x, y (metres) and yaw (radians); target: x, y."""
        self._ask({"place": {"cube": cube, "target": target}})

    def truth(self) -> scene.Truth:
        """How it really is now: for scripted humans, rewards and tests."""
        try:
            data = Record(self.folder / TRUTH).read()
        except OSError:
            data = None
        if data is None:
            raise RobotError(f"no simulated cell in {self.folder}")
        return scene.Truth.unpack(data)

    def close(self) -> None:
        """End the processes that were started here. Idempotent."""
        for child in reversed(self._children):
            child.end(2.0)
        self._children.clear()

    def _order(self, verb: str, fault: str) -> None:
        what, _, camera = fault.partition(" ")
        if camera:
            self._ask({what if verb == "fault" else "mend": camera}, CAMERA_ORDERS)
        else:
            self._ask({verb: fault})

    def _ask(self, order: dict[str, Any], socket: str = ORDERS) -> dict[str, Any]:
        answer = _asked(self.folder / socket, order, ANSWER_S)
        if answer is None:
            raise RobotError(f"no simulated cell answers in {self.folder}")
        if "error" in answer:
            raise RobotError(f"the simulated cell refuses: {answer['error']}")
        return answer


def _asked(path: Path, order: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """None also of one that is too late."""
    with contextlib.suppress(TimeoutError):
        return ask(path, order, timeout)
    return None


def _cameras(options: dict[str, Any], deadline: float, python: str | None) -> Child:
    reasons = []
    for backend in GL_BACKENDS:
        # Mesa would keep compiled shaders in the user's home.
        environment = {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "MESA_SHADER_CACHE_DISABLE": "true"}
        child = Child("the simulated cameras", "simulated.renderer", python, environment)
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

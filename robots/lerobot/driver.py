"""Drive a robot through LeRobot's ``Robot`` interface; a thread does all input and output.

Positions are in LeRobot's units: degrees, and 0 to 100 for a gripper. The motors have no watchdog:
without commands they hold the last positions, also if the connection is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import time
from typing import Any

import numpy as np

from rlinf_vla.features.realworld.robot import RobotError, RobotState, Vector

from ..joint_cell import JointCell
from ..servo import NETWORK

_DEFAULTS = {"disable_torque_on_disconnect": False, "use_degrees": True}
"""Options that a robot gets if it has them, also for one of its arms (``left_arm_use_degrees``): an
arm must not fall when a session ends, and an angle must not depend on the calibrated range."""
_FAILURES = 10
"""So many reads or writes that failed in a row are a lost connection."""
_SMOOTHING = 0.6
"""Weight of the old velocity in each estimate."""
SETTLE_S = 2.0
"""Time after the way home in which the joints must arrive."""
_ARRIVED = 0.05
"""Share of its range by which a joint may miss the rest position."""
_CLOSE_S = 3.0


class LeRobotArm:
    """One connection to a robot."""

    def __init__(
        self, kind: str, module: str | None, options: dict[str, Any], cell: JointCell
    ) -> None:
        """Connect to the robot that LeRobot registers as ``kind``.

        ``module``: registers it; None: LeRobot's own. Blocks; raises RobotError.
        """
        self._cell = cell
        self.homing = False
        self._home_next = False
        self._lower = np.array(cell.lower)
        self._upper = np.array(cell.upper)
        self._home = np.array(cell.home)
        self.problem: str | None = None
        self._command: Vector | None = None
        self._way: tuple[float, float, Vector] | None = None
        """Beginning and duration of the way home, and where it begins."""
        self._robot = make(kind, module, options)
        try:
            self._robot.connect(calibrate=False)
            if not self._robot.is_calibrated:
                raise RobotError(
                    f"{kind} is not calibrated, or with another file: run lerobot-calibrate with the same id"
                )
            self._names = self._features(kind)
            at = self._read()
        except Exception as error:
            with contextlib.suppress(Exception):  # it may not have been connected
                self._robot.disconnect()
            if isinstance(error, RobotError):
                raise
            raise RobotError(
                f"{kind} does not answer: {_words(error)}; is it on, is the port right?"
            ) from None
        self.measured = RobotState(time.monotonic(), at, np.zeros_like(at))
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def controlled(self) -> bool:
        return False

    def track(self, positions: Vector) -> None:
        """Send ``positions`` ``[J]`` from now on."""
        self._command = positions

    def rest(self) -> None:
        """Send nothing: the motors hold."""
        self._command = None

    def home(self) -> None:
        """Start moving straight to the rest position, no joint faster than ``home_speed``."""
        self._command = None
        self._home_next = True  # before the thread looks at it
        self.homing = True

    def halt(self) -> None:
        self.homing = False

    def close(self) -> None:
        """Close the connection; the motors keep holding. Idempotent."""
        self._closed = True
        self._thread.join(_CLOSE_S)
        try:
            self._robot.disconnect()
        except Exception as error:  # it is lost
            self.problem = self.problem or _words(error)

    def _features(self, kind: str) -> list[str]:
        names = [f"{joint}.pos" for joint in self._cell.joints]
        for what in ("action_features", "observation_features"):
            features = [
                name
                for name, shape in getattr(self._robot, what).items()
                if not isinstance(shape, tuple)
            ]
            if sorted(features) != sorted(names):
                raise RobotError(
                    f"joints: the cell's are {', '.join(names)}, {kind}'s {what} are {', '.join(features)}; change the cell"
                )
        return names

    def _read(self) -> Vector:
        seen = self._robot.get_observation()
        return np.array([float(seen[name]) for name in self._names])

    def _run(self) -> None:
        period = 1 / self._cell.servo_hz
        failures = 0
        due = time.monotonic()
        while not self._closed:
            try:
                self._exchange()
                failures = 0
            except Exception as error:
                failures += 1
                if failures >= _FAILURES:
                    self.homing = False
                    self.problem = (
                        self.problem
                        or f"{NETWORK}the connection to the robot is lost ({_words(error)})"
                    )
            due = max(due + period, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def _exchange(self) -> None:
        """Read all positions and send those wanted."""
        at = self._read()
        before = self.measured
        now = time.monotonic()
        speed = (at - before.joints) / max(now - before.time, 1e-3)
        self.measured = RobotState(
            now, at, _SMOOTHING * before.joint_velocities + (1 - _SMOOTHING) * speed
        )
        target = self._on_the_way_home(at, now) if self.homing else self._command
        if target is not None:
            self._robot.send_action(dict(zip(self._names, target.tolist(), strict=True)))

    def _on_the_way_home(self, at: Vector, now: float) -> Vector:
        """Return the position now, on a straight way with a cosine profile of the speed."""
        if self._home_next or self._way is None:
            seconds = (
                float(np.max(np.abs(self._home - at) / np.array(self._cell.home_speed))) * np.pi / 2
            )
            self._home_next = False
            self._way = (now, max(seconds, 0.1), at)
        begun, seconds, start = self._way
        if now - begun > seconds:
            missed = np.abs(at - self._home) > _ARRIVED * (self._upper - self._lower)
            if not missed.any():
                self.homing = False
            elif now - begun > seconds + SETTLE_S:
                self.homing = False
                self.problem = f"homing: {self._cell.joints[int(missed.argmax())]} does not reach its rest position; is it blocked?"
        part = (1 - np.cos(np.pi * min(1.0, (now - begun) / seconds))) / 2
        way: Vector = start + part * (self._home - start)
        return way


def make(kind: str, module: str | None, options: dict[str, Any]) -> Any:
    """Return LeRobot's robot of this kind, not connected. Raises RobotError."""
    import draccus
    from lerobot.robots.config import RobotConfig
    from lerobot.robots.utils import make_robot_from_config

    own = (f"lerobot.robots.{kind}", f"lerobot.robots.{re.sub('[0-9]', '', kind)}")
    for package in own if module is None else (module,):
        try:
            importlib.import_module(package)
            break
        except ModuleNotFoundError as error:
            if not package.startswith(str(error.name)):
                raise
    choices = RobotConfig.get_known_choices()
    if kind not in choices:
        names = ", ".join(sorted(choices))
        raise RobotError(
            f"robot.type={kind} is not known to LeRobot; known: {names} (robot.module: of another package)"
        )
    fields = choices[kind].__dataclass_fields__
    defaults = {
        name: value
        for name in fields
        for key, value in _DEFAULTS.items()
        if name == key or name.endswith(f"_{key}")
    }
    try:
        return make_robot_from_config(
            draccus.decode(RobotConfig, {"type": kind, **defaults, **options})
        )
    except (draccus.ParsingError, TypeError, ValueError) as error:
        raise RobotError(f"robot.options: {_words(error)}") from None


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

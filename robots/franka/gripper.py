"""Drive the Franka Hand in a separate thread, since its commands take seconds."""

from __future__ import annotations

import threading
import time
from typing import Any

import franky

from rlinf_vla.features.realworld.robot import RobotError

from ..cell import Cell

_PERIOD_S = 0.02
_TOLERANCE_M = 0.002
"""A requested width nearer than this to the last command is not sent."""
_ANY_M = 0.1
"""Tolerance of the hand's own judgement, which then accepts any width; ``holding`` is ours."""
_OBJECT_M = 0.002
"""Fingers that have closed hold something if they stand further than this from the requested width,
and from each other."""
_RELEASE_M = 0.005
"""A requested width must exceed that of the held object by this, or else the grasp is kept."""


class FrankyGripper:
    """Pursue the newest requested width. An error stays in ``problem`` until ``fix``."""

    def __init__(self, host: str, cell: Cell) -> None:
        """Connect. Raises RobotError."""
        self._cell = cell
        try:
            self._gripper = franky.Gripper(host)
            state = self._gripper.state
        except (franky.NetworkException, franky.IncompatibleVersionException) as error:
            raise RobotError(
                f"the hand at {host} does not answer: {error}; is it switched on in Desk?"
            ) from None
        self.server_version: int = self._gripper.server_version
        self.widest: float = state.max_width
        self.width: float = state.width
        """Metres between the fingers, as last measured."""
        self.problem: str | None = None
        self.holding = False
        """Whether the fingers have closed on an object and press on it."""
        self._wish: float | None = None
        self._sent: float | None = None
        """Width of the last command."""
        self._grasps = False
        """The last command is a grasp."""
        self.halting = False
        """A stop of the fingers is requested and not yet sent."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def pursue(self, width: float) -> None:
        """Request a width in metres; it replaces the running command."""
        self._wish = width

    @property
    def lost(self) -> bool:
        """Whether the connection is lost and a new one is needed."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Drop the request: moving fingers stop, a grasp is kept."""
        if self._wish is not None:
            self._wish = None
            self.halting = True

    def fix(self) -> None:
        self.problem = None

    def close(self) -> None:
        self._closed = True
        self._thread.join(1.0)

    def _run(self) -> None:
        underway: Any = None
        while not self._closed:
            time.sleep(_PERIOD_S)
            try:
                if underway is not None and underway.wait(0):
                    if not underway.get():
                        raise RuntimeError("a command failed")
                    underway = None
                self.width = self._gripper.width
                self.holding = underway is None and self._on_an_object(self.width)
                if self.halting:
                    if underway is not None:
                        self._gripper.stop()
                        self._grasps = False
                    underway = None
                    self._sent = self._sent if self.holding else None
                    self.halting = False
                wish = self._wish
                if (
                    wish is None
                    or self.problem
                    or not self._needs_a_command(wish, underway is not None)
                ):
                    continue
                if underway is not None:
                    self._gripper.stop()
                underway = self._begin(wish)
                self._sent = wish
            except Exception as error:
                underway = self._wish = self._sent = None
                self.halting = self._grasps = self.holding = False
                text = " ".join(
                    str(error).replace("libfranka gripper:", "").replace("libfranka:", "").split()
                )
                self.problem = self.problem or f"gripper: {text}"
                if isinstance(error, franky.NetworkException):
                    return

    def _on_an_object(self, width: float) -> bool:
        if not self._grasps or self._sent is None:
            return False
        return width > _OBJECT_M and abs(width - self._sent) > _OBJECT_M

    def _needs_a_command(self, wish: float, underway: bool) -> bool:
        """Return whether a requested width needs a new command.

        A grasp that is closing, or that holds an object, already does what a smaller width asks.
        """
        if self._grasps and self.holding and wish < self.width + _RELEASE_M:
            return False
        if self._grasps and underway and wish < self.width:
            return False
        return self._sent is None or abs(wish - self._sent) >= _TOLERANCE_M

    def _begin(self, width: float) -> Any:
        """Start a command: a move to open, a grasp to close, which keeps pressing on an object."""
        speed = self._cell.gripper_speed_m_s
        self._grasps = width <= self.width
        if not self._grasps:
            return self._gripper.move_async(width, speed)
        return self._gripper.grasp_async(width, speed, self._cell.gripper_force_n, _ANY_M, _ANY_M)

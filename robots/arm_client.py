"""Client of an arm's process, used in the policy's process; implements ``Robot`` and ``Timed``.

States are read from shared memory; a command is one small message.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf_vla.core.channel import ChannelClosed
from rlinf_vla.features.realworld.robot import (
    POLICY,
    Intervention,
    RobotError,
    RobotSpec,
    RobotState,
    Target,
)

from .child_process import ChildProcess
from .runtime_folder import STATE, Latch
from .shared_record import SharedRecord

_POLL_S = 0.01
_END_S = 5.0
"""Time for the arm's process to stop the arm and exit."""


class ArmClient(ABC):
    """Start an arm's process and exchange states, goals and orders with it.

    A subclass names the module of the process, and packs what is special to its arm.
    """

    module: str
    """Main module of the arm's process, relative to this folder."""

    def __init__(
        self, spec: RobotSpec, folder: Path, leave: Callable[[], None], python: str | None
    ) -> None:
        """``leave``: called when the arm is left, also after a failed connection."""
        self.spec = spec
        self._folder = folder
        self._leave = leave
        self._python = python
        self.found: dict[str, str] = {}
        """What the process reported when it was connected, such as ``host`` and ``versions``."""
        self._child: ChildProcess | None = None
        self._record: SharedRecord | None = None
        self._interventions: list[Intervention] = []
        self._safety: list[float] = []
        self._homed = False
        self._seen: str | None = None
        """The fault that was observed last."""
        self.refusal: str | None = None
        """Why the last acknowledgement failed, or None."""

    @abstractmethod
    def options(self, timeout_s: float) -> dict[str, Any]:
        """Return the first message to the arm's process; start what it needs."""

    @abstractmethod
    def pack(self, target: Target) -> list[float | None]: ...

    @abstractmethod
    def unpack(self, data: bytes) -> RobotState: ...

    def connect(self, timeout_s: float) -> None:
        """Start the arm's process and wait until it is connected. Raises RobotError."""
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            undo.callback(self._leave)
            options = self.options(timeout_s)
            child = ChildProcess("the arm's process", self.module, self._python)
            undo.callback(child.end, 0.0)
            child.begin(options)
            self.found = child.wait_ready(deadline)["found"]
            undo.pop_all()
        self._child = child
        self._record = SharedRecord(self._folder / STATE)

    @property
    def pid(self) -> int:
        """Id of the arm's process."""
        return self._living().pid

    def observe(self) -> RobotState:
        self._drain()
        self._send({})  # heartbeat
        state = self._look()
        self._seen = state.fault
        return state

    def command(self, target: Target, valid_until: float) -> None:
        fault = self._look().fault
        if fault is not None:
            raise RobotError(
                f"{fault}: look at the arm, then `rlinf-vla robot acknowledge operator=NAME`"
            )
        self._send({"goal": self.pack(target), "until": valid_until})

    def interventions(self) -> list[Intervention]:
        self._drain()
        interventions = self._interventions
        self._interventions = []
        return interventions

    def timings(self) -> dict[str, list[float]]:
        """Return ``safety``: seconds per step of the safety filter in the arm's process."""
        self._drain()
        seconds = self._safety
        self._safety = []
        return {"safety": seconds}

    def stop(self, why: str) -> None:
        if self._child is not None:  # without its process the arm has stopped
            with contextlib.suppress(RobotError):
                self._send({"stop": f"{POLICY}{why[: Latch.LONGEST]}"})

    def acknowledge(self, operator: str) -> None:
        """Start the recovery, which may take seconds.

        It has succeeded when ``observe().fault`` is another fault or None, and failed when
        ``refusal`` is set.
        """
        self.refusal = None
        self._send({"acknowledge": operator, "fault": self._seen})

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        """Move home. Raises RobotError on a fault, an objection or timeout; the arm stops."""
        self._send({"home": True})
        self._homed = False
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            fault = self.observe().fault
            if fault is not None:
                raise RobotError(f"{fault}: homing ended")
            if self._homed:
                return
            if (why := objection()) is not None:
                self.stop(why)
                raise RobotError(f"{why}: homing ended")
            time.sleep(_POLL_S)
        late = f"the arm was not home within {timeout_s:g} s"
        self.stop(late)
        raise RobotError(late)

    def close(self) -> None:
        if self._child is not None:
            with contextlib.suppress(RobotError):
                self._send({"goodbye": True})
            self._child.end(_END_S)
            self._child = None
        self._leave()

    def _look(self) -> RobotState:
        assert self._record is not None  # connected
        data = self._record.read()
        assert data is not None  # written before the process reported that it was ready
        return self.unpack(data)

    def _send(self, message: dict[str, Any]) -> None:
        """Send without waiting. Raises RobotError if the arm's process is dead or does not read."""
        child = self._living()
        try:
            child.channel.send(message)
        except ChannelClosed:
            raise child.reason() from None
        except BlockingIOError:
            raise RobotError(
                f"the arm's process ({child.pid}) does not read its messages"
            ) from None

    def _drain(self) -> None:
        child = self._living()
        try:
            while (message := child.channel.receive(0)) is not None:
                self._interventions += [
                    Intervention(*row) for row in message.get("interventions", [])
                ]
                self._safety += message.get("safety", [])
                self._homed = message.get("homed", self._homed)
                self.refusal = message.get("recovered", self.refusal)
        except ChannelClosed:
            raise child.reason() from None

    def _living(self) -> ChildProcess:
        if self._child is None:
            raise RobotError("the robot is not connected")
        return self._child

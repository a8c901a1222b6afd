"""The arm as the policy's process sees it: ``Robot`` and ``Timed``. Reading is a look into shared memory, a command one small message."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rlinf_vla.robot import Intervention, RobotError, RobotState, ToolTarget

from .. import cell_file
from ..cell import Cell
from ..channel import ChannelClosed, Message
from ..child import Child
from ..folder import STATE
from ..record import Record
from . import messages

_POLL_S = 0.01
_END_S = 5.0
"""For the arm's process to make the arm stand and end."""
_LONGEST = 500
"""Characters of a fault: what a policy raised may fill pages."""


class FrankaRobot:
    """find_host: names the arm's host within so many seconds (a simulated cell is started then). leave: undoes that."""

    def __init__(
        self,
        cell: Cell,
        folder: Path,
        find_host: Callable[[float], str],
        leave: Callable[[], None] = lambda: None,
        journal: str | None = None,
        python: str | None = None,
    ) -> None:
        self.spec, self.cell = cell.spec, cell
        self._folder = folder
        self.found: dict[str, str] = {}
        """About the arm, when it was connected: ``host``, ``versions``, and the hand's ``widest`` opening in metres."""
        self._find_host, self._leave = find_host, leave
        self._journal, self._python = journal, python
        self._child: Child | None = None
        self._record: Record | None = None
        self._interventions: list[Intervention] = []
        self._safety: list[float] = []
        self._homed = False
        self.refusal: str | None = None
        """Why the last acknowledgement did not help."""

    def connect(self, timeout_s: float) -> None:
        """Raises RobotError."""
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            undo.callback(self._leave)
            host = self._find_host(timeout_s)
            child = Child("the arm's process", "franka.process", self._python)
            undo.callback(child.kill)
            child.begin(
                {
                    "host": host,
                    "cell": self.cell.name,
                    "limits": cell_file.as_json(self.cell),
                    "folder": str(self._folder),
                    "journal": self._journal,
                }
            )
            self.found = child.wait_ready(deadline)["found"]
            undo.pop_all()
        self._child, self._record = child, Record(self._folder / STATE)

    @property
    def pid(self) -> int:
        """Of the arm's process."""
        return self._living().pid

    def observe(self) -> RobotState:
        self._drain()
        self._send({})  # still here
        return self._look()

    def command(self, target: ToolTarget, valid_until: float) -> None:
        fault = self._look().fault
        if fault is not None:
            raise RobotError(f"{fault}: look at the arm, then `rlinf-vla robot acknowledge person=NAME`")
        self._send({"goal": messages.pack_target(target), "until": valid_until})

    def interventions(self) -> list[Intervention]:
        self._drain()
        found, self._interventions = self._interventions, []
        return found

    def timings(self) -> dict[str, list[float]]:
        """``safety``: of the filter, which looks at each command in the arm's process."""
        self._drain()
        found, self._safety = self._safety, []
        return {"safety": found}

    def stop(self, why: str) -> None:
        if self._child is not None:  # a process that is gone has stopped the arm
            with contextlib.suppress(RobotError):
                self._send({"stop": f"policy: {' '.join(why.split())[:_LONGEST]}"})

    def acknowledge(self, person: str) -> None:
        """Begins the recovery, which may take seconds: done when ``observe().fault`` is None, failed when ``refusal`` says why."""
        self.refusal = None
        self._send({"acknowledge": person})

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        """Raises RobotError where it does not get there in time; the arm is stopped then."""
        self._send({"home": True})
        self._homed = False
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            fault = self.observe().fault
            if fault is not None:
                raise RobotError(f"{fault}, so the arm does not go home")
            if self._homed:
                return
            if (why := objection()) is not None:
                self.stop(why)
                raise RobotError(f"{why}, so the arm does not go home")
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
        assert data is not None  # written before it said that it was ready
        return messages.unpack(data)

    def _send(self, message: Message) -> None:
        """Never waits."""
        child = self._living()
        try:
            child.channel.send(message)
        except ChannelClosed:
            raise RobotError(child.obituary()) from None
        except BlockingIOError:
            raise RobotError(f"the arm's process ({child.pid}) takes no orders any more") from None

    def _drain(self) -> None:
        child = self._living()
        try:
            while (message := child.channel.receive(0)) is not None:
                self._interventions += [Intervention(*row) for row in message.get("interventions", [])]
                self._safety += message.get("safety", [])
                self._homed = message.get("homed", self._homed)
                self.refusal = message.get("recovered", self.refusal)
        except ChannelClosed:
            raise RobotError(child.obituary()) from None

    def _living(self) -> Child:
        if self._child is None:
            raise RobotError("the robot is not connected")
        return self._child

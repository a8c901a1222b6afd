"""Process of an arm: holds the arm's lock, runs the servo and takes orders. Needs only numpy.

Messages, all JSON:

* from the policy's process: ``{"goal": [...], "until": s}`` (a target's numbers, as the arm's
  client packs them), ``{}`` as a heartbeat, ``{"stop": WHY}``, ``{"home": true}``,
  ``{"acknowledge": OPERATOR}``, with the key ``fault`` for this fault only, and ``{"goodbye":
  true}`` before it closes its end of the channel; closing it ends this process;
* from any process of this user, at the socket in the arm's folder and at the abstract address of
  the folder: all but goals and goodbyes;
* to the policy's process: ``{"ready": ...}`` or ``{"error": ...}`` once, then ``{"interventions":
  [[time, rule, before, after], ...]}``, ``{"safety": [s, ...]}`` (the filter's time in each tick),
  ``{"homed": true}``, and ``{"recovered": null}``, why not, or the next fault.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any, TypeVar

from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.features.realworld.listener import Listener
from rlinf_vla.features.realworld.robot import (
    POLICY,
    STOPPED_BY,
    CellError,
    RobotError,
    RobotState,
    Target,
    stopped_by_a_person,
)

from .arm_cell import ArmCell
from .child_process import ENDING_SIGNALS
from .lock import Lock
from .own_files import OwnFile, OwnFiles
from .runtime_folder import JOURNAL, LATCH, LOCK, ORDERS, STATE, BackgroundWriter, Journal, Latch
from .servo import ArmServo
from .shared_record import SharedRecord

Result = TypeVar("Result")

OWNER_LOST = f"{POLICY}its process is gone"
_GOODBYE = "goodbye"
_OWNERS = ("goal", _GOODBYE)
"""Messages that only the policy's process may send."""
_SOONEST = 0.6
"""Shortest time between ticks, in periods; slightly above command_filter.EARLIEST."""
_END_S = 3.0
"""Longest time to stop and exit, well above the time that the arm needs."""


class ArmProcess(ABC):
    """The arm's lock, servo and message loop.

    A subclass connects the arm and packs its messages.
    """

    capacity: int
    """Longest packed state in bytes."""

    def __init__(self, owner: Channel, options: dict[str, Any], cell: ArmCell) -> None:
        self._owner = owner
        self._cell = cell
        self._host = str(options["host"])
        self._options = options
        folder = Path(options["folder"])
        self._lock = Lock(folder, self._host)
        self._disk = BackgroundWriter()
        latch = self._latch = Latch(folder, self._disk)
        if self._lock.killed is not None and latch.fault is None:
            latch.add(f"the arm's process {self._lock.killed} was killed")
            if not self._disk.settle(_END_S):
                raise RobotError(
                    f"{folder}: {self._disk.problem or 'the disk does not answer'}; make room, and begin again"
                )
        self._lock.hold()
        self._journal = Journal(
            Path(options["journal"]) if options["journal"] else folder / JOURNAL, self._disk
        )
        self._servo = self.connected(latch, self._journal)
        self._record = SharedRecord(folder / STATE, self.capacity)
        self._listener = Listener(folder / ORDERS, self._lock.socket)
        own: dict[str, OwnFile] = {
            ORDERS: self._listener,
            LOCK: self._lock,
            STATE: self._record,
            LATCH: latch,
        }
        self._files = OwnFiles(folder, own, self._disk)
        self._recovery: tuple[Future[Any], str] | None = None
        """The running recovery and the operator who acknowledged."""
        self._homing = False
        self._asked_to_end: str | None = None
        for signum in ENDING_SIGNALS:
            signal.signal(
                signum,
                lambda number, _: self._end(
                    f"{POLICY}the arm's process got {signal.Signals(number).name}"
                ),
            )
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, ENDING_SIGNALS
        )  # Ray's workers, which may have started this one, block some

    def run(self) -> None:
        """Run until the owner closes the channel or a signal arrives; then the arm stands still."""
        period = 1 / self._cell.servo_hz
        self._lock.drive()
        self._publish(time.monotonic())
        self._owner.send({"ready": True, "found": {"host": self._host, **self.found()}})
        due = time.monotonic()
        leaving = None
        now = due
        while leaving is None or not (self._left or time.monotonic() > leaving):
            # Return to the schedule after a late tick, but never sooner than the filter accepts.
            due = max(due + period, now + _SOONEST * period)
            time.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if leaving is None:
                self._listen(now)
            if self._asked_to_end is not None and leaving is None:
                if self._asked_to_end == _GOODBYE:
                    self._servo.release()
                else:
                    self._servo.stop(self._asked_to_end, now)
                leaving = now + _END_S
                self._lock.end()
            self._look_at_recovery()
            if (lost := self._files.look(now)) is not None:
                self._servo.stop(lost, now)
            if self._disk.problem is not None:
                self._servo.stop(self._disk.problem, now)
            self._publish(now)
            self._journal.flush()
        if (
            self._disk.settle(_END_S) or self._servo.fault is None
        ):  # else the next process finds this one killed
            self._lock.release()

    @property
    def _left(self) -> bool:
        """Whether arm and fingers stand still and no motion is running."""
        return self._servo.standing and not self._servo.busy

    def fail(self, error: BaseException) -> None:
        """Latch the failure of this process and brake the arm."""
        arm = self._servo.arm
        try:
            self._servo.stop(
                f"the arm's process failed: {type(error).__name__}: {error}", time.monotonic()
            )
        finally:
            arm.rest()
        deadline = time.monotonic() + _END_S
        while (arm.homing or self._servo.busy) and time.monotonic() < deadline:
            if arm.homing:
                arm.halt()
            time.sleep(1 / self._cell.servo_hz)

    def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):  # its folder may have been deleted or replaced
            self._record.remove()
        self._journal.write("end", fault=self._servo.fault, durable=True)
        self._journal.close()
        self._disk.settle(_END_S)
        self._disk.close()

    def within(self, connect: Callable[[], Result]) -> Result:
        """Connect in a thread within ``connect_timeout_s``.

        Raises RobotError, also if the host accepts the connection but stays silent; the waiting
        thread then ends with this process.
        """
        future = ThreadPoolExecutor(1).submit(connect)
        try:
            return future.result(self._cell.connect_timeout_s)
        except TimeoutError:
            future.add_done_callback(_let_go)  # the arm takes one connection at a time
            seconds = self._cell.connect_timeout_s
            raise RobotError(
                f"{self._host} accepted the connection but was silent for {seconds:g} s: restart the arm's control"
            ) from None

    @abstractmethod
    def connected(self, latch: Latch, journal: Journal) -> ArmServo:
        """Connect the arm; return its servo. Raises RobotError."""

    @abstractmethod
    def recover(self) -> Any:
        """Recover the arm from its fault, in a thread; return what ``install`` needs.
        The servo keeps using the old connection. Raises RobotError."""

    @abstractmethod
    def install(self, recovered: Any) -> None:
        """Let the servo use the recovered connection."""

    @abstractmethod
    def found(self) -> dict[str, str]:
        """Return what to report of the connected arm."""

    @abstractmethod
    def pack(self, state: RobotState) -> bytes: ...

    @abstractmethod
    def unpack_target(self, numbers: list[float | None]) -> Target: ...

    def _end(self, why: str) -> None:
        self._asked_to_end = (
            self._asked_to_end or why
        )  # keep the first: after a goodbye the channel closes, too

    def _publish(self, now: float) -> None:
        state, interventions = self._servo.tick(now)
        self._record.write(self.pack(state))
        if self._homing and not self._servo.arm.homing:
            self._homing = False
            self._tell({"homed": True})
        if len(self._servo.took) >= self._cell.ticks_per_step:
            self._tell({"safety": self._servo.took})
            self._servo.took = []
        if interventions:
            rows = [
                [intervention.time, intervention.rule, intervention.before, intervention.after]
                for intervention in interventions
            ]
            self._journal.write("interventions", rows=[row[1:] for row in rows])
            self._tell({"interventions": rows})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(
            ChannelClosed, BlockingIOError
        ):  # _listen notices the former; the latter has not read for long
            self._owner.send(message)

    def _listen(self, now: float) -> None:
        try:
            while (message := self._owner.receive(0)) is not None:
                self._servo.hear(now)
                self._obey(message, now)
                if _GOODBYE in message:
                    self._end(_GOODBYE)
        except ChannelClosed:
            self._end(OWNER_LOST)
        for caller, message in self._listener.messages():
            self._obey(
                {key: value for key, value in message.items() if key not in _OWNERS}, now, own=True
            )
            with contextlib.suppress(ChannelClosed, BlockingIOError):
                caller.send(
                    {
                        "host": self._host,
                        "pid": os.getpid(),
                        "fault": "; ".join(self._latch.faults) or None,
                    }
                )

    def _obey(self, message: dict[str, Any], now: float, own: bool = False) -> None:
        if "goal" in message:
            self._servo.pursue(self.unpack_target(message["goal"]), float(message["until"]), now)
        if "stop" in message:
            why = str(message["stop"])[: Latch.LONGEST]
            if own and not stopped_by_a_person(
                why
            ):  # from outside the session, which must not release it by a script
                why = f"{STOPPED_BY}{why}"
            self._journal.write("stop", why=why)
            self._servo.stop(why, now, own or self._servo.recovering)
        if "home" in message:
            self._servo.home()
            self._homing = True
        if "acknowledge" in message and self._recovery is None and self._servo.fault is not None:
            if message.get("fault", self._servo.fault) != self._servo.fault:
                self._tell({"recovered": self._servo.fault})
                return
            self._servo.recovering = True
            self._recovery = (
                ThreadPoolExecutor(1).submit(self.recover),
                str(message["acknowledge"])[: Latch.LONGEST],
            )

    def _look_at_recovery(self) -> None:
        if self._recovery is None or not self._recovery[0].done():
            return
        future, operator = self._recovery
        self._recovery = None
        self._servo.recovering = False
        try:
            self.install(future.result())
        except Exception as error:
            why = (
                str(error) if isinstance(error, RobotError) else f"{type(error).__name__}: {error}"
            )
            self._journal.write("not recovered", operator=operator, error=why, durable=True)
            self._tell({"recovered": why})
        else:
            self._disk.problem = None
            self._servo.acknowledge(operator)
            self._tell({"recovered": self._servo.fault})


def _let_go(late: Future[Any]) -> None:
    if late.exception() is None:
        late.result().close()


def main(make: Callable[[Channel, dict[str, Any]], ArmProcess]) -> None:
    """Run the process that ``make`` returns for the first message. Never returns.

    It may raise RobotError and CellError.
    """
    owner = Channel.to_parent()
    options = owner.wait()
    try:
        process = make(owner, options)
    except (
        RobotError,
        CellError,
        OSError,
    ) as error:  # OSError: a file of the arm's folder is of another kind, or not ours
        owner.send({"error": str(error)})
        os._exit(1)  # the thread of a hanging connection would keep this process alive
    code = 0
    try:
        process.run()
    except BaseException as error:
        code = 1
        traceback.print_exc()
        process.fail(error)
    finally:
        process.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # likewise

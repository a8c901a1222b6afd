"""Handle what happens between episodes at a robot: faults, operator commands, reconnection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vla.config.robot import BY_SCRIPT, SessionConfig
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.robot import (
    ACKNOWLEDGE,
    PAUSE,
    PAUSED_BY,
    QUIT,
    Camera,
    Operator,
    Robot,
    RobotError,
    RobotState,
    Scene,
    stopped_by_a_person,
)

POLL_S = 0.1
CONSENT_S = 1.0
"""Seconds that a simulated robot stands before a script acknowledges or resumes."""
CONSENTS = 5
"""Maximum number of scripted acknowledgements without a complete episode in between."""
RECOVERY_S = 20.0
"""Seconds until an acknowledgement without effect is requested again."""

REMIND_S = 60.0
"""Shortest time between two reports of a slow clock."""
SCRIPT = "a script"
"""Name of the operator of scripted acknowledgements."""

Tell = Callable[[dict[str, Any]], None]


class OperatorLeft(Exception):
    """The session is over; the message is the reason."""


@dataclass(frozen=True)
class Cell:
    robot: Robot
    cameras: Sequence[Camera]
    scene: Scene
    operator: Operator


class OperatorSession:
    """Poll the robot often enough to keep it alive, and exchange messages with the operator."""

    def __init__(self, cell: Cell, settings: SessionConfig, clock: Clock, tell: Tell) -> None:
        """``tell`` gets {"waiting": WHY, "for": WORD}, {"going_on": WHY}, {"slow": WHAT},
        and {} once a second."""
        self._cell = cell
        self._connect_s = settings.connect_s
        self._clock = clock
        self._tell = tell
        self._by_script = settings.acknowledge == BY_SCRIPT
        self.leaving: str | None = None
        """Why the session ends; None while it continues."""
        self.lost = False
        """Robot and cameras need reconnecting after the next acknowledgement."""
        self.consents = 0
        """Scripted acknowledgements since the last complete episode."""
        self._told = self._remind = clock.now()

    def latched(self) -> str | None:
        """Return the latched fault or the connection error; None if the arm may move."""
        try:
            state = self._cell.robot.observe()
            self.look(state)
            return state.fault
        except RobotError as error:
            self.lost = True
            return str(error)

    def look(self, state: RobotState) -> None:
        """Tell the operator if the arm's clock is slow, at most every REMIND_S."""
        if state.slow is not None and self._clock.now() >= self._remind:
            self._remind = self._clock.now() + REMIND_S
            self._tell({"slow": state.slow})

    def until_free(self, problem: str | None) -> None:
        """Return when no fault is latched; a ``problem`` needs an acknowledgement in any case."""
        robot = self._cell.robot
        while problem := self.latched() or problem:
            giver = self.wait_for(ACKNOWLEDGE, problem)
            problem = None
            try:
                if self.lost:
                    self._connect_anew()
                fault = self.latched()
                if giver is None or (
                    giver == SCRIPT and fault is not None and stopped_by_a_person(fault)
                ):
                    continue
                robot.acknowledge(giver)
                until = self._clock.now() + RECOVERY_S
                while (
                    self.latched() == fault is not None
                    and not self.lost
                    and self._clock.now() < until
                ):
                    self.sleep(POLL_S)
            except RobotError as error:
                problem = str(error)

    def _connect_anew(self) -> None:
        robot, cameras = self._cell.robot, self._cell.cameras
        for camera in cameras:
            camera.close()
        robot.close()
        robot.connect(self._connect_s)
        for camera in cameras:
            camera.start()
        self.lost = False

    def wait_for(self, word: str, why: str) -> str | None:
        """Wait for ``word``; return who gave it. None: a latched fault was acknowledged elsewhere.

        A script gives it after CONSENT_S, but never when a person has stopped or paused the arm.
        Raises OperatorLeft, or RobotError after too many scripted acknowledgements.
        """
        self.heard()  # discard words from before the request
        self._tell({"waiting": why, "for": word})
        began = self._clock.now()
        before = self.latched()
        giver = None
        while True:
            fault = self.latched()
            if word in self.heard():
                giver = self._cell.operator.name
                break
            if word == ACKNOWLEDGE and before is not None and fault != before and not self.lost:
                break
            before = fault
            if self._scripted(why, fault) and self._clock.now() - began >= CONSENT_S:
                self.consents += 1
                if self.consents > CONSENTS:
                    raise RobotError(
                        f"{CONSENTS} times in a row, a scripted acknowledgement did not help: {why}"
                    )
                giver = SCRIPT
                break
            self.sleep(POLL_S)
        self._tell({"going_on": why})
        return giver

    def _scripted(self, *reasons: str | None) -> bool:
        """Return whether a script may end a wait for these reasons."""
        return self._by_script and not any(
            reason is not None and stopped_by_a_person(reason) for reason in reasons
        )

    def said(self) -> Sequence[str]:
        """Return the operator's words since the last call; QUIT always takes effect."""
        words = self._cell.operator.words()
        if QUIT in words:
            self.leaving = self.leaving or f"{self._cell.operator.name} said {QUIT}"
        return words

    def heard(self) -> Sequence[str]:
        """The same between episodes. Raises OperatorLeft."""
        words = self.said()
        if self.leaving is not None:
            raise OperatorLeft(self.leaving)
        return words

    def objection(self) -> str | None:
        """Return why an automatic motion must stop, or None. Raises OperatorLeft."""
        self.alive()
        return f"{PAUSED_BY}{self._cell.operator.name}" if PAUSE in self.heard() else None

    def sleep(self, seconds: float) -> None:
        self._clock.sleep_until(self._clock.now() + seconds)
        self.latched()
        self.alive()

    def alive(self) -> None:
        if self._clock.now() - self._told >= 1.0:
            self._told = self._clock.now()
            self._tell({})

"""What happens between episodes at a robot: the arm stands, somebody is waited for, and what was lost is connected anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vla.robot import ACKNOWLEDGE, PAUSE, QUIT, Camera, Person, Robot, RobotError, Scene
from rlinf_vla.rollout.clock import Clock

POLL_S = 0.1
CONSENT_S = 1.0
"""For which a simulated robot stands before a script lets it go on."""
CONSENTS = 5
"""That a script gives in a row, without an episode that went well in between."""
RECOVERY_S = 20.0
"""After which an acknowledgement that has not helped is asked for again."""

Tell = Callable[[dict[str, Any]], None]


class Left(Exception):
    """Nothing more is to be played, and why."""


@dataclass(frozen=True)
class Cell:
    robot: Robot
    cameras: Sequence[Camera]
    scene: Scene
    person: Person


@dataclass(frozen=True)
class Rules:
    """limit: control periods of an episode. dimensions: of actions. patience_s: after which the scene's expert takes over in training;
    None: never. scripted_consent: nobody is waited for, the robot is simulated. connect_s, home_s: that may take so long."""

    limit: int
    dimensions: int
    patience_s: float | None = None
    scripted_consent: bool = False
    connect_s: float = 60.0
    home_s: float = 60.0


class Attendant:
    """Speaks with the robot often enough, and with whoever stands beside it."""

    def __init__(self, cell: Cell, rules: Rules, clock: Clock, tell: Tell) -> None:
        """``tell``: of {"waiting": WHY, "for": WORD}, {"going_on": WHY} and, about once a second, {}."""
        self._cell, self._rules, self._clock, self._tell = cell, rules, clock, tell
        self.leaving: str | None = None
        """Why nothing more is to be played."""
        self.lost = False
        """Robot or camera are to be connected anew, once somebody has acknowledged it."""
        self.consents = 0
        """By script, since an episode last went well."""
        self._told = clock.now()

    def latched(self) -> str | None:
        """What keeps the arm from moving."""
        try:
            return self._cell.robot.observe().fault
        except RobotError as error:
            self.lost = True
            return str(error)

    def until_free(self, problem: str | None) -> None:
        """Returns when nothing is latched. ``problem``: why a person must look even where nothing is."""
        robot, person = self._cell.robot, self._cell.person
        while problem := self.latched() or problem:
            self.wait_for(ACKNOWLEDGE, problem)
            problem = None
            try:
                if self.lost:
                    self._connect_anew()
                robot.acknowledge("a script" if self._rules.scripted_consent else person.name)
                until = self._clock.now() + RECOVERY_S
                while self.latched() is not None and not self.lost and self._clock.now() < until:
                    self.sleep(POLL_S)
            except RobotError as error:
                problem = str(error)

    def _connect_anew(self) -> None:
        robot, cameras = self._cell.robot, self._cell.cameras
        for camera in cameras:
            camera.close()
        robot.close()
        robot.connect(self._rules.connect_s)
        for camera in cameras:
            camera.start()
        self.lost = False

    def wait_for(self, word: str, why: str) -> None:
        """Until a person says it; or, where a fault is latched, until somebody acknowledged it elsewhere. Raises Left."""
        self.heard()  # what she said before she was asked is no answer
        self._tell({"waiting": why, "for": word})
        began, was_latched = self._clock.now(), self.latched() is not None
        while True:
            was_latched |= self.latched() is not None
            if word in self.heard() or (word == ACKNOWLEDGE and was_latched and self.latched() is None):
                break
            if self._rules.scripted_consent and self._clock.now() - began >= CONSENT_S:
                self.consents += 1
                if self.consents > CONSENTS:
                    raise RobotError(f"{CONSENTS} times in a row, nothing was better after an acknowledgement by script: {why}")
                break
            self.sleep(POLL_S)
        self._tell({"going_on": why})

    def said(self) -> Sequence[str]:
        """By the person since the last time; QUIT counts whenever it is said."""
        words = self._cell.person.words()
        if QUIT in words:
            self.leaving = self.leaving or f"{self._cell.person.name} said {QUIT}"
        return words

    def heard(self) -> Sequence[str]:
        """The same while nothing is played. Raises Left."""
        words = self.said()
        self.check_leaving()
        return words

    def objection(self) -> str | None:
        """Why the arm shall not go on with what it does by itself. Raises Left."""
        self.alive()
        return f"paused by {self._cell.person.name}" if PAUSE in self.heard() else None

    def check_leaving(self) -> None:
        if self.leaving is not None:
            raise Left(self.leaving)

    def sleep(self, seconds: float) -> None:
        self._clock.sleep_until(self._clock.now() + seconds)
        self.latched()
        self.alive()

    def alive(self) -> None:
        if self._clock.now() - self._told >= 1.0:
            self._told = self._clock.now()
            self._tell({})

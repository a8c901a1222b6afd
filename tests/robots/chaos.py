"""Fault injection: the arm moves, a fault occurs at a random moment, and the same conditions must hold each time.

The same rounds run with the real franky against franky-sim and, exactly, on a virtual clock: player, control loop, servo,
safety filter and files are those of a session.
"""

from __future__ import annotations

import math
import os
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vla.config.robot import ControlConfig, SessionConfig
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.episode import TRAINING, Job, RobotEpisode
from rlinf_vla.features.realworld.inference import Chunk, Infer, InferenceWorker, Request
from rlinf_vla.features.realworld.operator_session import Cell
from rlinf_vla.features.realworld.player import RobotPlayer
from rlinf_vla.features.realworld.robot import (
    ACKNOWLEDGE,
    CONTACTS,
    Action,
    Camera,
    Robot,
    RobotState,
)
from rlinf_vla.robots.cell import Cell as Limits

ROUNDS = int(os.environ.get("ROBOT_CHAOS", "0"))
"""Rounds of each fault; 0: the default of the suite. ``make robot-chaos`` makes it 100."""
STRICT = "ROBOT_CHAOS_PAGE" in os.environ
"""On an idle machine, real rounds must meet the stated times; otherwise they share their cores with other tests."""
CAMERA_S = 0.1
"""Maximum seconds between two images."""
CHUNK = 8
"""Actions of a chunk of the policy on a server."""
GARBAGE = r"policy: (the policy server |ws://|\d+ control steps in a row without a command; the policy has not answered)"


@dataclass(frozen=True)
class Fault:
    """latched: start of its name, a regular expression; None: nothing may happen. notice: seconds until the arm starts to stop at the
    latest, of the cell's limits and of what a camera may."""

    latched: str | None
    notice: Callable[[Limits, CameraLimits], float]


@dataclass(frozen=True)
class CameraLimits:
    max_age_s: float
    frozen_s: float


def _at_once(limits: Limits, cameras: CameraLimits) -> float:
    return 0.0


def _next_tick(limits: Limits, cameras: CameraLimits) -> float:
    """Periods of the control loop and of the servo."""
    return 1 / limits.control_hz + 1 / limits.servo_hz


def _old_observation(limits: Limits, cameras: CameraLimits) -> float:
    """The rest of the chunk is executed, but no action of an observation that is too old."""
    return ControlConfig().max_observation_age_s + 1.5 / limits.control_hz + 1 / limits.servo_hz


def _old_state(limits: Limits, cameras: CameraLimits) -> float:
    return limits.max_state_age_s + 1 / limits.servo_hz


FAULTS = {
    "udp_silence": Fault("network: no state of the arm for", _old_state),
    "tcp_close": Fault("network: ", _old_state),
    "silent": Fault("network: no state of the arm for", _old_state),
    "reflex": Fault("reflex: joint_reflex", _at_once),
    "user_stop": Fault("user stop: ", _at_once),
    "gripper": Fault("gripper: ", lambda *of: 2 * _next_tick(*of)),
    "frozen_camera": Fault(
        "policy: camera front: frozen",
        lambda of, cameras: cameras.frozen_s + CAMERA_S + _next_tick(of, cameras),
    ),
    "lost_camera": Fault(
        "policy: camera front: its newest picture is",
        lambda of, cameras: cameras.max_age_s + _next_tick(of, cameras),
    ),
    "stalled_policy": Fault(
        "policy: .* control steps in a row without a command", lambda *of: 2 * _next_tick(*of)
    ),
    "nan": Fault(r"policy: the policy asked for \[nan", _next_tick),
    "jump": Fault(r"policy: the policy asked for \[5\d", _next_tick),
    "clock_step": Fault(None, _at_once),
}
SERVER_FAULTS = {
    "killed_server": Fault(
        "policy: the policy server .* does not answer", lambda *of: 2 * _next_tick(*of)
    ),
    "stalled_server": Fault(
        "policy: .* control steps in a row without a command; the policy has not answered",
        _old_observation,
    ),
    "replaced_server": Fault(GARBAGE, _old_observation),
    "cut_server": Fault(
        "policy: .* control steps in a row without a command; the policy has not answered",
        _old_observation,
    ),
}
"""The policy is on a server: killed, stopped, replaced by one that sends garbage, or its network falls silent."""
ALL_FAULTS = FAULTS | SERVER_FAULTS
IN_CI = {"udp_silence", "lost_camera", "stalled_policy", "killed_server"}
"""In real time, one of each kind: robot, camera, policy, server. test_chaos_exact.py runs all of them in virtual time."""


@dataclass(frozen=True)
class Round:
    fault: str
    where: str
    stood_s: float
    """Seconds from the fault until the arm stopped; NaN if it had to continue."""
    stated_s: float
    wrong: str | None


class Circling:
    """The policy's actions: the tool moves in a circle, and the fingers may close."""

    def __init__(self, spec: Any, chunk: int) -> None:
        self._period = 1 / spec.control_hz
        self._metre = 1 / spec.space.translation_m
        self._chunk = chunk
        self.asks: str | None = None
        self.gripper = 1.0

    def __call__(self, request: Request) -> Chunk:
        angles = math.pi * self._period * (request.tick + np.arange(self._chunk))
        actions = np.stack(
            [0.8 * np.sin(angles), 0.8 * np.cos(angles), 0 * angles, 0 * angles + self.gripper], 1
        ).astype(np.float32)
        if self.asks == "nan":
            actions[:, 0] = math.nan
        elif self.asks == "jump":
            actions[:, 0] = 1.02 * self._metre
        return Chunk(request, actions)


class Nothing:
    """A scene without a task, and an operator who acknowledges all requests; there is none during an episode."""

    task = "Circle"
    by_hand = False
    has_expert = False
    name = "tester"
    instructions = ()

    def arrange(self, seed: int) -> str:
        return "go round"

    def succeeded(self, state: RobotState) -> bool | None:
        return False

    def expert(self, state: RobotState) -> Action | None:
        return None

    def action(self, hand: float) -> Action | None:
        return None

    def words(self) -> list[str]:
        return [ACKNOWLEDGE]

    def close(self) -> None: ...


class Chaos(ABC):
    """One cell, one player, one fault in each episode."""

    where: str
    still: float
    """Speed below which the arm counts as stopped, in the unit of ``trajectory``."""
    settle_s: float
    """Seconds that the arm oscillates after its command has stopped."""
    patience = 1.0
    """Factor on the stated time: above 1 if cores are shared with other tests."""
    chunk = 1
    warmup = 0

    def __init__(
        self,
        robot: Robot,
        cameras: Sequence[Camera],
        background: Callable[[Infer], InferenceWorker],
        clock: Clock,
        folder: Path,
        limits: Limits,
        cameras_may: CameraLimits,
    ) -> None:
        self.robot = robot
        self.clock = clock
        self.folder = folder
        self.limits = limits
        self.cameras_may = cameras_may
        self.policy: Any = Circling(robot.spec, self.chunk)
        """Answers a request with a chunk."""
        nothing = Nothing()
        self.told: list[dict[str, Any]] = []
        self.player = RobotPlayer(
            Cell(robot, cameras, nothing, nothing),
            background(self._infer),
            ControlConfig(warmup=self.warmup),
            SessionConfig(),
            40,
            (self.chunk, 4),
            clock,
            tell=self._hear,
        )
        self._number = 0
        self._latched: str | None = None
        """Start of the reason that stopped the last episode."""
        self._pending: tuple[float, str] | None = None
        self._began = self._injected = self._called = math.nan

    @abstractmethod
    def trajectory(self) -> list[tuple[float, float]]:
        """(when, how fast) since the last call of ``forget``."""

    @abstractmethod
    def forget(self) -> None: ...

    @abstractmethod
    def at(self, moment: float, event: Callable[[], None]) -> None: ...

    @abstractmethod
    def inject(self, fault: str) -> None:
        """A fault that the policy does not cause."""

    @abstractmethod
    def fix(self, fault: str) -> None:
        """Removes the cause."""

    def _hear(self, message: dict[str, Any]) -> None:
        self.told += [message] if message else []
        if (
            message.get("for") == ACKNOWLEDGE
            and self._pending is not None
            and not math.isnan(self._injected)
        ):
            self.fix(
                self._pending[1]
            )  # the episode had no action and is repeated: the operator removes the cause before acknowledging

    def stated_s(self, fault: str) -> float:
        return (
            ALL_FAULTS[fault].notice(self.limits, self.cameras_may)
            + self.limits.stop_time_s
            + self.settle_s
        )

    def rounds(self, fault: str, count: int) -> list[Round]:
        """A final episode is undisturbed. A failed round is reported, and the next one follows."""
        found = []
        for number in range(count):
            delay = random.Random(f"{fault} {number}").uniform(0.4, 1.0)
            stood = math.nan
            wrong = None
            try:
                stood = self._round(fault, delay)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            finally:
                self.fix(fault)
            found.append(Round(fault, self.where, stood, self.stated_s(fault), wrong))
        self._pending = None
        last = self._play()
        assert last.ended == "time is up" and not last.fault, last.ended
        return found

    def _round(self, fault: str, delay: float) -> float:
        self._injected = math.nan
        self._pending = (delay, fault)
        episode = self._play()
        latched = ALL_FAULTS[fault].latched
        before = [
            speed
            for when, speed in self.trajectory()
            if self._injected - 0.5 < when < self._injected
        ]
        assert before and max(before) > self.still, "the arm moved at the time of the fault"
        until = self._began + float(episode.tick[-1]) / self.limits.control_hz
        assert until >= self._injected - 2 / self.limits.control_hz, (
            "the data until the fault is on the disk"
        )
        if latched is None:
            assert episode.ended == "time is up" and not episode.fault, episode.ended
            assert self.robot.observe().fault is None
            return math.nan
        assert episode.fault and episode.terminated == episode.ended.startswith(CONTACTS), (
            episode.ended
        )
        self._wait_standing(self.stated_s(fault))
        after = [(when, speed) for when, speed in self.trajectory() if when >= self._injected]
        assert after[-1][0] > self._injected + self.stated_s(fault), "it was observed long enough"
        stood = (
            max((when for when, speed in after if speed > self.still), default=self._injected)
            - self._injected
        )
        assert stood <= self.patience * self.stated_s(fault), (
            f"it stopped after {stood:.2f} s; the bound is {self.stated_s(fault):.2f} s"
        )
        self._named(latched)
        self.fix(fault)
        self.wait(self.clock.now() + 0.2)
        self._named(latched)
        self._latched = latched
        return stood

    def _named(self, latched: str) -> None:
        """No code has cleared it."""
        found = self.robot.observe().fault
        assert found is not None and re.match(latched, found), found

    def _play(self) -> RobotEpisode:
        """Any earlier stop was acknowledged, and the request names it."""
        self._number += 1
        self._began = math.nan
        self._called = self.clock.now()
        self.told.clear()
        job = Job(TRAINING, self._number, self._number)
        kept = list[Path]()
        self.player.play(job, lambda episode: kept.append(episode.write(self.folder)))
        waits = [message["waiting"] for message in self.told if message.get("for") == ACKNOWLEDGE]
        if self._latched is not None:
            assert waits and re.match(self._latched, waits[0]), (
                f"{waits}: the operator sees what is acknowledged"
            )
        self._latched = None
        return RobotEpisode.read(kept[0])

    def _infer(self, request: Request) -> Chunk:
        stalled_before = request.seen.time < self._called
        if math.isnan(self._began) and not stalled_before:
            self._began = self.clock.now()
            self.forget()
            if self._pending is not None:
                delay, fault = self._pending
                self.at(self._began + delay, lambda: self._happen(fault))
        return self.policy(request)

    def _happen(self, fault: str) -> None:
        self._injected = self.clock.now()
        self.inject(fault)

    def _wait_standing(self, stated_s: float) -> None:
        """Longer than stated only while it moves, with a larger time limit."""
        self.wait(max(self.clock.now(), self._injected + stated_s) + 0.2)
        while (
            self.clock.now() < self._injected + self.patience * stated_s
            and max(speed for _, speed in self.trajectory()[-40:]) > self.still
        ):
            self.wait(self.clock.now() + 0.1)

    def wait(self, until: float) -> None:
        """As a session does between episodes."""
        while self.clock.now() < until:
            self.clock.sleep_until(min(until, self.clock.now() + 0.1))
            self.player.rest()

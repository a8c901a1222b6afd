"""Plays episodes at a robot: home, layout, control loop; what goes wrong is kept as far as it came, and waits for a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.robot import ACKNOWLEDGE, FAILURE, PAUSE, QUIT, RESUME, SUCCESS, Action, Camera, Person, Robot, RobotError, Scene
from rlinf_vla.rollout.background import Background
from rlinf_vla.rollout.clock import Clock
from rlinf_vla.rollout.control_config import ControlConfig
from rlinf_vla.rollout.control_loop import ControlLoop
from rlinf_vla.rollout.control_step import CAMERA, FINISHED, Step
from rlinf_vla.rollout.rewarded import own_reward
from rlinf_vla.rollout.robot_episode import DEMONSTRATION, EVALUATION, TRAINING, Job, RobotEpisode
from rlinf_vla.rollout.robot_take import Take
from rlinf_vla.types import Observation, StepResult

POLL_S = 0.1
SETTLE_S = 0.3
"""After the layout: things come to rest, and pictures show them."""
CONSENT_S = 1.0
"""For which a simulated robot stands before a script lets it go on."""
CONSENTS = 5
"""That a script gives in a row, without an episode that went well in between."""
RECOVERY_S = 20.0
"""After which an acknowledgement that has not helped is asked for again."""

Score = Callable[[Observation, Tensor, StepResult], StepResult]
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


class RobotPlayer:
    """The robot is connected, the cameras have started. ``leave`` may be called from any thread."""

    def __init__(
        self,
        cell: Cell,
        background: Background,
        control: ControlConfig,
        rules: Rules,
        clock: Clock,
        score: Score = own_reward,
        tell: Tell = lambda message: None,
    ) -> None:
        """``score``: what training steps are worth, see ``rewarded.Worth``. ``tell``: of {"waiting": WHY, "for": WORD}, {"going_on": WHY}
        and, about once a second, {}."""
        self._cell, self._rules, self._clock, self._score, self._tell = cell, rules, clock, score, tell
        self._background = background
        self._loop = ControlLoop(cell.robot, cell.cameras, background, 1, control, clock, self._takeover)
        self.accounting = self._loop.accounting
        self._take = Take(Job(TRAINING, 0, 0), "", "", 0.0)
        self._leaving: str | None = None
        self._warm = self._lost = False
        self._consents = 0
        self._told = clock.now()

    def leave(self, reason: str) -> None:
        """The episode under way is cut, and nothing else is played."""
        self._leaving = reason

    def rest(self) -> None:
        """Called at least twice a second while nothing is played: a robot stops where nobody says anything any more."""
        self._latched()

    def play(self, job: Job, keep: Callable[[RobotEpisode], None], weights: int = 0) -> None:
        """``keep`` gets the episode, also where the policy failed in it, and raises. Where something else went wrong in an episode, or a
        person paused, a training episode is what it is, cut, and another is played again. ``weights``: the policy's version.

        Raises Left; and RobotError where consent by script does not help.
        """
        self._background.settle(self._clock.now() + self._rules.home_s)
        problem: str | None = None
        while True:
            self._check_leaving()
            self._until_free(problem)
            try:
                instruction = self._lay_out(job)
            except RobotError as error:
                problem = str(error)
                continue
            self._take = Take(job, self._cell.scene.task, instruction, self._clock.now())
            try:
                ended = self._loop.run(instruction, self._after_step)
            except BaseException as error:
                if self._take.seen_something:
                    keep(self._take.episode(f"{type(error).__name__}: {error}", True, weights))
                raise
            problem = ended.detail if ended.kind != FINISHED else None
            self._lost |= ended.kind == CAMERA
            paused = ended.detail == PAUSE
            whole = problem is None and not paused and self._leaving is None
            self._consents = 0 if whole else self._consents
            done = (whole or job.kind == TRAINING) and self._take.seen_something
            if done:
                keep(self._take.episode(ended.detail, problem is not None, weights))
            if paused:
                self._wait_for(RESUME, f"paused by {self._cell.person.name}")
            if done:
                return

    def _lay_out(self, job: Job) -> str:
        robot, scene = self._cell.robot, self._cell.scene
        robot.home(self._rules.home_s)
        instruction = scene.arrange(job.seed)
        if scene.by_hand:
            self._wait_for(RESUME, f"lay out episode {job.number + 1}: {instruction}")
        self._sleep(SETTLE_S)
        if not self._warm:
            self._loop.warm_up(instruction)
            self._warm = True
        return instruction

    def _takeover(self) -> Action | None:
        job, scene, rules = self._take.job, self._cell.scene, self._rules
        helping = rules.patience_s is not None and self._clock.now() - self._take.began >= rules.patience_s
        if job.scripted or (job.kind == TRAINING and helping):
            return scene.expert(self._cell.robot.observe())
        found = self._cell.person.action()
        return stand_still(rules.dimensions) if found is None and job.kind == DEMONSTRATION else found

    def _after_step(self, step: Step) -> str | None:
        self._alive()
        take, words = self._take, self._cell.person.words()
        take.look(step)
        if reason := self._judged(step, words):
            return reason
        if self._leaving is not None:
            return self._leaving
        for word in (QUIT, PAUSE):
            if word in words:
                self._leaving = f"{self._cell.person.name} said {QUIT}" if word == QUIT else None
                return word
        if take.job.kind == EVALUATION and step.human:
            take.terminated = True
            return f"{self._cell.person.name} took over"
        if step.tick >= self._rules.limit:
            return "time is up"
        take.act(step)
        return None

    def _judged(self, step: Step, words: Sequence[str]) -> str | None:
        """What came of the action before this observation; a reason to end the episode."""
        take, own = self._take, self._cell.scene.succeeded(step.seen.state)
        take.success = bool(own) or SUCCESS in words
        take.terminated = take.success or FAILURE in words
        if take.before is None:
            return "at once" if take.terminated else None
        reward = float(take.success)
        if self._score is not own_reward and (take.job.kind == TRAINING or own is None):
            scored = self._scored(step, reward)
            reward, over = float(scored.reward), bool(scored.terminated)
            take.success |= own is None and over and reward > 0 and FAILURE not in words
            take.terminated = over
        take.reward(reward)
        return ("success" if take.success else "failure") if take.terminated else None

    def _scored(self, step: Step, reward: float) -> StepResult:
        take = self._take
        assert take.before is not None
        over, success, no = (torch.tensor([[each]]) for each in (take.terminated, take.success, False))
        seen = step.seen.observation(take.instruction)
        result = StepResult(seen, torch.tensor([[reward]]), over, no, success, ~no)
        return self._score(take.before.observation(take.instruction), take.last_action[None, None], result)

    def _latched(self) -> str | None:
        """What keeps the arm from moving."""
        try:
            return self._cell.robot.observe().fault
        except RobotError as error:
            self._lost = True
            return str(error)

    def _until_free(self, problem: str | None) -> None:
        """Returns when nothing is latched. ``problem``: why a person must look even where nothing is."""
        robot, person = self._cell.robot, self._cell.person
        while problem := self._latched() or problem:
            self._wait_for(ACKNOWLEDGE, problem)
            problem = None
            try:
                if self._lost:
                    self._connect_anew()
                robot.acknowledge("a script" if self._rules.scripted_consent else person.name)
                until = self._clock.now() + RECOVERY_S
                while self._latched() is not None and not self._lost and self._clock.now() < until:
                    self._sleep(POLL_S)
            except RobotError as error:
                problem = str(error)

    def _connect_anew(self) -> None:
        robot, cameras = self._cell.robot, self._cell.cameras
        for each in (*cameras, robot):
            each.close()
        robot.connect(self._rules.connect_s)
        for camera in cameras:
            camera.start()
        self._lost = False

    def _wait_for(self, word: str, why: str) -> None:
        """Until a person says it; or, where a fault is latched, until somebody acknowledged it elsewhere. Raises Left."""
        self._tell({"waiting": why, "for": word})
        began, was_latched = self._clock.now(), self._latched() is not None
        while True:
            words = self._cell.person.words()
            if QUIT in words:
                self._leaving = f"{self._cell.person.name} said {QUIT}"
            self._check_leaving()
            if word in words or (word == ACKNOWLEDGE and was_latched and self._latched() is None):
                break
            if self._rules.scripted_consent and self._clock.now() - began >= CONSENT_S:
                self._consents += 1
                if self._consents > CONSENTS:
                    raise RobotError(f"{CONSENTS} times in a row, nothing was better after an acknowledgement by script: {why}")
                break
            self._sleep(POLL_S)
        self._tell({"going_on": why})

    def _check_leaving(self) -> None:
        if self._leaving is not None:
            raise Left(self._leaving)

    def _sleep(self, seconds: float) -> None:
        self._clock.sleep_until(self._clock.now() + seconds)
        self._latched()
        self._alive()

    def _alive(self) -> None:
        if self._clock.now() - self._told >= 1.0:
            self._told = self._clock.now()
            self._tell({})


def stand_still(dimensions: int) -> Action:
    """The action that moves nothing, with the gripper open."""
    return np.array([0.0] * (dimensions - 1) + [1.0], np.float32)

"""Plays episodes at a robot: home, layout, control loop; what goes wrong is kept as far as it came, and waits for a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.robot import FAILURE, PAUSE, QUIT, RESUME, SUCCESS, Action, CameraError, RobotError
from rlinf_vla.rollout.background import Background
from rlinf_vla.rollout.clock import Clock
from rlinf_vla.rollout.control_config import ControlConfig
from rlinf_vla.rollout.control_loop import ControlLoop
from rlinf_vla.rollout.control_step import CAMERA, FINISHED, Step
from rlinf_vla.rollout.rewarded import own_reward
from rlinf_vla.rollout.robot_attendant import POLL_S, Attendant, Cell, Rules, Tell
from rlinf_vla.rollout.robot_episode import DEMONSTRATION, EVALUATION, TRAINING, Job, RobotEpisode
from rlinf_vla.rollout.robot_spool import Spool
from rlinf_vla.rollout.robot_take import Take
from rlinf_vla.types import Observation, StepResult

SETTLE_S = 0.3
"""After the layout: things come to rest, and pictures show them."""
OPEN = 1.0
"""Of an action's last number: the hand."""

Result = TypeVar("Result")
Score = Callable[[Observation, Tensor, StepResult], StepResult]


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
        under_way: Path | None = None,
    ) -> None:
        """``score``: what training steps are worth, see ``rewarded.Worth``. ``tell``: see :class:`Attendant`. ``under_way``: the file of
        the episode that is being played."""
        self._cell, self._rules, self._clock, self._score = cell, rules, clock, score
        self._attendant = Attendant(cell, rules, clock, tell)
        self._background = background
        self._loop = ControlLoop(cell.robot, cell.cameras, background, 1, control, clock, self._takeover)
        self.accounting = self._loop.accounting
        self._spool = Spool(under_way)
        self._take = Take(Job(TRAINING, 0, 0), "", "", 0.0, self._spool)
        self._warm = False
        self._hand = OPEN
        """As it was last told in this episode."""
        self._paused = False
        """In this episode."""

    def leave(self, reason: str) -> None:
        """The episode under way is cut, and nothing else is played."""
        self._attendant.leaving = reason

    def rest(self) -> None:
        """Called at least twice a second while nothing is played: a robot stops where nobody says anything any more. Raises Left."""
        self._attendant.latched()
        self._attendant.alive()
        self._paused_early()

    def play(self, job: Job, keep: Callable[[RobotEpisode], None], weights: int = 0) -> None:
        """``keep`` gets the episode, also where the policy failed in it, and raises. Where something else went wrong, a training episode
        is what it is, cut; an evaluation has failed; a demonstration is played again. Where a person paused, all but training is played
        again; and so is, evaluations excepted, an episode without an action. ``weights``: the policy's version.

        Raises Left; and RobotError where consent by script does not help.
        """
        self._background.settle(self._clock.now() + self._rules.home_s)
        problem: str | None = None
        while True:
            self._paused_early()
            self._attendant.until_free(problem)
            try:
                instruction = self._lay_out(job)
            except RobotError as error:
                problem = str(error)
                self._attendant.lost |= isinstance(error, CameraError)  # in the warm-up
                continue
            self._paused_early()
            task = self._cell.scene.task
            self._spool.begin(job, task, instruction, weights)
            self._take, self._hand, self._paused = Take(job, task, instruction, self._clock.now(), self._spool), OPEN, False
            self._cell.person.action(OPEN)  # the hand's button counts in the episode only
            try:
                ended = self._loop.run(instruction, self._after_step)
            except BaseException as error:
                if len(self._take):
                    self._keep(keep, f"{type(error).__name__}: {error}", True, weights)
                raise
            problem = ended.detail if ended.kind != FINISHED else None
            self._attendant.lost |= ended.kind == CAMERA
            # from no action at all there is nothing to learn
            something = self._take.seen_something if job.kind == EVALUATION else len(self._take) > 0
            cut = not self._take.terminated and (self._paused or self._attendant.leaving is not None)
            whole = problem is None and something and not cut
            self._attendant.consents = 0 if whole else self._attendant.consents
            # were a fault in an evaluation played again, a policy that pushes too hard would be forgiven until it does not
            failed = job.kind == EVALUATION and problem is not None
            done = (whole or failed or job.kind == TRAINING) and something
            if done:
                self._keep(keep, ended.detail, problem is not None, weights)
            if self._paused:
                self._until_resumed()
            if done:
                return
            if problem is None and not (something or self._paused):
                problem = f"nothing was done in the episode: {ended.detail}"

    def _keep(self, keep: Callable[[RobotEpisode], None], ended: str, fault: bool, weights: int) -> None:
        def write() -> None:
            keep(self._take.episode(ended, fault, weights))
            self._spool.end()

        self.meanwhile(write)

    def meanwhile(self, work: Callable[[], Result]) -> Result:
        """``work()`` in a thread: the robot stops where nobody says anything for long, and a disk may be slow."""
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            while not wait([working], POLL_S).done:
                self._attendant.latched()
            return working.result()

    def _paused_early(self) -> None:
        """Words before an episode do not count, except those that keep the arm from moving."""
        if PAUSE in self._attendant.heard():
            self._until_resumed()

    def _until_resumed(self) -> None:
        self._attendant.wait_for(RESUME, f"paused by {self._cell.person.name}")

    def _lay_out(self, job: Job) -> str:
        robot, scene = self._cell.robot, self._cell.scene
        robot.home(self._rules.home_s, self._attendant.objection)
        instruction = scene.arrange(job.seed)
        if scene.by_hand:
            self._attendant.wait_for(RESUME, f"lay out episode {job.number + 1}: {instruction}")
        self._attendant.sleep(SETTLE_S)
        if not self._warm:
            self._loop.warm_up(instruction)
            self._warm = True
        return instruction

    def _takeover(self) -> Action | None:
        job, scene, rules = self._take.job, self._cell.scene, self._rules
        helping = rules.patience_s is not None and self._clock.now() - self._take.began >= rules.patience_s
        found = self._cell.person.action(self._hand)
        if found is None and (job.scripted or (job.kind == TRAINING and helping)):
            found = scene.expert(self._cell.robot.observe())
        if found is not None:
            self._hand = float(found[-1])
        elif job.scripted or job.kind == DEMONSTRATION:  # which is never the policy's
            found = np.array([0.0] * (rules.dimensions - 1) + [self._hand], np.float32)  # what is held stays held
        return found

    def _after_step(self, step: Step) -> str | None:
        self._attendant.alive()
        take, words = self._take, self._attendant.said()
        take.look(step)
        if step.action is not None:
            self._hand = float(step.action[-1])
        self._paused |= PAUSE in words
        if reason := self._judged(step, words):
            return reason
        if self._attendant.leaving is not None:
            return QUIT if QUIT in words else self._attendant.leaving
        if self._paused:
            return PAUSE
        if take.job.kind == EVALUATION and step.human:
            take.terminated = True
            return f"{self._cell.person.name} took over"
        if step.tick >= self._rules.limit:
            return "time is up"
        take.act(step)
        return None

    def _judged(self, step: Step, words: Sequence[str]) -> str | None:
        """What came of the action before this observation; a reason to end the episode."""
        take = self._take
        if take.before is None:
            return None
        own = self._cell.scene.succeeded(step.seen.state)
        take.success = bool(own) or SUCCESS in words
        take.terminated = take.success or FAILURE in words
        reward = float(take.success)
        judged = SUCCESS in words or FAILURE in words  # what a person says, nobody knows better
        if self._score is not own_reward and not judged and (take.job.kind == TRAINING or own is None):
            scored = self._scored(step, reward)
            reward, over = float(scored.reward), bool(scored.terminated)
            take.success |= own is None and over and reward > 0
            take.terminated = over
        take.reward(reward)
        return ("success" if take.success else "failure") if take.terminated else None

    def _scored(self, step: Step, reward: float) -> StepResult:
        take = self._take
        assert take.before is not None
        time_is_up = step.tick >= self._rules.limit and not take.terminated
        over, success, cut, yes = (torch.tensor([[each]]) for each in (take.terminated, take.success, time_is_up, True))
        seen = step.seen.observation(take.instruction)
        result = StepResult(seen, torch.tensor([[reward]]), over, cut, success, yes)
        return self._score(take.before.observation(take.instruction), take.last_action[None, None], result)

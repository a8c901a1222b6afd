"""Run robot episodes: home, lay out the scene, run the control loop; keep what faults cut short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rlinf_vla.config.robot import ControlConfig, SessionConfig
from rlinf_vla.core.types import Observation, StepResult
from rlinf_vla.features.realworld.action_space import OPEN
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_loop import (
    CAMERA,
    FINISHED,
    MISSED,
    UNANSWERED,
    ControlLoop,
    Step,
)
from rlinf_vla.features.realworld.episode import (
    DEMONSTRATION,
    EVALUATION,
    TRAINING,
    Job,
    RobotEpisode,
)
from rlinf_vla.features.realworld.inference import InferenceWorker, Unanswered
from rlinf_vla.features.realworld.operator_session import POLL_S, Cell, OperatorSession, Tell
from rlinf_vla.features.realworld.recorder import EpisodeJournal, EpisodeRecorder
from rlinf_vla.features.realworld.robot import (
    FAILURE,
    PAUSE,
    PAUSED_BY,
    QUIT,
    RESUME,
    SUCCESS,
    Action,
    CameraError,
    RobotError,
)
from rlinf_vla.rollout.reward_shaping import env_reward

SETTLE_S = 0.3
"""Seconds after the layout, until objects rest and cameras show them."""

Result = TypeVar("Result")
Score = Callable[[Observation, Tensor, StepResult], StepResult]


class RobotPlayer:
    """Run episodes at a connected robot with started cameras. ``leave`` is thread-safe."""

    def __init__(
        self,
        cell: Cell,
        background: InferenceWorker,
        control: ControlConfig,
        settings: SessionConfig,
        limit: int,
        size: tuple[int, int],
        clock: Clock,
        score: Score = env_reward,
        tell: Tell = lambda message: None,
        journal_path: Path | None = None,
    ) -> None:
        """``limit``: control periods per episode. ``size``: actions per chunk, numbers per action.

        ``score``: rewards of training steps, see :class:`RewardShaper`. ``tell``: see
        :class:`OperatorSession`. ``journal_path``: journal file of the current episode."""
        chunk, self._dimensions = size
        self._cell = cell
        self._settings = settings
        self._limit = limit
        self._clock = clock
        self._score = score
        self._operator_session = OperatorSession(cell, settings, clock, tell)
        self._background = background
        self._loop = ControlLoop(
            cell.robot, cell.cameras, background, chunk, control, clock, self._takeover
        )
        self.accounting = self._loop.accounting
        self.journal = EpisodeJournal(journal_path)
        """Of the current episode."""
        self._recorder = EpisodeRecorder(Job(TRAINING, 0, 0), "", "", 0.0, self.journal)
        self.warm = False
        """The policy has answered since the beginning, or since it last did not."""
        self._last: Action | None = None
        """Last action in this episode."""
        self._unused: Action | None = None
        """The expert's, which came after its period: offered again, or a replay would lose it."""
        self._paused = self._shown = False
        """The operator paused this episode; the expert of a scripted one has no more actions."""

    def leave(self, reason: str) -> None:
        """Cut the current episode and end the session."""
        self._operator_session.leaving = reason

    def rest(self) -> None:
        """Keep the robot alive between episodes. Raises OperatorLeft.

        Call it at least twice a second: the robot stops when its client is silent.
        """
        self._operator_session.latched()
        self._operator_session.alive()
        self._paused_early()

    def play(self, job: Job, keep: Callable[[RobotEpisode], None], weights: int = 0) -> None:
        """Run an episode and pass it to ``keep``; ``weights``: version of the policy's weights.

        If the policy raises an error, the episode is kept and the error raised. After a fault, also
        that of a policy's server, a training episode is kept (as truncated, or after one of
        CONTACTS as terminated), an evaluation counts as failed, and a demonstration is repeated. A
        paused episode is repeated unless it is for training. A training episode or
        demonstration without an action is repeated.

        Raises OperatorLeft; RobotError if scripted acknowledgements do not help.
        """
        problem: str | None = None
        while True:
            self._paused_early()
            self._operator_session.until_free(problem)
            try:
                self._settle()
                instruction = self._lay_out(job)
            except (RobotError, Unanswered) as error:
                problem = str(error)
                self._operator_session.lost |= isinstance(error, CameraError)  # during the warm-up
                continue
            self._paused_early()
            task = self._cell.scene.task
            self.journal.begin(job, task, instruction, weights)
            self._recorder = EpisodeRecorder(
                job, task, instruction, self._clock.now(), self.journal
            )
            self._last = None
            self._unused = None
            self._paused = False
            self._shown = False
            self._cell.operator.action(OPEN)  # discard earlier presses of the gripper button
            try:
                ended = self._loop.run(instruction, self._after_step)
            except BaseException as error:
                if len(self._recorder):
                    self._keep(keep, f"{type(error).__name__}: {error}", True, weights)
                raise
            if (
                ended.last is not None and self._recorder.seen_something
            ):  # otherwise no step of the policy led to it
                self._recorder.look(ended.last)
            problem = ended.detail if ended.kind != FINISHED else None
            self._operator_session.lost |= ended.kind == CAMERA
            self.warm &= ended.kind not in (
                MISSED,
                UNANSWERED,
            )  # it must answer before the arm moves again
            # an episode without any action contains nothing to learn from
            something = self._recorder.seen_something if job.judged else len(self._recorder) > 0
            cut = not self._recorder.terminated and (
                self._paused or self._operator_session.leaving is not None
            )
            whole = problem is None and something and not cut
            self._operator_session.consents = 0 if whole else self._operator_session.consents
            # repeating a faulty evaluation would forgive policies that push too hard
            failed = job.judged and problem is not None
            done = (whole or failed or job.kind == TRAINING) and something
            if done:
                self._keep(keep, ended.detail, problem is not None, weights)
            if self._paused:
                self._until_resumed()
            if done:
                return
            if problem is None and not (something or self._paused):
                problem = f"no action was executed in the episode: {ended.detail}"

    def _keep(
        self, keep: Callable[[RobotEpisode], None], ended: str, fault: bool, weights: int
    ) -> None:
        def write() -> None:
            keep(self._recorder.episode(ended, fault, weights))
            self.journal.end()

        self.meanwhile(write)

    def meanwhile(self, work: Callable[[], Result]) -> Result:
        """Run ``work()`` in a thread and poll the robot, which stops if its client is silent."""
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            while not wait([working], POLL_S).done:
                self._operator_session.latched()
            return working.result()

    def _paused_early(self) -> None:
        """Discard words from before an episode, except those that keep the arm from moving."""
        if PAUSE in self._operator_session.heard():
            self._until_resumed()

    def _until_resumed(self) -> None:
        self._operator_session.wait_for(RESUME, f"{PAUSED_BY}{self._cell.operator.name}")

    def _lay_out(self, job: Job) -> str:
        robot, scene = self._cell.robot, self._cell.scene
        robot.home(self._settings.home_s, self._operator_session.objection)
        instruction = scene.arrange(job.seed)
        if scene.by_hand:
            self._operator_session.wait_for(
                RESUME, f"lay out episode {job.number + 1}: {instruction}"
            )
        self._operator_session.sleep(SETTLE_S)
        if not self.warm:
            self._loop.warm_up(instruction, self.rest)
            self.warm = True
        return instruction

    def _settle(self) -> None:
        """Wait until no inference of an earlier episode runs. Raises RobotError."""
        until = self._clock.now() + self._settings.home_s
        while not self._background.settle(self._clock.now() + POLL_S):
            if self._clock.now() >= until:
                raise RobotError(f"the policy has not answered for {self._settings.home_s:g} s")
            self.rest()

    def _takeover(self) -> Action | None:
        job, robot, patience_s = self._recorder.job, self._cell.robot, self._settings.patience_s
        helping = patience_s is not None and self._clock.now() - self._recorder.began >= patience_s
        action = self._cell.operator.action(OPEN if self._last is None else float(self._last[-1]))
        if action is None and (job.scripted or (job.kind == TRAINING and helping)):
            if self._unused is None:
                self._unused = self._cell.scene.expert(robot.observe())
            action = self._unused
            self._shown = job.scripted and action is None and self._cell.scene.has_expert
        if action is not None:
            self._last = action
        elif job.scripted or job.kind == DEMONSTRATION:  # the policy never acts in these
            action = robot.spec.space.hold(
                self._dimensions, self._last, robot.observe().joints
            )  # keep holding a grasped object
        return action

    def _after_step(self, step: Step) -> str | None:
        self._operator_session.alive()
        self._operator_session.look(step.seen.state)
        take = self._recorder
        words = self._operator_session.said()
        take.look(step)
        if step.action is not None:
            self._last = step.action
            self._unused = None
        self._paused |= PAUSE in words
        if reason := self._judged(step, words):
            return reason
        if self._operator_session.leaving is not None:
            return QUIT if QUIT in words else self._operator_session.leaving
        if self._paused:
            return PAUSE
        if take.job.kind == EVALUATION and step.human:
            take.terminated = True
            return f"{self._cell.operator.name} took over"
        if self._shown:
            return "no action is left"
        if step.tick >= self._limit:
            return "time is up"
        take.act(step)
        return None

    def _judged(self, step: Step, words: Sequence[str]) -> str | None:
        """Score the action before this observation; return a reason to end the episode, or None."""
        take = self._recorder
        if take.before is None:
            return None
        own = self._cell.scene.succeeded(step.seen.state)
        take.success = bool(own) or SUCCESS in words
        take.terminated = take.success or FAILURE in words
        reward = float(take.success)
        judged = SUCCESS in words or FAILURE in words  # the operator's verdict has priority
        if (
            self._score is not env_reward
            and not judged
            and (take.job.kind == TRAINING or own is None)
        ):
            scored = self._scored(step, reward)
            reward, over = float(scored.reward), bool(scored.terminated)
            take.success |= own is None and over and reward > 0
            take.terminated = over
        take.reward(reward)
        return ("success" if take.success else "failure") if take.terminated else None

    def _scored(self, step: Step, reward: float) -> StepResult:
        take = self._recorder
        assert take.before is not None
        time_is_up = step.tick >= self._limit and not take.terminated
        over, success, cut, yes = (
            torch.tensor([[flag]]) for flag in (take.terminated, take.success, time_is_up, True)
        )
        seen = step.seen.observation(take.instruction)
        result = StepResult(seen, torch.tensor([[reward]]), over, cut, success, yes)
        return self._score(
            take.before.observation(take.instruction), take.last_action[None, None], result
        )

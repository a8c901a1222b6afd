"""Record the current robot episode step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.realworld.control_step import Step
from rlinf_vla.realworld.episode import Job, RobotEpisode
from rlinf_vla.realworld.journal import EpisodeJournal
from rlinf_vla.realworld.sensing import Reading


class EpisodeRecorder:
    """Call ``look`` at every control step, and ``act`` if the episode continues after it."""

    def __init__(self, job: Job, task: str, instruction: str, began: float, journal: EpisodeJournal) -> None:
        """``journal``: must have begun this episode."""
        self._journal = journal
        self.job, self.task, self.instruction, self.began = job, task, instruction, began
        self.success = self.terminated = False
        self.before: Reading | None = None
        """Observation at which the last action was chosen."""
        self._now: Step | None = None
        self._done: list[Step] = []
        self._rewards: list[float] = []
        self._rules: Counter[str] = Counter()

    @property
    def seen_something(self) -> bool:
        return self._now is not None

    def __len__(self) -> int:
        """Number of executed steps whose outcome was observed."""
        return max(0, len(self._steps) - 1)

    @property
    def last_action(self) -> Tensor:
        """Last executed action, float32 ``[D]``."""
        action = self._done[-1].action
        assert action is not None
        return torch.from_numpy(action)

    def look(self, step: Step) -> None:
        self._now = step
        self._rules.update(each.rule for each in step.interventions)

    def act(self, step: Step) -> None:
        """Record the step's action, if any."""
        if step.action is not None:
            self._journal.act(step, self._rewards[-1] if self._rewards else 0.0)
            self._done.append(replace(step, action=np.array(step.action, np.float32)))
            self._rewards.append(0.0)
            self.before = step.seen

    def reward(self, value: float) -> None:
        """Set the reward of the last action; while the arm is held, the latest call counts."""
        self._rewards[-1] = value

    @property
    def _steps(self) -> list[Step]:
        now = self._now
        return [*self._done, now] if now is not None and (not self._done or self._done[-1].tick < now.tick) else [*self._done]

    def episode(self, ended: str, fault: bool, weights: int) -> RobotEpisode:
        """Return the episode so far; at least one observation is required."""
        assert self._now is not None
        steps = self._steps
        done = steps[:-1]
        seen = [step.seen.observation(self.instruction) for step in steps]
        return RobotEpisode(
            job=self.job,
            task=self.task,
            instruction=self.instruction,
            images={name: torch.cat([each.images[name] for each in seen]) for name in seen[0].images},
            state=torch.cat([each.state for each in seen]),
            tick=torch.tensor([step.tick for step in steps]),
            action=torch.from_numpy(np.array([step.action for step in done], np.float32)) if done else torch.zeros(0, 0),
            human=torch.tensor([step.human for step in done], dtype=torch.bool),
            reward=torch.tensor(self._rewards[: len(done)]),
            terminated=self.terminated and not fault,
            success=self.success and not fault,
            ended=ended,
            fault=fault,
            weights=weights,
            interventions=dict(sorted(self._rules.items())),
        )

"""Cut the episodes in which a simulator fails, so that a run goes on after them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from rlinf_vla.config.errors import Failure
from rlinf_vla.core.protocols import VectorEnv, WrappedEnv
from rlinf_vla.core.types import (
    FAULTS,
    REWARD_FAULT,
    STATE_FAULT,
    Episodes,
    Observation,
    StepResult,
    Trajectory,
    last_true,
)
from rlinf_vla.rollout.actor import rows_chosen

GIVE_UP = 10
"""Faults in a row, without an episode that ended otherwise, after which a run ends."""
METRIC = "faults/episodes"


class GuardedEnv(WrappedEnv):
    """Wrap ``env`` so that no state or reward of it is NaN or infinite.

    An episode with such a value, or with an exception of the simulator, is truncated at the end of
    the policy call in which it appears. That step has the reward 0, and what is observed after it
    is what was observed before. ``StepResult.fault`` says why.
    """

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        nowhere = torch.zeros(env.spec.num_envs, dtype=torch.bool, device=env.spec.device)
        self._cut = self._unseen = nowhere
        self._in_a_row = 0

    _episodes: Episodes
    _fresh: Tensor
    _seen: Observation | None = None
    """What was last observed."""
    _cut: Tensor
    """Episodes that were cut; the simulator would go on with them."""
    _unseen: Tensor
    """Episodes whose first state is not finite."""

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._fresh = torch.ones_like(self._cut) if mask is None else mask.to(self._cut.device)
        self._episodes = (
            episodes if mask is None else Episodes.where(mask.cpu(), episodes, self._episodes)
        )
        self._cut = self._cut & ~self._fresh
        self._env.reset_async(episodes, mask)

    def reset_wait(self) -> Observation:
        observation, finite = self._finite(self._env.reset_wait())
        self._unseen = torch.where(self._fresh, ~finite, self._unseen)
        return observation

    def step_wait(self) -> StepResult:
        result = self._env.step_wait()
        observation, finite = self._finite(result.observation)
        finite_reward = result.reward.isfinite() | ~result.valid
        fault = (
            result.fault
            if result.fault is not None
            else torch.zeros_like(result.valid, dtype=torch.uint8)
        )
        reason = fault.amax(1)
        reason = torch.where(finite_reward.all(1), reason, REWARD_FAULT)
        reason = torch.where(finite & ~self._unseen, reason, STATE_FAULT)
        going = result.valid & ~self._cut[:, None]
        fault = (last_true(going) * reason[:, None]).to(torch.uint8)
        failed = fault > 0
        cut_result = replace(
            result,
            observation=observation,
            reward=torch.where(going & finite_reward & ~failed, result.reward, 0),
            terminated=result.terminated & going & ~failed,
            truncated=(result.truncated & going) | failed,
            success=result.success & going & ~failed,
            valid=going,
            fault=fault,
        )
        self._cut = self._cut | failed.any(1)
        self._count(cut_result)
        return cut_result

    def _finite(self, observation: Observation) -> tuple[Observation, Tensor]:
        """Return the observation with the last finite state of each row, and which rows are new."""
        finite = observation.state.isfinite().all(1)
        if not bool(finite.all()):
            before = observation if self._seen is None else self._seen
            observation = rows_chosen(finite.cpu(), observation, before)
            observation = replace(observation, state=observation.state.nan_to_num(0.0, 0.0, 0.0))
        self._seen = observation
        return observation, finite

    def _count(self, result: StepResult) -> None:
        """Raises Failure after GIVE_UP faults in a row."""
        assert result.fault is not None
        reason = result.fault.amax(1)
        if bool((result.done & (reason == 0)).any()):
            self._in_a_row = 0
        elif bool(reason.any()):
            self._in_a_row += 1
            if self._in_a_row >= GIVE_UP:
                row = int(reason.argmax())
                task = self.spec.tasks[int(self._episodes.task_id[row])]
                seed = int(self._episodes.seed[row])
                raise Failure(
                    f"{GIVE_UP} episodes failed and none ended otherwise in between: the last one by {FAULTS[int(reason[row])]} "
                    f"(task {task}, seed {seed}); look at the policy's actions, at env.* and at reward.*"
                )


@dataclass(frozen=True)
class Fault:
    """An episode that was cut. ``step``: the control steps that it had."""

    task: str
    seed: int
    step: int
    reason: str

    def document(self) -> dict[str, str | int]:
        return asdict(self)

    def __str__(self) -> str:
        return f"an episode was cut: {self.reason} in step {self.step} of task {self.task}, seed {self.seed}"


def faults_of(calls: Trajectory, tasks: tuple[str, ...]) -> list[Fault]:
    """Return the episodes of ``calls`` that were cut, in their order."""
    if calls.fault is None:
        return []
    reason = calls.fault.amax(-1)
    steps = calls.step + calls.valid.sum(-1)
    return [
        Fault(
            tasks[int(calls.task_id[at])],
            int(calls.seed[at]),
            int(steps[at]),
            FAULTS[int(reason[at])],
        )
        for at in map(tuple, reason.nonzero().tolist())
    ]

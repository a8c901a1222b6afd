"""Apply a reward plug-in online, or relabel a recorded rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core.observation_messages import as_bytes, as_text
from rlinf_vla.core.protocols import Reward, VectorEnv, WrappedEnv
from rlinf_vla.core.types import Observation, StepResult, Tensors, Trajectory
from rlinf_vla.rollout.player import Call


def env_reward(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """Keep the environment's reward."""
    return result


@dataclass(frozen=True)
class RewardShaper:
    """Combine ``weight`` * plug-in reward + ``env_weight`` * environment reward.

    With ``terminal``, only an episode's last step is rewarded.
    """

    reward: Reward
    weight: float = 1.0
    env_weight: float = 0.0
    terminal: bool = False

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """Raises Failure if the reward is not finite where it counts; see :meth:`earned`."""
        result = self.earned(before, actions, result)
        if not bool(result.reward.isfinite().all()):
            raise Failure("the plug-in of reward.name gave a reward that is not finite")
        return result

    def earned(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """Return the result with the combined reward, which need not be finite.

        Raises ValueError if the plug-in's reward has the wrong shape.
        """
        scored = self.reward(before, actions, result)
        if scored.reward.shape != result.valid.shape:
            raise ValueError(
                f"the reward plug-in returned shape {tuple(scored.reward.shape)}, expected {tuple(result.valid.shape)}"
            )
        counts = result.valid
        if self.terminal:
            counts = counts & (scored.terminated | scored.truncated)
        earned = torch.where(
            counts, self.weight * scored.reward + self.env_weight * result.reward, 0.0
        )
        return replace(scored, reward=earned)


class RewardedEnv(WrappedEnv):
    """Wrap ``env`` with another reward. ``GuardedEnv`` cuts episodes in which it is not finite."""

    def __init__(self, env: VectorEnv, reward_shaper: RewardShaper) -> None:
        super().__init__(env)
        self._reward_shaper = reward_shaper

    _seen: Observation
    _actions: Tensor

    def reset_wait(self) -> Observation:
        self._seen = self._env.reset_wait()
        return self._seen

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self._actions = actions
        self._env.step_async(actions, skip_ended)

    def step_wait(self) -> StepResult:
        """Raises ValueError: see ``RewardShaper.earned``."""
        result = self._env.step_wait()
        scored = self._reward_shaper.earned(self._seen, self._actions, result)
        self._seen = result.observation
        return scored


SEEN = "seen."
"""Name prefix of inputs that only a reward reads."""


def seen(call: Call) -> Tensors:
    """Return all that a reward may read, to be stored with a policy's inputs.

    Raises UserError for an instruction that is too long.
    """
    tensors = {"actions": call.sample.actions}
    for when, observation in (("before", call.observation), ("after", call.result.observation)):
        tensors |= {f"{when}.image.{name}": value for name, value in observation.images.items()}
        tensors |= {
            f"{when}.state": observation.state,
            f"{when}.instruction": as_bytes(observation.instruction).to(observation.state.device),
        }
    return {f"{SEEN}{name}": value for name, value in tensors.items()}


def relabel_rewards(
    calls: Trajectory, seen: Tensors, reward_shaper: RewardShaper, rows: int
) -> Tensor:
    """Compute the rewards of ``calls`` ``[N]``, float32 ``[N, C]``, ``rows`` calls at a time.

    They equal the online rewards. Raises UserError if the reward would terminate an episode, and
    Failure if it is not finite.
    """
    rewards = []
    for start in range(0, len(calls), rows):
        index = torch.arange(start, start + rows).clamp(
            max=len(calls) - 1
        )  # pad to the size of an environment group
        part = calls[index]
        tensors = {name.removeprefix(SEEN): value[index] for name, value in seen.items()}
        own = StepResult(
            _observation(tensors, "after"),
            part.reward,
            part.terminated,
            part.truncated,
            part.success,
            part.valid,
        )
        result = reward_shaper(_observation(tensors, "before"), tensors["actions"], own)
        if bool(((result.terminated != part.terminated) & part.valid).any()):
            raise UserError(
                "this reward terminates episodes, which a reward worker cannot do: set cluster.reward_workers=0"
            )
        rewards.append(result.reward[: len(calls) - start])
    return torch.cat(rewards)


def _observation(tensors: Tensors, when: str) -> Observation:
    image = f"{when}.image."
    instructions = [as_text(row) for row in tensors[f"{when}.instruction"]]
    images = {
        name.removeprefix(image): value for name, value in tensors.items() if name.startswith(image)
    }
    return Observation(images, tensors[f"{when}.state"], instructions)

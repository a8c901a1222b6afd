"""What a reward plug-in says that steps were worth: as an environment steps, or afterwards, on what was recorded of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_vla.protocols import Reward, VectorEnv
from rlinf_vla.rollout.player import Call
from rlinf_vla.types import Episodes, Observation, StepResult, Tensors, Trajectory, UserError


def own_reward(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """The environment's."""
    return result


@dataclass(frozen=True)
class Worth:
    """``weight`` times ``reward``, plus ``env_weight`` times the environment's own; with ``terminal``, in an episode's last step alone."""

    reward: Reward
    weight: float = 1.0
    env_weight: float = 0.0
    terminal: bool = False

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """Raises ValueError where the reward is not a finite number of the right shape for every step that counts."""
        scored = self.reward(before, actions, result)
        if scored.reward.shape != result.valid.shape:
            raise ValueError(f"the reward plug-in returned shape {tuple(scored.reward.shape)}, expected {tuple(result.valid.shape)}")
        counts = result.valid
        if self.terminal:
            counts = counts & (scored.terminated | scored.truncated)
        earned = torch.where(counts, self.weight * scored.reward + self.env_weight * result.reward, 0.0)
        if not bool(earned.isfinite().all()):
            raise ValueError("the reward plug-in returned a reward that is not finite")
        return replace(scored, reward=earned)


class RewardedEnv(VectorEnv):
    """``env``, whose steps are worth something else."""

    def __init__(self, env: VectorEnv, worth: Worth) -> None:
        self.spec, self._env, self._worth = env.spec, env, worth

    _seen: Observation
    _actions: Tensor

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._env.reset_async(episodes, mask)

    def reset_wait(self) -> Observation:
        self._seen = self._env.reset_wait()
        return self._seen

    def step_async(self, actions: Tensor) -> None:
        self._actions = actions
        self._env.step_async(actions)

    def step_wait(self) -> StepResult:
        """Raises ValueError: see :class:`Worth`."""
        result = self._env.step_wait()
        scored = self._worth(self._seen, self._actions, result)
        self._seen = result.observation
        return scored

    def render(self, index: int) -> Tensor:
        return self._env.render(index)

    def expert_actions(self) -> Tensor:
        return self._env.expert_actions()

    def close(self) -> None:
        self._env.close()


SEEN = "seen."
"""What begins the names of the inputs that only a reward reads."""
_LONGEST = 512
"""Bytes kept of an instruction."""


def seen(call: Call) -> Tensors:
    """All that a reward may look at, to be kept beside a policy's inputs."""
    found = {"actions": call.sample.actions}
    for when, observation in (("before", call.observation), ("after", call.result.observation)):
        found |= {f"{when}.image.{name}": value for name, value in observation.images.items()}
        found |= {f"{when}.state": observation.state, f"{when}.instruction": _written(observation.instruction).to(observation.state.device)}
    return {f"{SEEN}{name}": value for name, value in found.items()}


def scored(calls: Trajectory, seen: Tensors, worth: Worth, rows: int) -> Tensor:
    """Rewards of ``calls`` ``[N]``, float32 ``[N, C]``, as ``worth`` would have said them during the rollout, ``rows`` calls at a time.

    Raises UserError where the reward would have ended an episode.
    """
    found = []
    for start in range(0, len(calls), rows):
        index = torch.arange(start, start + rows).clamp(max=len(calls) - 1)  # always as many as an environment group has
        part, shown = calls[index], {name.removeprefix(SEEN): value[index] for name, value in seen.items()}
        own = StepResult(_observation(shown, "after"), part.reward, part.terminated, part.truncated, part.success, part.valid)
        result = worth(_observation(shown, "before"), shown["actions"], own)
        if bool(((result.terminated != part.terminated) & part.valid).any()):
            raise UserError("this reward ends episodes, which a reward worker learns of too late: set cluster.reward_workers=0")
        found.append(result.reward[: len(calls) - start])
    return torch.cat(found)


def _written(lines: list[str]) -> Tensor:
    """uint8 ``[B, _LONGEST]``."""
    padded = [line.encode()[:_LONGEST].ljust(_LONGEST, b"\0") for line in lines]
    return torch.frombuffer(bytearray(b"".join(padded)), dtype=torch.uint8).reshape(len(lines), _LONGEST)


def _observation(shown: Tensors, when: str) -> Observation:
    image = f"{when}.image."
    instructions = [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in shown[f"{when}.instruction"]]
    images = {name.removeprefix(image): value for name, value in shown.items() if name.startswith(image)}
    return Observation(images, shown[f"{when}.state"], instructions)

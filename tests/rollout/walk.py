"""A Markov chain whose values are known in closed form: each control step leads to the next place for any action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.algorithms.sac import LOG_STD_RANGE, SACConfig, SACPolicy
from rlinf_vla.core.protocols import EnvSpec, PolicySpec, VectorEnv
from rlinf_vla.core.types import Episodes, Inputs, Observation, StepResult
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

ACTOR_STD = math.exp(-3)
"""Standard deviation of the actor of ``tabular``, before the squashing."""


class Walk(VectorEnv):
    """``rewards[p]`` is given on leaving place ``p``; the last place leads to the first. An episode starts at ``seed % places`` and ends
    after ``limit`` control steps: truncated, or, with ``terminates``, terminated. The state is the place, one-hot."""

    def __init__(
        self, rewards: Sequence[float], limit: int, num_envs: int = 1, terminates: bool = False
    ) -> None:
        self.rewards = list(rewards)
        self._terminates = terminates
        self.spec = EnvSpec(
            num_envs, 1, len(rewards), 10.0, limit, {}, ("walk",), torch.device("cpu")
        )
        self._place = self._clock = torch.zeros(num_envs, dtype=torch.int64)

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        mask = torch.ones(self.spec.num_envs, dtype=torch.bool) if mask is None else mask
        self._place = torch.where(mask, episodes.seed % len(self.rewards), self._place)
        self._clock = torch.where(mask, 0, self._clock)

    def reset_wait(self) -> Observation:
        state = F.one_hot(self._place, len(self.rewards)).float()
        return Observation({}, state, ["walk"] * self.spec.num_envs)

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self._actions = actions

    def step_wait(self) -> StepResult:
        reward = torch.zeros(self._actions.shape[:2])
        ended, valid = torch.zeros(2, *reward.shape, dtype=torch.bool)
        for c in range(reward.shape[1]):
            valid[:, c] = self._clock < self.spec.episode_limit
            reward[:, c] = torch.where(valid[:, c], torch.tensor(self.rewards)[self._place], 0)
            self._place = torch.where(
                valid[:, c], (self._place + 1) % len(self.rewards), self._place
            )
            self._clock = self._clock + valid[:, c].long()
            ended[:, c] = valid[:, c] & (self._clock == self.spec.episode_limit)
        nothing = torch.zeros_like(ended)
        return StepResult(
            self.reset_wait(),
            reward,
            terminated=ended if self._terminates else nothing,
            truncated=nothing if self._terminates else ended,
            success=nothing,
            valid=valid,
        )


class Places(LinearPolicy):
    """Its features are the state."""

    def __init__(self, places: int, chunk: int) -> None:
        super().__init__(LinearOptions(chunk=chunk))
        self.spec = PolicySpec(chunk=chunk, action_dim=1, state_dim=places, images={})

    def prepare(self, obs: Observation) -> Inputs:
        return {"place": obs.state.clone()}

    def encode(self, inputs: Inputs) -> Tensor:
        return inputs["place"]


class Table(torch.nn.Module):
    """Critics that know one number per place."""

    def __init__(self, members: int, places: int) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(
            torch.randn(members, places, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, features: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
        return (self.values if chosen is None else self.values[chosen]) @ features.T


def tabular(places: int, chunk: int, config: SACConfig) -> SACPolicy:
    """SAC with a table in place of its critics; its actor is the same everywhere, with mean 0 and ``ACTOR_STD``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = SACPolicy(Places(places, chunk), places, config)
    last: Any = policy.actor[-2]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    low, high = LOG_STD_RANGE
    last.bias.data[chunk:] = math.atanh(2 * (math.log(ACTOR_STD) - low) / (high - low) - 1)
    policy.value_head = policy.critics = Table(config.critics, places)  # type: ignore[assignment]
    return policy

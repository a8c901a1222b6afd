"""Who acts without a policy: the simulator's scripted expert, and chance."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.algorithms.soft import CHOSEN
from rlinf_vla.protocols import VectorEnv
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.rollout.player import Prepares
from rlinf_vla.types import ActionSample, Episodes, Inputs, Observation


class Unprepared:
    """In a policy's place where nothing looks at what is prepared."""

    def prepare(self, obs: Observation) -> Inputs:
        return {}


class Expert:
    """Acts as the scripted expert of an environment; its actions are what a policy without units of its own would have said."""

    def __init__(self, policy: Prepares, env: VectorEnv) -> None:
        self.policy, self._env = policy, env

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        return _sample(self._env.expert_actions()[:, None].clamp(-1, 1))

    def value(self, inputs: Inputs) -> Tensor:
        raise NotImplementedError("an expert values nothing")


class Chance:
    """Acts uniformly in [-1, 1], one control step at a time; what it does depends on (run seed, episode, control step) alone."""

    def __init__(self, env: VectorEnv, run_seed: int) -> None:
        self.policy: Prepares = Unprepared()
        self._spec, self._run_seed = env.spec, run_seed

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        noise = CounterNoise(self._run_seed, episodes.task_id, episodes.seed, step)
        return _sample((2 * noise.uniform(1, self._spec.action_dim) - 1).to(self._spec.device))

    def value(self, inputs: Inputs) -> Tensor:
        raise NotImplementedError("chance values nothing")


def _sample(actions: Tensor) -> ActionSample:
    zeros = torch.zeros(len(actions), device=actions.device)
    return ActionSample(actions, {CHOSEN: actions}, torch.zeros_like(actions), zeros)

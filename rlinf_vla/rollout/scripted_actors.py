"""Actors without a policy: the simulator's scripted expert, and uniformly random actions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlinf_vla.algorithms.feature_policy import ACTOR_OUTPUT
from rlinf_vla.core.devices import CPU
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation
from rlinf_vla.rollout.noise import CounterNoise

Prepare = Callable[[Observation], Inputs]


class _ScriptedActor:
    def __init__(self, prepare: Prepare = lambda obs: {}) -> None:
        """``prepare``: returns the inputs to store with each call; there are none by default."""
        self.prepare = prepare

    def value(self, obs: Observation, wanted: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no value function")


class ExpertActor(_ScriptedActor):
    """Act as an environment's scripted expert, clamped to [-1, 1].

    The latent CHOSEN is the action itself, as of a policy without units of its own.
    """

    def __init__(self, env: VectorEnv, prepare: Prepare = lambda obs: {}) -> None:
        super().__init__(prepare)
        self._env = env

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        return _sample(self._env.expert_actions()[:, None].to(CPU).clamp(-1, 1))


class RandomActor(_ScriptedActor):
    """Act uniformly in [-1, 1], one step per call, keyed by (run seed, episode, control step)."""

    def __init__(self, env: VectorEnv, run_seed: int) -> None:
        super().__init__()
        self._spec = env.spec
        self._run_seed = run_seed

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        noise = CounterNoise(self._run_seed, episodes.task_id, episodes.seed, step)
        return _sample(2 * noise.uniform(1, self._spec.action_dim) - 1)


def _sample(actions: Tensor) -> ActionSample:
    return ActionSample(
        actions, {ACTOR_OUTPUT: actions}, torch.zeros_like(actions), torch.zeros(len(actions))
    )

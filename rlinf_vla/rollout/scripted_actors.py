"""Actors without a policy: the simulator's scripted expert, and uniformly random actions."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.algorithms.feature_policy import ACTOR_OUTPUT
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.rollout.player import InputPreparer


class Unprepared:
    """A substitute policy that prepares no inputs."""

    def prepare(self, obs: Observation) -> Inputs:
        return {}


class _ScriptedActor:
    def value(self, inputs: Inputs) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no value function")


class ExpertActor(_ScriptedActor):
    """Act as an environment's scripted expert, clamped to [-1, 1].

    The latent CHOSEN is the action itself, as of a policy without units of its own.
    """

    def __init__(self, policy: InputPreparer, env: VectorEnv) -> None:
        self.policy, self._env = policy, env

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        return _sample(self._env.expert_actions()[:, None].clamp(-1, 1))


class RandomActor(_ScriptedActor):
    """Act uniformly in [-1, 1], one step per call, keyed by (run seed, episode, control step)."""

    def __init__(self, env: VectorEnv, run_seed: int) -> None:
        self.policy: InputPreparer = Unprepared()
        self._spec, self._run_seed = env.spec, run_seed

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        noise = CounterNoise(self._run_seed, episodes.task_id, episodes.seed, step)
        return _sample((2 * noise.uniform(1, self._spec.action_dim) - 1).to(self._spec.device))


def _sample(actions: Tensor) -> ActionSample:
    zeros = torch.zeros(len(actions), device=actions.device)
    return ActionSample(actions, {ACTOR_OUTPUT: actions}, torch.zeros_like(actions), zeros)

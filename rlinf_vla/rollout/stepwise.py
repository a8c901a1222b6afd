"""Execute a policy's chunks action by action, so that every control step has its observation."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation
from rlinf_vla.rollout.actor import Actor, whole_blocks


class Stepwise:
    """An actor whose calls have one action. The states are those that the policy visits with whole
    chunks, and the actions those that it then executes."""

    def __init__(self, actor: Actor, env: VectorEnv) -> None:
        spec = actor.policy.spec
        self._actor = actor
        self._chunk = torch.zeros(env.spec.num_envs, spec.chunk, spec.action_dim)
        """The policy's present chunk in each environment; arbitrary where it has chosen none."""

    def prepare(self, obs: Observation) -> Inputs:
        return self._actor.prepare(obs)

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        actions = self._continued(inputs, episodes, step, self._position(step) == 0)[:, None]
        return ActionSample(actions, {}, torch.zeros_like(actions), torch.zeros(len(step)))

    def value(self, obs: Observation, wanted: Tensor) -> Tensor:
        raise NotImplementedError("an episode is played to its end")

    def _position(self, step: Tensor) -> Tensor:
        """Return each environment's place in its chunk, int64 ``[B]``."""
        return step % self._chunk.shape[1]

    def _continued(
        self, inputs: Inputs, episodes: Episodes, step: Tensor, begins: Tensor
    ) -> Tensor:
        """Return the present action of each environment, ``[B, D]``, of a chunk that is chosen now
        where it ``begins``, bool ``[B]``."""
        if bool(begins.any()):
            rows = whole_blocks(begins, self._actor.settings.batch_size)
            blocks = {name: value[rows.to(value.device)] for name, value in inputs.items()}
            fresh = self._actor.act(blocks, episodes[rows], step[rows]).actions
            self._chunk[rows] = torch.where(begins[rows, None, None], fresh, self._chunk[rows])
        return self._chunk[torch.arange(len(step)), self._position(step)]

"""Workers that say something about shards that were played: reward workers and reference workers."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from rlinf_vla.flow.learning import Learning
from rlinf_vla.flow.on_ray.wire import ROW, HeavyParts, Packed
from rlinf_vla.flow.on_ray.worker import Builders, Introduction, Worker, node_address, off_the_gpu
from rlinf_vla.protocols import EnvSpec, Policy
from rlinf_vla.rollout.rewarded import Worth, scored
from rlinf_vla.training.trainer import Trainer
from rlinf_vla.types import Trajectory, flattened


class RewardWorker(Worker):
    """Says what the steps of a rollout were worth."""

    worth: Worth | None = None

    def ready(self) -> Introduction:
        return Introduction(os.getpid(), node_address(), None)

    def score(self, calls: Trajectory, scene: Packed, env: EnvSpec) -> Packed:
        """Rewards of a shard, shaped as its own. ``env``: of an environment group."""
        with self.builders.update_threads():
            if self.worth is None:
                self.worth = self.builders.worth(env)
            return Packed.of({"reward": scored(flattened(calls), scene.tensors(), self.worth, env.num_envs).reshape(calls.reward.shape)})


class ReferenceWorker(Worker):
    """The policy as it was before the first update."""

    def rest(self) -> None:
        """Off the GPU, until there is work again."""
        off_the_gpu(self.policy)

    def ready(self) -> Introduction:
        with self.builders.update_threads():
            self.policy = self.builders.policy()
            self.learning = learning(self.builders, self.builders.trainer(self.policy))
        return Introduction(os.getpid(), node_address(), self.policy.spec)

    def reference(self, calls: Trajectory, heavy: Packed) -> Packed:
        """Log-probabilities of a shard, shaped as its own."""
        self.policy.to(self.builders.device)
        with self.builders.update_threads():
            return Packed.of({"reference": self.learning.log_prob(whole(calls, heavy, self.policy)).reshape(calls.log_prob.shape)})


def learning(builders: Builders, trainer: Trainer) -> Learning:
    return Learning(trainer, builders.settings.run_seed, builders.settings.temperature, builders.reuse_frozen)


def whole(calls: Trajectory, heavy: Packed, policy: Policy) -> Trajectory:
    """``[N]``: a light shard with its heavy part, where the policy is."""
    parts = HeavyParts()
    parts.add(0, heavy)
    flat = flattened(calls)
    return parts.complete(replace(flat, inputs={ROW: torch.arange(len(flat))}), next(policy.parameters()).device)

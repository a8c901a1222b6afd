"""Workers that process finished shards: reward workers and reference workers."""

from __future__ import annotations

from rlinf_vla.core.protocols import EnvSpec
from rlinf_vla.core.types import Trajectory, flattened
from rlinf_vla.rollout.reward_shaping import RewardShaper, relabel_rewards
from rlinf_vla.runtime.workers.base import Worker, WorkerInfo, off_the_gpu
from rlinf_vla.runtime.workers.shards import Packed, whole
from rlinf_vla.runtime.workers.trainer import learning


class RewardWorker(Worker):
    """Worker that computes the recipe's reward of each step."""

    reward_shaper: RewardShaper | None = None

    def ready(self) -> WorkerInfo:
        return self.info()

    def score(self, calls: Trajectory, scene: Packed, env: EnvSpec) -> Packed:
        """Return rewards in the shape of the shard's own. ``env``: spec of an environment group."""
        with self.builders.update_threads():
            if self.reward_shaper is None:
                self.reward_shaper = self.builders.reward_shaper(env)
            return Packed.of(
                {
                    "reward": relabel_rewards(
                        flattened(calls), scene.tensors(), self.reward_shaper, env.num_envs
                    ).reshape(calls.reward.shape)
                }
            )


class ReferenceWorker(Worker):
    """Worker with the reference policy: the policy before the first update."""

    def rest(self) -> None:
        """Move the policy off the GPU until there is work again."""
        off_the_gpu(self.policy)

    def ready(self) -> WorkerInfo:
        with self.builders.update_threads():
            self.policy = self.builders.learner()
            self.learning = learning(self.builders, self.builders.trainer(self.policy))
        return self.info(self.policy.spec)

    def reference(self, calls: Trajectory, heavy: Packed) -> Packed:
        """Return reference log-probabilities in the shape of the shard's own."""
        self.policy.to(self.builders.cluster.torch_device)
        with self.builders.update_threads():
            return Packed.of(
                {
                    "reference": self.learning.log_prob(whole(calls, heavy)).reshape(
                        calls.log_prob.shape
                    )
                }
            )

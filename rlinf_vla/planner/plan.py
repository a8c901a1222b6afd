"""Execution plan of a macro flow: workers, placement and batching. It never changes the result."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rlinf_vla.config.cluster import IN_PROCESS

COLLOCATED, DISAGGREGATED, HYBRID = "collocated", "disaggregated", "hybrid"
IN_CLUSTER = (
    *("runtime", "rollout_workers", "reward_workers", "reference_workers", "trainer_ranks"),
    *("streaming", "micro_batch_size", "offload"),
)
"""Fields of a plan that are keys of recipe node ``cluster``."""
IN_ROLLOUT = ("pipeline_depth", "split")
"""Fields of a plan that are keys of recipe node ``rollout``."""


@dataclass(frozen=True)
class Plan:
    """How a run executes its macro flow. The recipe's keys are checked before a plan is made."""

    runtime: str = IN_PROCESS
    placement: str = COLLOCATED
    """collocated: rollouts and trainer take turns on the same devices; disaggregated: they use
    separate devices; hybrid: rollouts use all devices, the trainer some of them."""
    rollout_workers: int = 1
    reward_workers: int = 0
    """0: the rollout workers compute the recipe's reward."""
    reference_workers: int = 0
    """0: the trainer computes the reference policy's log-probabilities."""
    trainer_ranks: int = 1
    pipeline_depth: int = 1
    """Environment groups per rollout worker, which take turns."""
    micro_batch_size: int = 320
    """Largest number of policy calls in one forward and backward pass of a trainer rank."""
    streaming: bool = True
    """Pass each shard on when it is finished; false: every operation waits for all shards."""
    split: str = "none"
    """head: the backbone runs next to the trainer, the action head in the rollout worker."""
    offload: bool = False
    """Move idle weights out of the memory of a device that roles share."""

    def overrides(self) -> list[str]:
        """Return the recipe overrides (``key=value``) that make a run follow this plan."""
        keys = {f"cluster.{key}": getattr(self, key) for key in IN_CLUSTER if key != "offload" or self.offload}
        keys |= {f"rollout.{key}": getattr(self, key) for key in IN_ROLLOUT}
        return [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in keys.items()]

    def __str__(self) -> str:
        groups = f"{self.pipeline_depth} environment group{'s' * (self.pipeline_depth > 1)}" + " taking turns" * (self.pipeline_depth > 1)
        if self.runtime == IN_PROCESS:
            return f"in process, {groups}, micro-batches of {self.micro_batch_size}"
        parts = [f"Ray, {self.placement}", f"{_count(self.rollout_workers, 'rollout worker')} of {groups}"]
        parts += [_count(n, f"{kind} worker") for kind, n in (("reward", self.reward_workers), ("reference", self.reference_workers)) if n]
        parts += [_count(self.trainer_ranks, "trainer rank"), f"micro-batches of {self.micro_batch_size}"]
        parts += ["streaming" if self.streaming else "without streaming"]
        parts += ["backbone with the trainer"] * (self.split == "head") + ["idle weights off-loaded"] * self.offload
        return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"

"""What on-policy algorithms share: the clipped surrogate on a batch of policy calls, and the flow that their iterations are written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import GAMMA_UNITS
from rlinf_vla.algorithms.losses import (
    AGGREGATIONS,
    GRANULARITIES,
    Clip,
    aggregation_weights,
    element_mask,
    elements,
    joint,
    kl_loss,
    policy_loss,
    value_loss,
)
from rlinf_vla.algorithms.sft import DemonstrationConfig
from rlinf_vla.protocols import EnvSpec, Policy
from rlinf_vla.ranges import Count, LearningRate, NonNegative, OneOf, Positive, Probability, Range, Size
from rlinf_vla.types import Rollouts, Trajectory, UserError


@dataclass
class OnPolicyConfig:
    """Recipe node ``algorithm``: what PPO and GRPO have in common."""

    gamma: Probability = 0.99
    """Discount per gamma_unit."""
    gamma_unit: Annotated[str, OneOf(*GAMMA_UNITS)] = "step"
    """step: per control step, whatever the chunk; chunk: per policy call, rewards within a chunk alike (as RLinf's chunk_level)."""
    clip_low: Probability = 0.2
    clip_high: Annotated[float, Range(0, 1000)] = 0.2
    dual_clip: Annotated[float, Range(1, 1000, above=True)] | None = None
    """Where the advantage is negative, no loss beyond this multiple of it; null: no limit."""
    granularity: Annotated[str, OneOf(*GRANULARITIES)] = "chunk"
    """Whose probability ratio is clipped: chunk (all executed actions of a call together), action, or token (each dimension)."""
    aggregation: Annotated[str, OneOf(*AGGREGATIONS)] = "token_mean"
    """How the loss is averaged: over all such elements (token_mean), over episodes' means, or over groups' means."""
    entropy_coef: NonNegative = 0.0
    kl_coef: NonNegative = 0.0
    """Of the divergence from the policy as it was before the first update; 0: it is not computed."""
    decoupled: bool = False
    """Clip around the policy as it is when an update begins, and weight by what acted (for stale rollouts)."""
    staleness: Annotated[int, Range(0, 1000)] = 0
    """Rollouts of iteration i are played by the policy as it was before iteration i - staleness, while updates go on."""
    behaviour_limit: Positive | None = None
    """With decoupled: leave out what the present policy would do this many times more often than the one that acted."""
    sft_coef: NonNegative = 0.0
    """Of the imitation loss on demonstrations of the scripted expert, beside the algorithm's own (co-training)."""
    sft_batch_size: Size = 32
    """Demonstrated states per optimiser step."""
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """Played before the first update that imitates; see the recipes of imitation."""
    epochs: Annotated[int, Range(1, 1000)] = 1
    minibatch_size: Count = 160
    """Policy calls per optimiser step."""
    target_kl: Positive | None = 0.08
    """Stop an iteration's updates once a minibatch's approximate KL passes this."""
    learning_rate: LearningRate = 1e-4
    adam_beta2: Annotated[float, Range(0, 1, below=True)] = 0.95
    """Decay of Adam's mean of squared gradients; of its mean of gradients it is 0.9."""
    max_grad_norm: Positive = 0.5


@dataclass(frozen=True)
class Batch:
    """What an update learns from: ``N`` policy calls, their advantages ``[N]`` and how much each element of a call weighs ``[N]``.

    target: what the critic should say ``[N]``; None: there is no critic. proximal: ``[N, C, D]`` log-probabilities of what was done, under
    the policy as it was at the beginning of the update.
    """

    calls: Trajectory
    advantage: Tensor
    weight: Tensor
    target: Tensor | None = None
    proximal: Tensor | None = None

    def __len__(self) -> int:
        return len(self.advantage)

    def __getitem__(self, index: Any) -> Batch:
        return self._map(lambda each: each[index])

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda each: each.to(device))

    def _map(self, function: Callable[[Any], Any]) -> Batch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(value) for name, value in values.items() if value is not None})

    @property
    def counts(self) -> Tensor:
        """bool ``[N]``: the call executed at least one action."""
        return self.calls.valid.any(-1)


class Flow(Protocol):
    """The operations that a macro flow is made of; a runtime decides where and in what pieces they run."""

    iteration: int

    def collect(self, horizon: int) -> Rollouts:
        """Every environment plays ``horizon`` control steps, episode after episode: shards ``[T, B]`` in order of the environments."""

    def collect_groups(self, groups: int, attempts: int, draw: int) -> Rollouts:
        """``groups`` new episodes of this iteration, each played ``attempts`` times from its beginning to its end.

        Shards of whole groups, ``[N]`` calls in order of (episode, attempt, step). Each ``draw`` gives other episodes.
        """

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Each shard with the recipe's reward."""

    def reference(self, rollouts: Rollouts) -> Rollouts:
        """Each shard with the log-probabilities of the policy as it was before the first update."""

    def update(self, batch: Batch, algorithm: OnPolicy, value_only: bool = False) -> bool:
        """Whether the policy has moved far enough for this iteration: see ``OnPolicy.enough``."""

    def publish(self) -> None:
        """The weights are the next version, which later rollouts play with."""

    def log(self, metrics: dict[str, float]) -> None: ...


class OnPolicy:
    """One iteration is a subclass's; the loss is here."""

    value_coef = 0.0
    value_clip: float | None = None
    value_huber: float | None = None

    def __init__(self, config: Any, temperature: float) -> None:
        self.config, self.temperature = config, temperature
        self.clip = Clip(config.clip_low, config.clip_high, config.dual_clip, config.behaviour_limit)
        if config.staleness and not config.decoupled:
            raise UserError(f"algorithm.staleness={config.staleness} wants the decoupled objective: set algorithm.decoupled=true")

    def check(self, env: EnvSpec) -> None:
        """Raises UserError where the recipe does not fit the environment."""

    def iteration(self, flow: Flow) -> None:
        raise NotImplementedError

    def prepared(self, flow: Flow, rollouts: Rollouts) -> Rollouts:
        """Each shard with all that advantages and loss read of it."""
        rollouts = flow.score(rollouts)
        return flow.reference(rollouts) if self.config.kl_coef else rollouts

    def minibatch_size(self, batch: Batch) -> int:
        """Policy calls per optimiser step."""
        return self.config.minibatch_size

    def weighted(self, calls: Trajectory, advantage: Tensor) -> Batch:
        """``calls`` ``[N]`` with the weights of the recipe's aggregation, which are 1 on average."""
        mask = element_mask(calls.valid, calls.log_prob.shape[-1], self.config.granularity)
        weight = aggregation_weights(mask, calls.episode_ids(), calls.group_ids(), self.config.aggregation)
        return Batch(calls, advantage, weight * calls.valid.any(-1).sum())

    def loss(self, policy: Policy, batch: Batch, value_only: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed loss and summed statistics of a micro-batch."""
        config, calls = self.config, batch.calls
        new = policy.evaluate(calls.inputs, calls.latent, self.temperature)
        mask = element_mask(calls.valid, new.log_prob.shape[-1], config.granularity)
        log_prob, old, proximal, reference = (
            None if each is None else elements(each, calls.valid, config.granularity)
            for each in (new.log_prob, calls.log_prob, batch.proximal, calls.reference)
        )
        assert log_prob is not None and old is not None
        actor, statistics = policy_loss(log_prob, old, batch.advantage, mask, batch.weight, self.clip, proximal)
        entropy = joint(new.entropy, calls.valid).sum()
        summed = {"actor/pg_loss": actor, "actor/entropy": entropy} | {f"actor/{name}": value for name, value in statistics.items()}
        total = torch.zeros_like(actor) if value_only else actor - config.entropy_coef * entropy
        if reference is not None:
            k3, k1 = kl_loss(log_prob, reference, mask, batch.weight)
            summed |= {"actor/kl_loss": k3, "actor/reference_kl": k1}
            total = total if value_only else total + config.kl_coef * k3
        if batch.target is not None:
            critic = value_loss(new.value, calls.value, batch.target, batch.counts, self.value_clip, self.value_huber)
            summed["critic/vf_loss"] = critic
            total = total + self.value_coef * critic
        return total, {name: value.detach() for name, value in summed.items()}

    def enough(self, metrics: dict[str, float]) -> bool:
        """Whether the policy has moved far enough from the one that collected the data."""
        return self.config.target_kl is not None and metrics.get("actor/approx_kl", 0.0) > self.config.target_kl


def parity(policy: Policy, rollouts: Trajectory, temperature: float, calls: int = 64) -> float:
    """Largest difference between stored log-probabilities and those that ``evaluate`` gives now, over the first ``calls`` policy calls."""
    flat = rollouts[:calls]
    with torch.no_grad():
        again = policy.evaluate(flat.inputs, flat.latent, temperature).log_prob
    return torch.where(flat.valid[..., None], (again - flat.log_prob).abs(), 0).max().item()

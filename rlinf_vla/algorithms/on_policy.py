"""Shared parts of on-policy algorithms: loss terms, recipe keys, batch, clipped surrogate, flow.

Loss terms are masked, weighted sums. The caller divides by a global count, so the split into
micro-batches and ranks does not change the loss. ``N`` policy calls have ``K`` elements each: the
units whose probability ratio is clipped, see :func:`elements`. A mask ``[N, K]`` selects elements;
a weight ``[N]`` applies to each element of a call, see :func:`aggregation_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.algorithms.advantages import GAMMA_UNITS
from rlinf_vla.algorithms.base import Charged, CostConfig, CostLimited, DemonstrationConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    Count,
    LearningRate,
    NonNegative,
    OneOf,
    Positive,
    Probability,
    Range,
    Size,
)
from rlinf_vla.config.recipe import ON_POLICY
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Batched, Rollouts, Trajectory

GRANULARITIES = ("chunk", "action", "token")
AGGREGATIONS = ("token_mean", "trajectory_mean", "group_mean")


def joint(per_dimension: Tensor, valid: Tensor) -> Tensor:
    """Sum log-probabilities (or entropies) ``[N, C, D]`` over executed actions, to ``[N]``."""
    return torch.where(valid[..., None], per_dimension, 0).sum(dim=(-2, -1))


def elements(per_dimension: Tensor, valid: Tensor, granularity: str) -> Tensor:
    """Reduce ``[N, C, D]`` to elements ``[N, K]``.

    An element is the executed chunk (K = 1), an action (K = C) or an action dimension (K = C D).
    """
    if granularity == "chunk":
        return joint(per_dimension, valid)[:, None]
    per_dimension = torch.where(valid[..., None], per_dimension, 0)
    return per_dimension.sum(dim=-1) if granularity == "action" else per_dimension.flatten(1)


def element_mask(valid: Tensor, action_dim: int, granularity: str) -> Tensor:
    """Return which elements were executed: bool ``[N, C]`` to ``[N, K]``."""
    if granularity == "chunk":
        return valid.any(dim=-1, keepdim=True)
    return valid if granularity == "action" else valid.repeat_interleave(action_dim, dim=1)


def aggregation_weights(mask: Tensor, episode: Tensor, group: Tensor, aggregation: str) -> Tensor:
    """Return weights ``[N]`` of each call's elements that turn the sum over ``mask`` into a mean.

    ``token_mean``: over all elements (DAPO, arXiv 2503.14476). ``trajectory_mean``: over the
    episodes' means (GRPO, arXiv 2402.03300). ``group_mean``: over the groups' means. ``mask`` is
    ``[N, K]``, ``episode`` and ``group`` are int64 ``[N]``, from 0 on. Pass the whole batch, never
    a part of it. The weight is 0 where ``mask`` is false for the whole call.
    """
    count = mask.sum(dim=1)
    if aggregation == "token_mean":
        return torch.where(count > 0, 1.0 / count.sum().clamp(min=1), 0.0)
    unit = episode if aggregation == "trajectory_mean" else group
    size = torch.zeros(int(unit.max()) + 1, dtype=torch.int64, device=mask.device).index_add(
        0, unit, count
    )
    return torch.where(
        count > 0, 1.0 / (size[unit].clamp(min=1) * (size > 0).sum().clamp(min=1)), 0.0
    )


class _Bounded(torch.autograd.Function):
    """Clamp with a straight-through gradient: values beyond the bound are still pushed back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def safe_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log(pi / pi_old)`` and ``pi / pi_old``; 0 and 1 where ``mask`` is false.

    The mask and bound are applied before ``exp``, because an overflow that ``where`` discards
    afterwards still makes the gradient NaN. Beyond ``|log ratio| = 20`` the gradient is that at the
    bound: it keeps its direction and stays finite.
    """
    log_ratio: Tensor = _Bounded.apply(torch.where(mask, log_prob - old_log_prob, 0), 20.0)
    return log_ratio, log_ratio.exp()


@dataclass(frozen=True)
class Clip:
    """Clip the ratio to ``1 - low`` ... ``1 + high`` (clip-higher: DAPO, arXiv 2503.14476).

    dual: limit of the loss of a negative advantage, as a multiple of it (Ye et al. 2020, eq. 5).
    behaviour: with a proximal policy, mask elements with ``pi_proximal / pi_behaviour`` above this.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    behaviour: float | None = None


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    weight: Tensor,
    clip: Clip,
    proximal: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate (Schulman et al. 2017, eq. 7) and statistics, as weighted sums.

    Log-probabilities and ``mask``: ``[N, K]``; ``advantage`` and ``weight``: ``[N]``. ``proximal``
    ``[N, K]``: log-probabilities of a proximal policy other than the behaviour policy (decoupled
    PPO, Hilton et al. 2022, eq. 2). The surrogate is clipped around it and weighted by
    ``pi_proximal / pi_old``.

    Statistics: ``approx_kl`` (k3 of http://joschu.net/blog/kl-approx.html), ``ppo_kl`` (k1) and
    ``clip_fraction``.
    """
    behaviour = torch.ones((), dtype=log_prob.dtype, device=log_prob.device)
    if proximal is not None:
        behaviour = safe_ratio(proximal, old_log_prob, mask)[1].detach()
        if clip.behaviour is not None:
            mask = mask & (behaviour <= clip.behaviour)
    log_ratio, ratio = safe_ratio(log_prob, old_log_prob if proximal is None else proximal, mask)
    # advantage and weight of a fully masked call are arbitrary
    counts = mask.any(dim=1, keepdim=True)
    advantage = torch.where(counts, advantage[:, None], 0)
    weight = torch.where(counts, weight[:, None], 0)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip.low, 1 + clip.high))
    if clip.dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * clip.dual), loss)
    with torch.no_grad():
        statistics = {
            "approx_kl": (weight * (ratio - 1 - log_ratio)).sum(),
            "ppo_kl": (weight * -log_ratio).sum(),
            "clip_fraction": (
                weight * (((ratio < 1 - clip.low) | (ratio > 1 + clip.high)) & mask)
            ).sum(),
        }
    return torch.where(mask, weight * behaviour * loss, 0).sum(), statistics


def kl_loss(
    log_prob: Tensor, reference: Tensor, mask: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate ``KL(pi || reference)`` as weighted sums of k3 (a loss) and k1 (a metric).
    See http://joschu.net/blog/kl-approx.html. ``weight``: ``[N]``; all others ``[N, K]``."""
    log_ratio, ratio = safe_ratio(reference, log_prob, mask)
    weight = torch.where(mask.any(dim=1), weight, 0)[:, None]
    return (weight * (ratio - 1 - log_ratio)).sum(), (weight * -log_ratio).sum().detach()


def value_loss(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    mask: Tensor,
    clip: float | None,
    huber: float | None = None,
) -> Tensor:
    """Return the sum of ``0.5 (target - value)**2`` over ``[N]``; with ``huber``, linear beyond it.

    With ``clip``: the maximum of that and the loss of the value clipped to ``old_value +- clip``.
    """

    def penalty(estimate: Tensor) -> Tensor:
        return (
            0.5 * (target - estimate) ** 2
            if huber is None
            else F.huber_loss(estimate, target, reduction="none", delta=huber)
        )

    value, target = torch.where(mask, value, 0), torch.where(mask, target, 0)
    loss = penalty(value)
    if clip is not None:
        old_value = torch.where(mask, old_value, 0)
        loss = torch.maximum(loss, penalty(old_value + (value - old_value).clamp(-clip, clip)))
    return torch.where(mask, loss, 0).sum()


ENTROPY_COEF, LEARNING_RATE = "entropy_coef", "learning_rate"
"""Their names in metrics and checkpoints."""


@dataclass
class OnPolicyConfig(CostConfig):
    """Recipe node ``algorithm``: keys shared by on-policy algorithms."""

    family: ClassVar[str] = ON_POLICY

    gamma: Probability = 0.99
    """Discount factor per gamma_unit."""
    gamma_unit: Annotated[str, OneOf(*GAMMA_UNITS)] = "step"
    """Discount per control step (step) or per policy call (chunk).

    With chunk, rewards within a chunk are not discounted, as in RLinf's chunk_level.
    """
    clip_low: Probability = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Range(0, 1000)] = 0.2
    """See clip_low."""
    dual_clip: Annotated[float, Range(1, 1000, above=True)] | None = None
    """Limit the loss of a negative advantage to this multiple of it; null: no limit."""
    granularity: Annotated[str, OneOf(*GRANULARITIES)] = "chunk"
    """Unit of the clipped ratio: chunk (a call's executed actions), action, token (dimension)."""
    aggregation: Annotated[str, OneOf(*AGGREGATIONS)] = "token_mean"
    """Average of the loss: over all such units (token_mean), over episode means or group means."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the policy's entropy, which is maximised; 0 disables it."""
    entropy_coef_end: NonNegative | None = None
    """Coefficient in the last iteration, which a straight line leads to; null: entropy_coef."""
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL to the initial policy; 0 disables it."""
    decoupled: bool = False
    """Decoupled PPO objective, for stale rollouts.

    Clip around the policy at the start of the iteration's updates, and weight by its ratio to the
    behaviour policy.
    """
    recompute_log_prob: bool | None = None
    """Recompute the rollout's log-probabilities at the start of an update; null: bfloat16 and TF32.

    Acting rounds differently from learning; so the first ratio is exactly 1.
    """
    staleness: Annotated[int, Range(0, 1000)] = 0
    """Collect rollouts this many iterations ahead, with older weights, while updates run.

    Iteration i learns from rollouts of the policy before iteration i - staleness.
    """
    behaviour_limit: Positive | None = None
    """With decoupled: mask elements with a ratio to the behaviour policy above this; null: none."""
    sft_coef: NonNegative = 0.0
    """Coefficient of an additional imitation loss on demonstrations (co-training)."""
    sft_batch_size: Size = 32
    """Demonstration states per optimiser step."""
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """Demonstrations for sft_coef, collected before the first update that uses them."""
    epochs: Annotated[int, Range(1, 1000)] = 1
    """Passes over the rollouts of an iteration."""
    minibatch_size: Count = 160
    """Policy calls per optimiser step."""
    row_groups: Count = 1
    """Draw each minibatch evenly from this many fixed groups of policy calls.

    With a multiple of cluster.trainer_ranks, a rank learns from the same calls in every epoch, and
    computes the frozen part of the policy only for these.
    """
    target_kl: Positive | None = 0.08
    """Stop an iteration's updates once a minibatch's approximate KL exceeds this; null: never."""
    learning_rate: LearningRate = 1e-4
    learning_rate_end: Probability = 1.0
    """Share of all learning rates that is left in the last iteration; a straight line leads to it.

    CleanRL's ``anneal_lr`` leaves 1 / iterations.
    """
    adam_beta2: Annotated[float, Range(0, 1, below=True)] = 0.95
    """Adam's beta2; beta1 is 0.9."""
    adam_eps: Annotated[float, Range(0, 1, above=True)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Probability = 0.0
    """AdamW's weight decay, of policy and critic."""
    max_grad_norm: Positive = 0.5


@dataclass(frozen=True)
class Batch(Batched):
    """Data of an update: ``N`` policy calls, advantages ``[N]``, weights per element ``[N]``.

    target: value targets ``[N]``; None: there is no critic. proximal: log-probabilities
    ``[N, C, D]`` of the executed actions under the policy at the start of the iteration's updates.
    """

    calls: Trajectory
    advantage: Tensor
    weight: Tensor
    target: Tensor | None = None
    proximal: Tensor | None = None

    def __len__(self) -> int:
        return len(self.advantage)

    @property
    def counts(self) -> Tensor:
        """bool ``[N]``: whether the call executed at least one action."""
        return self.calls.valid.any(-1)


class Flow(Protocol):
    """The operations from which an iteration is composed; a runtime decides where they run."""

    iteration: int

    def collect(self, horizon: int) -> Rollouts:
        """Run ``horizon`` control steps in every environment, episode after episode.

        Returns shards ``[T, B]`` in the order of the environments.
        """

    def collect_groups(self, groups: int, attempts: int, draw: int) -> Rollouts:
        """Run ``groups`` new episodes of this iteration in full, each ``attempts`` times.

        Returns shards of whole groups: ``[N]`` calls in order of (episode, attempt, step). Each
        ``draw`` gives other episodes.
        """

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Set the recipe's reward in each shard."""

    def reference(self, rollouts: Rollouts) -> Rollouts:
        """Add the log-probabilities of the initial policy to each shard."""

    def update(self, batch: Batch, algorithm: OnPolicy, value_only: bool = False) -> bool:
        """Update the policy; return whether to stop this iteration (see ``OnPolicy.enough``)."""

    def publish(self) -> None:
        """Make the weights the next policy version, which later rollouts use."""

    def log(self, metrics: dict[str, float]) -> None: ...


class OnPolicy(CostLimited):
    """Base class of on-policy algorithms: the loss. Subclasses implement ``iteration``."""

    entropy_coef: float
    """Coefficient of the entropy in this iteration."""
    rate: float
    """Share of the learning rates in this iteration."""
    value_coef = 0.0
    value_clip: float | None = None
    value_huber: float | None = None

    def __init__(self, config: Any, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        self.clip = Clip(
            config.clip_low, config.clip_high, config.dual_clip, config.behaviour_limit
        )
        if config.staleness and not config.decoupled:
            raise UserError(
                f"algorithm.staleness={config.staleness} needs the decoupled objective: set algorithm.decoupled=true"
            )
        if config.recompute_log_prob and config.decoupled:
            raise UserError(
                "algorithm.recompute_log_prob=true: the decoupled objective needs the rollout's log-probabilities; remove one of both"
            )

        if config.minibatch_size % config.row_groups:
            raise UserError(
                f"algorithm.row_groups={config.row_groups} does not divide algorithm.minibatch_size={config.minibatch_size}"
            )

    def state(self) -> dict[str, Any]:
        state = super().state()
        if self.config.entropy_coef_end is not None:
            state[ENTROPY_COEF] = self.entropy_coef
        if self.config.learning_rate_end < 1:
            state[LEARNING_RATE] = self.rate
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.entropy_coef = float(state.get(ENTROPY_COEF, self.config.entropy_coef))
        self.rate = float(state.get(LEARNING_RATE, 1.0))

    @property
    def ends_with_run(self) -> str | None:
        end, rate = self.config.entropy_coef_end, self.config.learning_rate_end
        if end is not None:
            return f"algorithm.entropy_coef_end={end}: it is reached in the last iteration"
        if rate < 1:
            return f"algorithm.learning_rate_end={rate}: it is reached in the last iteration"
        return None

    def schedule(self, iteration: int) -> dict[str, float]:
        """Set what changes from iteration to iteration; return it as metrics."""
        config = self.config
        done = min(1.0, iteration / max(1, self.iterations - 1))
        metrics = {}
        if config.entropy_coef_end is not None:
            change = config.entropy_coef_end - config.entropy_coef
            self.entropy_coef = config.entropy_coef + done * change
            metrics[f"actor/{ENTROPY_COEF}"] = self.entropy_coef
        if config.learning_rate_end < 1:
            self.rate = 1 + done * (config.learning_rate_end - 1)
            metrics[f"actor/{LEARNING_RATE}"] = self.rate * config.learning_rate
        return metrics

    @property
    def keeps_reference(self) -> bool:
        return self.config.kl_coef > 0

    @property
    def keeps_proximal(self) -> bool:
        return self.config.decoupled

    def prepared(self, flow: Flow, rollouts: Rollouts) -> Rollouts:
        """Set each shard's reward, less the cost's penalty; with ``kl_coef`` add ``reference``.

        An iteration begins with it: it also sets the coefficients that change in the run.
        """
        flow.log(self.schedule(flow.iteration))
        rollouts = flow.score(rollouts)
        rollouts = flow.reference(rollouts) if self.config.kl_coef else rollouts
        return Charged(rollouts, self.multiplier) if self.multiplier else rollouts

    def minibatch_size(self, batch: Batch) -> int:
        """Return the number of policy calls per optimiser step."""
        return self.config.minibatch_size

    def weighted(self, calls: Trajectory, advantage: Tensor) -> Batch:
        """Return ``calls`` ``[N]`` as a batch with aggregation weights, which are 1 on average."""
        mask = element_mask(calls.valid, calls.log_prob.shape[-1], self.config.granularity)
        weight = aggregation_weights(
            mask, calls.episode_ids(), calls.group_ids(), self.config.aggregation
        )
        return Batch(calls, advantage, weight * calls.valid.any(-1).sum())

    def loss(
        self, policy: Policy, batch: Batch, value_only: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss and summed statistics of a micro-batch."""
        config, calls = self.config, batch.calls
        new = policy.evaluate(calls.inputs, calls.latent, self.temperature)
        mask = element_mask(calls.valid, new.log_prob.shape[-1], config.granularity)
        log_prob, old, proximal, reference = (
            None if tensor is None else elements(tensor, calls.valid, config.granularity)
            for tensor in (new.log_prob, calls.log_prob, batch.proximal, calls.reference)
        )
        assert log_prob is not None and old is not None
        actor, statistics = policy_loss(
            log_prob, old, batch.advantage, mask, batch.weight, self.clip, proximal
        )
        entropy = joint(new.entropy, calls.valid).sum()
        each = torch.where(batch.counts, new.entropy.mean(dim=(-2, -1)), 0).sum()
        summed = {"actor/pg_loss": actor, "actor/entropy": entropy, "actor/entropy_each": each} | {
            f"actor/{name}": value for name, value in statistics.items()
        }
        total = torch.zeros_like(actor) if value_only else actor - self.entropy_coef * entropy
        if reference is not None:
            k3, k1 = kl_loss(log_prob, reference, mask, batch.weight)
            summed |= {"actor/kl_loss": k3, "actor/reference_kl": k1}
            total = total if value_only else total + config.kl_coef * k3
        if batch.target is not None:
            critic = value_loss(
                new.value,
                calls.value,
                batch.target,
                batch.counts,
                self.value_clip,
                self.value_huber,
            )
            summed["critic/vf_loss"] = critic
            total = total + self.value_coef * critic
        return total, {name: value.detach() for name, value in summed.items()}

    def enough(self, metrics: dict[str, float]) -> bool:
        """Return whether the KL to the policy that collected the data exceeds ``target_kl``."""
        return (
            self.config.target_kl is not None
            and metrics.get("actor/approx_kl", 0.0) > self.config.target_kl
        )

"""Compute loss terms as masked, weighted sums.

The caller divides by a global count, so the split into micro-batches and ranks does not change the
loss. ``N`` policy calls have ``K`` elements each: the units whose probability ratio is clipped, see
:func:`elements`. A mask ``[N, K]`` selects elements; a weight ``[N]`` applies to each element of a
call, see :func:`aggregation_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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

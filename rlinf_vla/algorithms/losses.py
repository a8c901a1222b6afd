"""Loss terms as sums over the calls that count, for the caller to divide by a global count: neither micro-batches nor ranks change them."""

from __future__ import annotations

import torch
from torch import Tensor


def safe_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``log(pi / pi_old)`` and the ratio itself; 0 and 1 behind the mask.

    Masked and clamped before ``exp``: an overflow behind a ``where`` after it would still make the gradient NaN.
    """
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0).clamp(-20, 20)
    return log_ratio, log_ratio.exp()


def ppo_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with separate lower and upper ranges. All tensors ``[N]``.

    Returns the summed loss and summed statistics: ``approx_kl`` (k3 of http://joschu.net/blog/kl-approx.html), ``ppo_kl`` (k1) and
    ``clip_fraction``.
    """
    log_ratio, ratio = safe_ratio(log_prob, old_log_prob, mask)
    advantage = torch.where(mask, advantage, 0)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    with torch.no_grad():
        statistics = {
            "approx_kl": (ratio - 1 - log_ratio).sum(),
            "ppo_kl": -log_ratio.sum(),
            "clip_fraction": (((ratio < 1 - clip_low) | (ratio > 1 + clip_high)) & mask).float().sum(),
        }
    return torch.where(mask, loss, 0).sum(), statistics


def value_loss(value: Tensor, old_value: Tensor, target: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """Summed ``0.5 (target - value)**2`` over ``[N]``.

    With ``clip``: the worse of that and the loss of the value held within ``clip`` of the old one.
    """
    value, target = torch.where(mask, value, 0), torch.where(mask, target, 0)
    loss = (target - value) ** 2
    if clip is not None:
        old_value = torch.where(mask, old_value, 0)
        held = old_value + (value - old_value).clamp(-clip, clip)
        loss = torch.maximum(loss, (target - held) ** 2)
    return 0.5 * torch.where(mask, loss, 0).sum()


def joint(per_dimension: Tensor, valid: Tensor) -> Tensor:
    """Log-probability (or entropy) of a chunk: the sum over executed actions. ``[N, C, D]``, ``[N, C]`` -> ``[N]``."""
    return torch.where(valid[..., None], per_dimension, 0).sum(dim=(-2, -1))

"""Pure functions for advantages and returns on action chunks (shape letters: ``types.py``)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.core.types import Trajectory

BASELINES = ("group_mean", "leave_one_out", "batch_mean")
SCALES = ("group_std", "batch_std", "none")
GAMMA_UNITS = ("step", "chunk")

RESOLUTION = 1e-6
"""Relative difference below which scores count as equal: sums of float32 rewards are rounded."""


def chunk_rewards(
    reward: Tensor, valid: Tensor, gamma: float, unit: str = "step"
) -> tuple[Tensor, Tensor]:
    """Treat a chunk of n executed steps as one step of a semi-Markov decision process.

    Sutton, Precup and Singh 1999. reward, valid: ``[..., C]``. Returns the discounted reward
    ``sum_i gamma**i r_i`` and the discount ``gamma**n``, both ``[...]``. With ``unit="chunk"``,
    returns the plain sum and ``gamma`` (``gamma**0`` where nothing was executed).
    """
    elapsed = (
        (valid.cumsum(-1) - 1).clamp(min=0).to(reward.dtype)
    )  # with a deadline the first executed action may have any place
    duration = valid.sum(-1)
    if unit == "chunk":
        elapsed = torch.zeros_like(elapsed)
        duration = duration.clamp(max=1)
    return torch.where(valid, reward * gamma**elapsed, 0).sum(-1), gamma ** duration.to(
        reward.dtype
    )


def gae(
    trajectory: Trajectory, gamma: float, gae_lambda: float, unit: str = "step"
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages on chunks and the returns ``advantage + value``, both ``[T, B]``.

    Schulman et al. 2016, eq. 16. ``gamma`` is per control step (or per chunk: ``unit``),
    ``gae_lambda`` per policy call. The value after a terminated episode is 0; after one that was
    cut (truncated, by the end of the rollout, or terminated under ``bootstrap=always``) it is
    ``bootstrap_value``. Episodes do not affect each other.
    """
    reward, discount = chunk_rewards(trajectory.reward, trajectory.valid, gamma, unit)
    terminated = (trajectory.terminated & trajectory.valid).any(-1)
    following = torch.cat([trajectory.value[1:], torch.zeros_like(trajectory.value[:1])])
    following = torch.where(trajectory.cut, trajectory.bootstrap_value, following)
    delta = (
        reward
        + discount * torch.where(terminated & ~trajectory.cut, 0, following)
        - trajectory.value
    )
    carry = torch.where(terminated | trajectory.cut, 0, discount * gae_lambda)
    advantage = torch.zeros_like(delta)
    running = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage, advantage + trajectory.value


def episode_returns(calls: Trajectory, gamma: float, unit: str = "step") -> Tensor:
    """Return the discounted return of each episode, float64 ``[E]``, from ``N`` calls in any order.

    In float64, so that the order of summation, which is not fixed on a GPU, does not change the
    result in float32.
    """
    reward, _ = chunk_rewards(calls.reward.double(), calls.valid, gamma, unit)
    # every call of an episode but its last executes its whole chunk
    elapsed = calls.step if unit == "step" else calls.step // calls.reward.shape[-1]
    ids = calls.episode_ids()
    return reward.new_zeros(count_of(ids)).index_add(
        0, ids, gamma ** elapsed.to(reward.dtype) * reward
    )


def count_of(ids: Tensor) -> int:
    """Return the number of distinct ``ids``, which are 0, 1, ... without gaps."""
    return int(ids.max()) + 1 if len(ids) else 0


def group_statistics(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return size, mean and biased standard deviation ``[G]`` of groups of ``values`` ``[E]``."""
    zeros = torch.zeros(count_of(group), dtype=values.dtype, device=values.device)
    size = zeros.index_add(0, group, torch.ones_like(values))
    mean = zeros.index_add(0, group, values) / size
    variance = zeros.index_add(0, group, (values - mean[group]) ** 2) / size
    return size, mean, variance.sqrt()


def all_equal(values: Tensor, group: Tensor) -> Tensor:
    """Return whether a group's ``values`` ``[E]`` are equal up to ``RESOLUTION``, bool ``[G]``.

    The standard deviation is no test: the rounded mean of equal numbers often differs from them.
    """
    zeros = torch.zeros(count_of(group), dtype=values.dtype, device=values.device)
    low, high = (
        zeros.scatter_reduce(0, group, values, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    return high - low <= RESOLUTION * torch.maximum(low.abs(), high.abs())


def relative_advantages(
    score: Tensor, group: Tensor, baseline: str, scale: str, eps: float = 1e-6
) -> Tensor:
    """Return each episode's advantage relative to a baseline, ``[E]``.

    ``score`` and ``group`` (int64, from 0 on): ``[E]``. ``baseline``: mean of the episode's group
    (GRPO, arXiv 2402.03300, eq. 4.1.2), of the group's others (RLOO, 2402.14740, eq. 7) or of all
    episodes. ``scale``: divide by the standard deviation of the group, or of all differences
    (REINFORCE++, 2501.03262), or not at all (Dr. GRPO, 2503.20783). Where all compared scores are
    equal, the advantage is exactly 0.
    """
    size, mean, std = group_statistics(score, group)
    if baseline == "batch_mean":
        nothing = all_equal(score, torch.zeros_like(group)).expand(len(score))
        difference = torch.where(nothing, 0, score - score.mean())
    else:
        difference = torch.where(all_equal(score, group)[group], 0, score - mean[group])
        if baseline == "leave_one_out":
            difference = difference * (size / (size - 1).clamp(min=1))[group]
    if scale == "none":
        return difference
    return difference / (
        (std[group] if scale == "group_std" else difference.std(unbiased=False)) + eps
    )


def standardise(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Scale ``values`` to zero mean and unit (biased) variance over ``mask``.

    The result is zero outside ``mask``, and everywhere if the entries in ``mask`` are all equal.
    """
    count = mask.sum().clamp(min=1)
    masked_values = torch.where(mask, values, 0)
    mean = masked_values.sum() / count
    variance = torch.where(mask, (masked_values - mean) ** 2, 0).sum() / count
    flat = all_equal(values[mask], torch.zeros_like(values[mask], dtype=torch.int64)).any()
    return torch.where(mask & ~flat, (masked_values - mean) / (variance + eps).sqrt(), 0)


def explained_variance(prediction: Tensor, target: Tensor, mask: Tensor) -> float:
    """Return ``1 - Var[target - prediction] / Var[target]`` over ``mask``; NaN without variance."""
    prediction, target = prediction[mask].double(), target[mask].double()
    variance = target.var(unbiased=False)
    return (
        float(1 - (target - prediction).var(unbiased=False) / variance)
        if variance > 0
        else float("nan")
    )

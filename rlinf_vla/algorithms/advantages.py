"""Advantages and returns on action chunks. Pure functions; ``T`` policy calls, ``B`` environments, ``C`` control steps per call."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.types import Trajectory


def chunk_rewards(reward: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """A chunk of n executed steps as one step of a semi-Markov decision process (Sutton, Precup and Singh 1999).

    reward, valid: ``[..., C]``. Returns the discounted reward ``sum_i gamma**i r_i`` and the discount ``gamma**n``, both ``[...]``.
    """
    powers = gamma ** torch.arange(reward.shape[-1], device=reward.device, dtype=reward.dtype)
    return torch.where(valid, reward * powers, 0).sum(-1), gamma ** valid.sum(-1).to(reward.dtype)


def gae(trajectory: Trajectory, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) on chunks, and the returns ``advantage + value``, both ``[T, B]``.

    ``gamma`` counts control steps, ``gae_lambda`` policy calls. A terminated episode is worth nothing more; one that was cut (truncated,
    or the end of the rollout) is worth ``bootstrap_value``. Nothing flows from one episode into another.
    """
    reward, discount = chunk_rewards(trajectory.reward, trajectory.valid, gamma)
    terminated = (trajectory.terminated & trajectory.valid).any(-1)
    following = torch.cat([trajectory.value[1:], torch.zeros_like(trajectory.value[:1])])
    following = torch.where(trajectory.cut, trajectory.bootstrap_value, following)
    delta = reward + discount * torch.where(terminated, 0, following) - trajectory.value
    carry = torch.where(terminated | trajectory.cut, 0, discount * gae_lambda)
    advantage = torch.zeros_like(delta)
    running = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage, advantage + trajectory.value


def standardise(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit (biased) variance over the true entries of ``mask``; zero elsewhere."""
    count = mask.sum().clamp(min=1)
    kept = torch.where(mask, values, 0)
    mean = kept.sum() / count
    variance = torch.where(mask, (kept - mean) ** 2, 0).sum() / count
    return torch.where(mask, (kept - mean) / (variance + eps).sqrt(), 0)


def explained_variance(prediction: Tensor, target: Tensor, mask: Tensor) -> float:
    """``1 - Var[target - prediction] / Var[target]`` over the true entries of ``mask``; NaN where the target is constant."""
    prediction, target = prediction[mask].double(), target[mask].double()
    variance = target.var(unbiased=False)
    return float(1 - (target - prediction).var(unbiased=False) / variance) if variance > 0 else float("nan")

"""Rectified-flow sampling steps and their log-probabilities, as pure functions.

``t = 1`` is noise and ``t = 0`` the action: ``x_t = t * noise + (1 - t) * action``. The network's
velocity is ``E[noise - action | x_t]``; it predicts the action ``x - t v`` and the noise
``x + (1 - t) v``. Time decreases in ``K`` equal steps of ``delta = 1 / K``.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def times(steps: int, device: torch.device | str | None = None) -> Tensor:
    """Return times ``[K]``: 1, 1 - delta, ..., delta; accumulated in float32, as in openpi."""
    delta = np.float32(-1.0 / steps)
    time = np.float32(1.0)
    result = []
    for _ in range(steps):
        result.append(torch.full((), float(time), device=device))
        time = time + delta
    return torch.stack(result)


def ode_step(x: Tensor, velocity: Tensor, steps: int) -> Tensor:
    """Return ``x`` after one Euler step."""
    return x - velocity / steps


def sde_step(
    x: Tensor, velocity: Tensor, time: Tensor, steps: int, noise_level: float
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a stochastic step with the marginals of the flow.

    Source: Flow-GRPO (arXiv 2505.05470), piRL (2510.25889).
    ``dx = [v - sigma**2 / 2 * score] dt + sigma dw``, ``score = -(x + (1 - t) v) / t``,
    ``sigma = noise_level * sqrt(t / (1 - t))``. At ``t = 1``, where sigma is singular, ``1 - t`` is
    taken at the end of the step (as in RLinf): the first standard deviation is ``noise_level``.
    ``time``: ``[B]``; x, velocity and mean: ``[B, ...]``; the standard deviation is broadcastable.
    """
    delta = 1.0 / steps
    t = time.reshape(-1, *[1] * (x.ndim - 1))
    remaining = torch.where(t >= 1 - 0.5 * delta, delta, 1 - t)
    sigma = noise_level * (t / remaining).sqrt()
    action = x - t * velocity
    noise = x + (1 - t) * velocity
    mean = (1 - (t - delta)) * action + (t - delta - sigma**2 * delta / (2 * t)) * noise
    return mean, sigma * math.sqrt(delta)


def gaussian_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the elementwise log-density; 0 where ``std`` is 0 (a deterministic step)."""
    std = std.expand_as(mean)
    certain = std == 0
    safe = torch.where(certain, 1.0, std)
    log_prob = -0.5 * ((value - mean) / safe) ** 2 - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(certain, 0.0, log_prob)


def standard_log_prob(noise: Tensor) -> Tensor:
    """Return the elementwise log-density of a chain's initial noise."""
    return gaussian_log_prob(noise, torch.zeros_like(noise), torch.ones_like(noise))


def gaussian_entropy(std: Tensor) -> Tensor:
    """Return the elementwise differential entropy; 0 where ``std`` is 0."""
    certain = std == 0
    return torch.where(
        certain, 0.0, 0.5 * math.log(2 * math.pi * math.e) + torch.where(certain, 1.0, std).log()
    )


def interpolate(actions: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x_t`` and its target velocity; ``time``: ``[B]``, or of each action ``[B, H]``."""
    t = time.reshape(*time.shape, *[1] * (actions.ndim - time.ndim))
    return t * noise + (1 - t) * actions, noise - actions


def matching_loss(velocity: Tensor, target: Tensor, time: Tensor) -> Tensor:
    """Return the mean squared error ``[B]`` of velocities ``[B, H, A]``; if ``time`` is ``[B, H]``,
    without given actions, whose time is 0."""
    error = (velocity - target) ** 2
    if time.ndim == 1:
        return error.mean(dim=(1, 2))
    counted = time > 0
    return (error.mean(dim=2) * counted).sum(1) / counted.sum(1)


def training_times(uniform: Tensor) -> Tensor:
    """Map uniform draws in (0, 1) to ``0.999 Beta(1.5, 1) + 0.001`` by the inverse CDF."""
    return 0.999 * uniform ** (2 / 3) + 0.001

"""Heads on π₀'s states for reinforcement learning: MLPs, and the noise head of flow_noise."""

from __future__ import annotations

import math

from torch import Tensor, nn


def mlp(input_dim: int, *sizes: int, activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip((input_dim, *sizes), sizes, strict=False):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


class NoiseHead(nn.Module):
    """Standard deviations of flow_noise from the expert's states, between ``low`` and ``high``.

    Source: RLinf's ``explore_noise_net``.
    """

    def __init__(self, width: int, action_dim: int, low: float, high: float) -> None:
        super().__init__()
        self.mlp = mlp(width, 128, 64, action_dim, activation=nn.Tanh)
        self.low, self.high = 2 * math.log(low), 2 * math.log(high)

    def forward(self, states: Tensor) -> Tensor:
        """Return standard deviations ``[B, H, action_dim]``."""
        log_variance = self.low + (self.high - self.low) * (self.mlp(states.float()).tanh() + 1) / 2
        return (0.5 * log_variance).exp()

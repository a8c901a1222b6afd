"""Real-time chunking: make a new chunk continue the actions executed while it is denoised.

Any flow policy can be guided: Black, Galliker and Levine, "Real-Time Execution of Action Chunking
Flow Policies" (2025, arXiv 2506.07339), section 4, with the guidance of ΠGDM (Song et al. 2023,
Pokle et al. 2024). The paper's time runs from noise to action; ours is ``t = 1 - tau``, with
opposite velocities (``flow.py``).

A policy that was trained with simulated delays is conditioned on these actions: Black et al.,
"Training-Time Action Conditioning for Efficient Real-Time Chunking" (2025, arXiv 2512.05964). They
enter the network as denoised actions, each at ``t = 0``; no gradient is needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .flow_network import Velocity

MAX_GUIDANCE = 5.0
"""The paper's beta; larger values make chunks discontinuous with few denoising steps."""


def prefix_weights(committed: int, frozen: int, horizon: int) -> Tensor:
    """Return the guidance weight ``[H]`` of each action towards the committed ones (equation 5).

    1 for the first ``frozen`` actions, which will have been executed by then; decays to 0 at
    ``committed``, after which there is no target.
    """
    index = torch.arange(horizon, dtype=torch.float32)
    falling = ((committed - index) / (committed - frozen + 1)).clamp(0, 1)
    soft = falling * torch.expm1(falling) / math.expm1(1)
    return torch.where(index < frozen, 1.0, soft).where(index < committed, 0.0)


def guidance(time: Tensor) -> Tensor:
    """Return ``(1 - tau) / (tau r**2)``, at most MAX_GUIDANCE (equations 2 and 4).

    ``r**2 = (1 - tau)**2 / (tau**2 + (1 - tau)**2)``.
    """
    return ((time**2 + (1 - time) ** 2) / (time * (1 - time))).clamp(max=MAX_GUIDANCE)


def guided_velocity(velocity: Velocity, target: Tensor, weights: Tensor) -> Velocity:
    """Return the velocity guided towards ``target`` by ``weights`` (equation 2).

    Both are broadcastable to ``[B, H, A]``. Each step takes one vector-Jacobian product, from the
    predicted actions (equation 3) back through the network to ``x``.
    """

    def pulled(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            prediction, states = velocity(x, time)
            actions = x - time * prediction
        (pull,) = torch.autograd.grad(actions, x, (target - actions.detach()) * weights)
        return prediction.detach() - guidance(time) * pull, states.detach()

    return pulled


def conditioned_velocity(velocity: Velocity, given: Tensor, frozen: int) -> Velocity:
    """Return the velocity of chunks whose first ``frozen`` actions are those of ``given``
    ``[B, H, A]``; what it says of these actions themselves means nothing."""

    def conditioned(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(x.shape[1], device=x.device) < frozen
        return velocity(
            torch.where(mask[:, None], given, x), torch.where(mask, 0.0, time).expand(x.shape[:2])
        )

    return conditioned


def simulated_times(time: Tensor, uniform: Tensor, longest: int, horizon: int) -> Tensor:
    """Return the time of each action ``[B, H]``: 0 for those that a delay has made past, else
    ``time`` ``[B]``.

    Delays are 0 to ``longest`` control steps with equal probability; ``uniform`` ``[B]``, in
    (0, 1), draws them.
    """
    delay = (uniform * (longest + 1)).long().clamp(max=longest)
    return torch.where(
        torch.arange(horizon, device=time.device) < delay[:, None], 0.0, time[:, None]
    )

"""Real-time chunking: a new chunk that continues what the robot does while it is denoised. Black, Galliker and Levine, "Real-Time Execution
of Action Chunking Flow Policies" (2025, arXiv 2506.07339), section 4; its guidance is that of ΠGDM (Song et al. 2023, Pokle et al. 2024).

The paper's time runs from noise to action; ours is ``t = 1 - tau``, and velocities point the other way (``flow.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of ``x`` ``[B, H, A]`` at a time ``[]``: the flow's velocity ``[B, H, A]``, and the network's states."""

MAX_GUIDANCE = 5.0
"""The paper's beta: more makes chunks jump where there are few denoising steps."""


def prefix_weights(committed: int, frozen: int, horizon: int) -> Tensor:
    """How much each action of a chunk shall be what is committed, ``[H]`` (equation 5).

    1 for the ``frozen`` first, which will have been executed; falling to 0 after the ``committed`` ones, of which nothing is known.
    """
    place = torch.arange(horizon, dtype=torch.float32)
    falling = ((committed - place) / (committed - frozen + 1)).clamp(0, 1)
    soft = falling * torch.expm1(falling) / math.expm1(1)
    return torch.where(place < frozen, 1.0, soft).where(place < committed, 0.0)


def guidance(time: Tensor) -> Tensor:
    """``(1 - tau) / (tau r**2)``, where ``r**2 = (1 - tau)**2 / (tau**2 + (1 - tau)**2)``; at most MAX_GUIDANCE (equations 2 and 4)."""
    return ((time**2 + (1 - time) ** 2) / (time * (1 - time))).clamp(max=MAX_GUIDANCE)


def guided(velocity: Velocity, target: Tensor, weights: Tensor) -> Velocity:
    """The same flow, pulled towards actions ``target`` where ``weights`` say so, both broadcastable to ``[B, H, A]`` (equation 2).

    One vector-Jacobian product a step carries the pull from the expected actions (equation 3) back through the network to ``x``.
    """

    def pulled(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found, states = velocity(x, time)
            actions = x - time * found
        (pull,) = torch.autograd.grad(actions, x, (target - actions.detach()) * weights)
        return found.detach() - guidance(time) * pull, states.detach()

    return pulled

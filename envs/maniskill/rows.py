"""Ask about what differs between the environments of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def by_row(chosen: Sequence[Any], question: Callable[[Any], Tensor]) -> Tensor:
    """Answer for each row the question about what is chosen in it: ``[num_envs, ...]``.

    A question is answered for all rows at once.
    """
    first, *others = dict.fromkeys(chosen)
    answer = question(first)
    for other in others:
        rows = torch.tensor([choice == other for choice in chosen], device=answer.device)
        answer = torch.where(rows.view(-1, *[1] * (answer.ndim - 1)), question(other), answer)
    return answer


def stacked_poses(poses: Sequence[Any], device: torch.device) -> Tensor:
    """Positions and quaternions of SAPIEN's poses, one per row: float32 ``[b, 7]``."""
    return torch.tensor(
        np.stack([np.concatenate([pose.p, pose.q]) for pose in poses]),
        dtype=torch.float32,
        device=device,
    )

"""The gripper's number of an action, the last one: 0 (closed) to 1 (open) in datasets."""

from __future__ import annotations

import torch
from torch import Tensor


def to_environment(actions: Tensor, sign: int) -> Tensor:
    """Convert actions ``[..., D]`` of a dataset: above 0.5 the gripper opens, below it closes.

    Source: openvla ``robot_utils.py`` (``normalize_gripper_action``, ``invert_gripper_action``).
    """
    if sign == 0:
        return actions
    return torch.cat([actions[..., :-1], sign * (2 * actions[..., -1:] - 1).sign()], dim=-1)


def to_dataset(actions: Tensor, sign: int) -> Tensor:
    """Invert :func:`to_environment`: ±1 to 0 or 1."""
    if sign == 0:
        return actions
    return torch.cat([actions[..., :-1], (1 + sign * actions[..., -1:]) / 2], dim=-1)

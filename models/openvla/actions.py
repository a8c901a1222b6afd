"""Discretise actions as tokens. Source: openvla ``action_tokenizer.py`` and ``predict_action``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..gripper import to_dataset, to_environment
from ..options import GRIPPERS
from ..statistics import read_mask, read_range

BOUNDS = {"q99": ("q01", "q99"), "min_max": ("min", "max")}
"""Statistics that become -1 and 1: BOUNDS_Q99 and, for ALOHA, BOUNDS of openvla-oft's constants."""


class ProprioNormalizer(nn.Module):
    """Scale proprioception to [-1, 1] by two of its statistics (BOUNDS), as in openvla-oft: a
    dimension outside the ``mask`` is only clipped. Raises UserError."""

    def __init__(
        self, statistics: dict[str, Any], bounds: str = "q99", where: str = "proprio"
    ) -> None:
        super().__init__()
        low, high = read_range(statistics, BOUNDS[bounds], where)
        self.register_buffer("low", low.float(), persistent=False)
        self.register_buffer("high", high.float(), persistent=False)
        self.register_buffer("mask", read_mask(statistics, len(low), where), persistent=False)

    low: Tensor
    high: Tensor
    mask: Tensor

    def forward(self, state: Tensor) -> Tensor:
        scaled = 2 * (state - self.low) / (self.high - self.low + 1e-8) - 1
        return torch.where(self.mask, scaled, state).clamp(-1, 1)


class ActionTokenizer(nn.Module):
    """Discretise actions into uniform bins on [-1, 1], and un-normalise them to environment units.

    Token ids run **downwards**: the highest action has the lowest id. ``n_bins`` edges leave
    ``n_bins - 1`` centres; the two lowest ids decode to the same centre, as in the official code.
    """

    def __init__(
        self,
        vocab_size: int,
        n_bins: int,
        statistics: dict[str, Any],
        gripper: str = "raw",
        bounds: str = "q99",
        where: str = "action",
    ) -> None:
        """``statistics``: those of ``bounds`` (BOUNDS) and optional ``mask`` per dimension.

        ``vocab_size``: without padding rows (32000 in Llama 2). ``gripper``: key of GRIPPERS. The
        last dimension of a checkpoint runs from 0 closed to 1 open (raw); the others map it to ±1
        at 0.5. ``where`` begins messages on the statistics. Raises UserError.
        """
        super().__init__()
        self.n_bins = n_bins
        self.gripper = GRIPPERS[gripper]
        self.first_id = vocab_size - n_bins
        low, high = read_range(statistics, BOUNDS[bounds], where)
        mask = read_mask(statistics, len(low), where)
        self.zero_to_one = bool(low[-1] >= 0 and 0.5 < high[-1] <= 1)
        edges = torch.from_numpy(
            np.linspace(-1, 1, n_bins)
        )  # torch.linspace differs in the last bit
        # a dimension outside the mask (a binary gripper) is not normalised
        self.register_buffer(
            "scale", torch.where(mask, 0.5 * (high - low), 1.0).float(), persistent=False
        )
        self.register_buffer(
            "offset", torch.where(mask, 0.5 * (high + low), 0.0).float(), persistent=False
        )
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("centres", (0.5 * (edges[:-1] + edges[1:])).float(), persistent=False)

    scale: Tensor
    offset: Tensor
    edges: Tensor
    centres: Tensor

    @property
    def gripper_convention(self) -> str | None:
        """Return what the last dimension means (``Convention.gripper``); None if not known.

        The official statistics leave it in the range from 0 (closed) to 1 (open).
        """
        if self.gripper:
            return "open_positive" if self.gripper > 0 else "close_positive"
        return "zero_to_one" if self.zero_to_one else None

    @property
    def action_dim(self) -> int:
        return len(self.scale)

    def encode(self, actions: Tensor) -> Tensor:
        """Convert environment units ``[..., D]`` to token ids int64 ``[..., D]``."""
        # in float64 like numpy.digitize, so that an action on an edge keeps its bin
        return (
            self.first_id
            + self.n_bins
            - torch.bucketize(self.normalise(actions.double()), self.edges, right=True)
        )

    def decode(self, token_ids: Tensor) -> Tensor:
        """Convert token ids ``[..., D]`` to environment units float32 ``[..., D]``."""
        index = (self.first_id + self.n_bins - token_ids - 1).clamp(0, self.n_bins - 2)
        return self.denormalise(self.centres[index])

    def normalise(self, actions: Tensor) -> Tensor:
        """Convert environment to model units ``[..., D]``, from -1 at the low bound to 1.

        What is beyond is clipped, and a constant dimension is 0, as in the official training data:
        ``prismatic/vla/datasets/rlds/utils/data_utils.py``, ``normalize_action_and_proprio``.
        """
        actions = to_dataset(actions, self.gripper)
        return torch.where(self.scale > 0, (actions - self.offset) / self.scale, 0).clamp(-1, 1)

    def denormalise(self, normalised: Tensor) -> Tensor:
        """Convert model units ``[..., D]`` to environment units."""
        return to_environment(normalised * self.scale + self.offset, self.gripper)

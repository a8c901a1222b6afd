"""Check the actions in a server's answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.config.errors import Failure


def checked(
    actions: Any, url: str, leading: tuple[int, ...], chunk: int, action_dim: int
) -> Tensor:
    """Return ``actions`` as float32 ``[*leading, chunk, D]``; a longer chunk is cut.

    Raises Failure if they have another shape, are no floating-point numbers, or are not finite.
    """
    expected = "x".join(map(str, [*leading, chunk, action_dim]))
    if not isinstance(actions, np.ndarray) or actions.dtype.kind != "f":
        kind = (
            f"dtype {actions.dtype}" if isinstance(actions, np.ndarray) else type(actions).__name__
        )
        raise Failure(
            f"the policy server {url} sends actions as {kind}, an array of floating-point numbers is needed"
        )
    fits = (
        actions.ndim == len(leading) + 2
        and actions.shape[:-2] == leading
        and actions.shape[-1] == action_dim
    )
    if not fits or actions.shape[-2] < chunk:
        raise Failure(
            f"the policy server {url} sends actions of shape {'x'.join(map(str, actions.shape))}, {expected} or a longer chunk is needed"
        )
    tensor = torch.from_numpy(actions[..., :chunk, :].copy()).float()
    if not tensor.isfinite().all():
        raise Failure(f"the policy server {url} sends an action that is not a finite number")
    return tensor

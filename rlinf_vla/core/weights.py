"""What is wrong with a tensor that was read from somebody's file."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fault(tensor: Tensor) -> str | None:
    """Return what is wrong with a weight, as a phrase that follows its name; None if nothing is."""
    if tensor.dtype not in KINDS:
        return f"holds {str(tensor.dtype).removeprefix('torch.')}, quantised weights are not supported: convert them to bfloat16"
    # aminmax propagates NaN and, unlike isfinite, allocates no tensor of the same size
    if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
        return "holds NaN or infinite values, the file is damaged: copy it again"
    return None

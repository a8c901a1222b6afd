"""Tensors that are cut over ranks (DTensors), and the piece of each that this rank holds. A tensor that is not cut is its own piece.

torch's part of it is imported when used: that takes a second. Its arithmetic is not used at all: every call on a DTensor costs, and the
optimiser treats each number by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rlinf_vla.training.ranks import rank
from rlinf_vla.types import Tensors


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def own_piece(parameter: nn.Parameter) -> nn.Parameter:
    """In the same memory."""
    if not is_sharded(parameter):
        return parameter
    sharded: Any = parameter.detach()
    return nn.Parameter(sharded.to_local())


def own_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient: Any = parameter.grad
    return gradient.to_local() if gradient is not None and is_sharded(gradient) else gradient


def own_copy(like: Tensor, value: Tensor) -> Tensor:
    """Of ``value``, which every rank has whole, the piece that belongs to ``like``, beside it in memory."""
    if is_sharded(like):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = like
        value = distribute_tensor(value.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()
    return value.to(like.device, copy=True)


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Into ``target``, or into this rank's piece of it."""
    sharded: Any = target
    if is_sharded(target):
        sharded.to_local().copy_(own_copy(target, value))
    else:
        target.copy_(value)


def piece_of(whole: Tensor, piece: Tensor) -> Tensor:
    """``piece`` as this rank's part of a tensor that is cut as ``whole`` is."""
    if not is_sharded(whole):
        return piece
    from torch.distributed.tensor import DTensor

    like: Any = whole
    return DTensor.from_local(piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def gathered(tensors: Mapping[str, Tensor]) -> Tensors:
    """As they are; where some are sharded, whole and on the CPU for rank 0, and none for the others. Every rank must ask."""
    if not any(map(is_sharded, tensors.values())):
        return dict(tensors)
    found: Tensors = {}
    for name, tensor in tensors.items():
        sharded: Any = tensor
        whole = sharded.full_tensor() if is_sharded(tensor) else tensor
        if rank() == 0:
            found[name] = whole.cpu()
    return found


def clip_pieces(pieces: Iterable[nn.Parameter], limit: float) -> Tensor:
    """``clip_grad_norm_`` by the norm over all ranks' pieces, which it returns."""
    pieces = list(pieces)
    own = nn.utils.get_total_norm([piece.grad for piece in pieces if piece.grad is not None])
    square = own.double().square()
    dist.all_reduce(square)
    norm = square.sqrt().to(own.dtype)
    nn.utils.clip_grads_with_norm_(pieces, limit, norm)
    return norm

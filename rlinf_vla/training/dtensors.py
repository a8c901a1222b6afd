"""Access this rank's pieces of sharded tensors (DTensors). An unsharded tensor is its own piece.

DTensor is imported on first use, because the import takes a second. Its arithmetic is not used:
every operation on a DTensor has overhead, and the optimiser is elementwise anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rlinf_vla.core.types import Tensors
from rlinf_vla.training.data_parallel import rank


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local_shard(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's piece of ``parameter``, in the same memory."""
    if not is_sharded(parameter):
        return parameter
    sharded: Any = parameter.detach()
    return nn.Parameter(sharded.to_local())


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient: Any = parameter.grad
    return gradient.to_local() if gradient is not None and is_sharded(gradient) else gradient


def local_copy(like: Tensor, value: Tensor) -> Tensor:
    """Copy this rank's piece of ``value``, sharded as ``like``, to the device of ``like``.
    Every rank passes the whole ``value``."""
    if is_sharded(like):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = like
        value = distribute_tensor(value.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()
    return value.to(like.device, copy=True)


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Copy the whole ``value`` into ``target``, or into this rank's piece of it."""
    sharded: Any = target
    if is_sharded(target):
        sharded.to_local().copy_(local_copy(target, value))
    else:
        target.copy_(value)


def shard_like(whole: Tensor, piece: Tensor) -> Tensor:
    """Return a tensor sharded as ``whole`` of which ``piece`` is this rank's part."""
    if not is_sharded(whole):
        return piece
    from torch.distributed.tensor import DTensor

    like: Any = whole
    return DTensor.from_local(piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def gather_full(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors unchanged if none is sharded; else gather them on rank 0.

    Then rank 0 gets whole tensors on the CPU, other ranks an empty dict, and all ranks must call
    it.
    """
    if not any(map(is_sharded, tensors.values())):
        return dict(tensors)
    found: Tensors = {}
    for name, tensor in tensors.items():
        sharded: Any = tensor
        whole = sharded.full_tensor() if is_sharded(tensor) else tensor
        if rank() == 0:
            found[name] = whole.cpu()
    return found


def clip_shards(pieces: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip gradients by the norm over the pieces of all ranks; return this norm."""
    pieces = list(pieces)
    own = nn.utils.get_total_norm([piece.grad for piece in pieces if piece.grad is not None])
    square = own.double().square()
    dist.all_reduce(square)
    norm = square.sqrt().to(own.dtype)
    nn.utils.clip_grads_with_norm_(pieces, limit, norm)
    return norm

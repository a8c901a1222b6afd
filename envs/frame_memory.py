"""What the slots of a pool show: memory that the simulator processes write and the parent reads.

It is host memory, or for simulators on a GPU memory of that GPU, which crosses by CUDA IPC. The
parent allocates it, so that it outlives a process that is lost. Only processes that serve batches
import this module; those of single environments need no PyTorch.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from .shared_arrays import SharedArrays, SimulatorSpec, observation_shapes, placed


@dataclass(frozen=True)
class Frames:
    """Views for ``N`` slots; ``jpeg`` holds only what the parent asked for."""

    state: Tensor
    """float32 ``[N, S]``."""
    images: dict[str, Tensor]
    """name -> uint8 ``[N, H, W, 3]``."""
    jpeg: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        return self.state.device

    def settle(self) -> None:
        """Wait until what this process has written or read is done, before the other goes on."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def of_arrays(arrays: SharedArrays) -> Frames:
    """Return the frames in host memory."""
    images, jpeg = (
        {name: torch.from_numpy(array) for name, array in kind.items()}
        for kind in (arrays.images, arrays.jpeg)
    )
    return Frames(torch.from_numpy(arrays.state), images, jpeg)


def size(spec: SimulatorSpec, slots: int) -> int:
    """Bytes that ``slots`` slots need."""
    return placed(observation_shapes(spec, slots))[1]


def within(memory: Tensor, spec: SimulatorSpec, slots: int) -> Frames:
    """Return the frames in ``memory``, uint8 ``[size(spec, slots)]``."""
    shapes = observation_shapes(spec, slots)
    views = {}
    for name, offset in placed(shapes)[0].items():
        dtype = getattr(torch, np.dtype(shapes[name][0]).name)
        shape = torch.Size(shapes[name][1])
        views[name] = (
            memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        )
    images, jpeg = (
        {name: views[f"{kind}/{name}"] for name in spec.images} for kind in ("images", "jpeg")
    )
    return Frames(views["state"], images, jpeg)


def allocated(count: int, device: torch.device) -> Tensor:
    """Return zeroed memory: uint8 ``[count]``."""
    return torch.zeros(count, dtype=torch.uint8, device=device)


def exported(memory: Tensor) -> dict[str, Any]:
    """Return a handle to memory of a GPU, JSON values only, for ``opened`` in one other process.

    Raises RuntimeError where CUDA IPC is not possible.
    """
    _, arguments = reduce_tensor(memory)
    handle, length, offset, _, counter, counter_offset, event, event_needed = arguments[7:]
    return {
        "tensor_offset": arguments[3],
        "bytes": [base64.b64encode(part).decode() for part in (handle, counter, event)],
        "numbers": [length, offset, counter_offset, event_needed],
        "count": len(memory),
    }


def opened(found: dict[str, Any]) -> Tensor:
    """Map memory that another process exported, of the GPU that is this process's current one.

    Raises RuntimeError where CUDA IPC is not possible.
    """
    handle, counter, event = (base64.b64decode(text) for text in found["bytes"])
    length, offset, counter_offset, event_needed = found["numbers"]
    device = torch.cuda.current_device()
    storage = torch.storage.TypedStorage
    arguments = (
        Tensor,
        (found["count"],),
        (1,),
        found["tensor_offset"],
        storage,
        torch.uint8,
        device,
        handle,
        length,
        offset,
        False,
    )
    memory: Tensor = rebuild_cuda_tensor(*arguments, counter, counter_offset, event, event_needed)
    return memory

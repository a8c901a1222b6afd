"""Count the memory of computations on PyTorch's meta device, where they allocate nothing.

The counts are real: every allocation and release of the pass is seen, only without memory. They
leave out what a kernel allocates within one operation, and what allocators waste.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vla.config.cluster import CPU, FAKE_GPU
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import meta_tensors_as
from rlinf_vla.core.types import mapped

META = torch.device("meta")


class Uncounted(UserError):
    """The sizes in a loss of an algorithm plug-in depend on values, which meta tensors lack."""


_NEW: dict[Any, Any] = {}
"""Operation on meta tensors, by name and sizes -> sizes of its one result, in new memory. Blocks of
a network repeat operations, and PyTorch computes most of their sizes slowly, in Python."""


class Allocations(TorchDispatchMode):
    """Bytes of the tensor storages that operations within the context allocate and free.

    now: alive; peak: most at any time. Each storage counts once, and those that existed before do
    not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, new = computed(function, args, kwargs or {})
        for storage in new:
            self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def computed(function: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return the result of an operation, and the storages that it allocated."""
    key = (function, _description(args), _description((*kwargs, *kwargs.values())))
    layout = _NEW.get(key)
    if layout is not None:
        empty = torch.empty_strided(*layout[0], dtype=layout[1], device=META)
        return empty, [empty.untyped_storage()]
    before = {storage._cdata for storage in _storages((*args, *kwargs.values()))}
    result = function(*args, **kwargs)
    new = [storage for storage in _storages((result,)) if storage._cdata not in before]
    if new and isinstance(result, Tensor) and result.is_meta and not result.storage_offset():
        _NEW[key] = ((result.shape, result.stride()), result.dtype)
    return result, new


def _description(value: Any) -> Any:
    """Return what the sizes of an operation's results depend on, hashable."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(_description, value))
    return type(value), value


def _storages(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the storages of tensors, also those in lists: arguments or results of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()
        elif isinstance(value, list | tuple):
            yield from _storages(value)


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Within the context meta tensors are computed as by the kernels of ``device``.

    Those of attention do not keep its matrix for the backward pass, as PyTorch's fallback does,
    which meta tensors would take. On CUDA it is taken for grouped queries with a mask, for which
    there is no fused kernel, and so it is on other accelerators, whose kernels are unknown. (A
    ``TorchFunctionMode`` would be off while gradient checkpointing runs blocks again.)
    """
    plain = F.scaled_dot_product_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if not q.is_meta or (
            device not in (CPU, FAKE_GPU) and options.get("enable_gqa") and attn_mask is not None
        ):
            return plain(q, k, v, attn_mask, **options)
        causal = options.get("is_causal", False)
        scale = options.get("scale")
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=attn_mask, scale=scale
        )[0]

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        with meta_tensors_as(device):
            yield
    finally:
        F.scaled_dot_product_attention = plain


class UnknownNumbers(TorchDispatchMode):
    """Context in which the number in a meta tensor is 0, as for metrics to report."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0.0
        return function(*args, **(kwargs or {}))


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """Return the most bytes that ``call``, on meta tensors, holds at any time, as on ``device``."""
    with kernels_of(device), Allocations() as allocations:
        call()
    return allocations.peak


def repeated(one: Any, rows: int) -> Any:
    """Return tensors of ``rows`` rows, each like the one of ``one``, allocated now."""
    return mapped(lambda row: torch.empty(rows, *row.shape[1:], dtype=row.dtype, device=META), one)


@contextmanager
def allocated_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within the context each parameter has a gradient, as after the first micro-batch."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None

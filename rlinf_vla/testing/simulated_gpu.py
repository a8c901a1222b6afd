"""Simulate a GPU on the CPU: tensors that claim to be on another device, with real values.

Operations run on the CPU, but tensors of different devices must not meet, as on a real GPU. So a
whole training run can be rehearsed on a machine without a GPU, and compared bit for bit with a run
on the CPU. PyTorch's ``meta`` stands for the GPU, because its automatic differentiation works there
without a driver. Where a test registers another back end, that name can stand for it, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)

GPU = torch.device("meta")
"""The device that the simulated GPU's tensors report. A process may set it before its first use."""
aten = torch.ops.aten

COPIES = {aten._to_copy.default, aten.copy_.default}
"""Operations that may copy between devices."""
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
"""Operations on a GPU tensor to which PyTorch copies indices from the CPU."""
FUSED = {aten._fused_adam_.default, aten._fused_adamw_.default, aten._fused_sgd_.default}
"""Optimiser steps, whose kernels read even single numbers from the GPU's memory."""
READS_BACK = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
"""Operations for which the CPU waits: the result, or its shape, depends on values."""


class GpuTensor(Tensor):
    """A tensor on the simulated GPU; ``value`` is a CPU tensor with its values."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> GpuTensor:
        assert type(value) is Tensor and value.device.type == "cpu"
        return Tensor._make_wrapper_subclass(
            cls, value.size(), value.stride(), value.storage_offset(), dtype=value.dtype, device=GPU
        )

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.value})"

    def tolist(self) -> Any:
        assert not _Captured.active, "tolist waits for the GPU in a call that a CUDA graph records"
        return self.value.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Also runs operations without tensor arguments, such as ``torch.zeros``."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """Makes tensors on the GPU from Python values, which PyTorch does outside its operations."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        constructs = function in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(
            args[0], Tensor
        )
        if (
            not constructs
            or kwargs.get("device") is None
            or torch.device(kwargs["device"]).type != GPU.type
        ):
            return function(*args, **kwargs)
        assert not _Captured.active, (
            f"torch.{function.__name__} copies from the CPU in a call that a CUDA graph records"
        )
        return function(*args, **kwargs | {"device": "cpu"}).to(GPU)


@contextmanager
def simulated_gpu() -> Iterator[torch.device]:
    """Within the context ``GPU`` is a device with values; see the top of this module.

    Inference mode, which does not support tensor subclasses, only disables gradients.
    """
    no_inference_mode = patch.multiple(
        torch.inference_mode, __enter__=_no_grad, __exit__=_grad_again
    )
    fused_optimizers = patch(
        "torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["cpu", GPU.type]
    )
    with (
        warnings.catch_warnings(),
        no_inference_mode,
        fused_optimizers,
        _Operations(),
        _Constructors(),
    ):
        warnings.filterwarnings(
            "ignore", message=".*copying from a non-meta parameter"
        )  # here, it has an effect
        yield GPU


def _no_grad(mode: Any) -> None:
    mode.simulated = torch.no_grad()
    mode.simulated.__enter__()


def _grad_again(mode: Any, *error: Any) -> None:
    mode.simulated.__exit__(*error)


class _Captured:
    """Whether a CUDA graph would be recorded now."""

    active = False


@contextmanager
def captured() -> Iterator[None]:
    """Refuse what must not happen while a CUDA graph is recorded.

    Within the context, a copy between CPU and GPU, a tensor made on the CPU, and an operation for
    which the CPU waits raise AssertionError.
    """
    _Captured.active = True
    try:
        yield
    finally:
        _Captured.active = False


_waits: list[list[str]] = []
"""Of each context of ``waits`` that is open."""


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list that gets the name of each operation for which the CPU waits in the context."""
    found: list[str] = []
    _waits.append(found)
    try:
        yield found
    finally:
        _waits.remove(found)


def recorder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for ``rollout.actor.CudaGraphed``: each call is one that a CUDA graph records."""

    def call(*arguments: Any) -> Any:
        with captured():
            return function(*arguments)

    return call


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return an operation's arguments or results with their tensors changed.

    Several times as fast as PyTorch's ``tree_map``, which counts: a run has 100,000 operations.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        changed = [_mapped(change, element) for element in value]
        return changed if type(value) is list else type(value)(changed)
    if isinstance(value, dict):
        return {name: _mapped(change, element) for name, element in value.items()}
    return value


def _value(tensor: Tensor) -> Tensor:
    return tensor.value if isinstance(tensor, GpuTensor) else tensor


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU values. Raises RuntimeError if it mixes devices."""
    tensors: list[Tensor] = []
    _mapped(tensors.append, (args, kwargs))
    here = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    on_cpu = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, GpuTensor) and (tensor.dim() > 0 or function in FUSED)
    ]
    named = kwargs.get("device")
    on_gpu = torch.device(named).type == GPU.type if named is not None else bool(here)
    indices = function in INDEXING and isinstance(args[0], GpuTensor)
    if here and on_cpu and function not in COPIES and not indices:
        shapes = ", ".join(
            f"{tuple(tensor.shape)} on {'the GPU' if isinstance(tensor, GpuTensor) else 'the CPU'}"
            for tensor in tensors
        )
        raise RuntimeError(f"{function} got tensors of different devices: {shapes}")
    masks = function in INDEXING and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    )
    waiting = function in READS_BACK or masks
    if _Captured.active:
        copies = bool(on_cpu) or not on_gpu
        assert not copies, (
            f"{function} takes or makes a CPU tensor in a call that a CUDA graph records"
        )
        assert not waiting, f"{function} waits for the GPU in a call that a CUDA graph records"
    back = function in COPIES and isinstance(args[-1], GpuTensor) and not on_gpu
    if back or (here and waiting):
        for found in _waits:
            found.append(str(function))
    plain = _mapped(_value, (args, kwargs))
    plain[1].pop("pin_memory", None)
    if named is not None and (on_gpu or here):
        plain[1]["device"] = torch.device("cpu")
        if function is aten._to_copy.default and plain[0][0].dtype == kwargs.get(
            "dtype", plain[0][0].dtype
        ):
            plain[1].pop("non_blocking", None)
    result = function(*plain[0], **plain[1])
    if function is aten.copy_.default:
        on_gpu = isinstance(args[0], GpuTensor)
    if not on_gpu:
        return result
    wrapped = _mapped(GpuTensor, result)
    return return_and_correct_aliasing(function, args, kwargs, wrapped) if here else wrapped


def paused() -> AbstractContextManager[Any]:
    """Within the context ``meta`` is PyTorch's own device again, on which networks are built."""
    return _disable_current_modes()

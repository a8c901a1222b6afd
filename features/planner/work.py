"""Least work of a call: FLOPs and bytes of its operations, counted where it runs.

On the meta device nothing is allocated, so that networks of any size are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rlinf_vla.features.planner.accounting import computed

_GATHERS = ("embedding", "index_select", "index")


class Operation(NamedTuple):
    """FLOPs of an operation; bytes of the weights that it reads, and of tensors of their shapes,
    such as their gradients; bytes of its other operands and of its results."""

    flops: int
    weights: int
    others: int


@dataclass(frozen=True)
class Work:
    """What a call does at least.

    flops: matrix products, convolutions, attention. bytes: weights, per operation that reads them,
    and the other operands and results of the operations that ``flops`` counts. (Other operations
    could be fused with those.)
    """

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Work:
        return Work(self.flops * times, self.bytes * times)


@dataclass(frozen=True)
class Counted:
    """Operations of a call on ``rows`` rows; ``dispatched``: operations that compute anything."""

    operations: tuple[Operation, ...]
    dispatched: int
    rows: int = 1

    @property
    def work(self) -> Work:
        return Work(
            sum(operation.flops for operation in self.operations),
            sum(operation.weights + operation.others for operation in self.operations),
        )

    def seconds(self, rows: float, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the least duration of the same call on ``rows`` rows, operation by operation.

        FLOPs and all bytes but those of weights and their gradients are proportional to the rows.
        """
        times = rows / self.rows
        return sum(
            max(
                times * operation.flops / flops_per_s,
                (operation.weights + times * operation.others) / bytes_per_s,
            )
            for operation in self.operations
        )


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention on ``[B, heads, length, size]``: two products, whatever the mask."""
    return 2 * prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """FLOPs of four products. The kernels compute a fifth again, which is no work of the model."""
    return 2 * _attention(query, key, value)


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return PyTorch's table and what it lacks: LoRA's sum in place, the CPU's attention."""
    formulas = dict(flop_registry)
    formulas[torch.ops.aten.addmm_] = formulas[torch.ops.aten.addmm]
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
    ):
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = _attention
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = (
            _attention_backward
        )
    return formulas


class _Counter(TorchDispatchMode):
    """Counts like PyTorch's FlopCounterMode, whose hooks on modules fail in inference mode."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        # by storage, not by address: tensors on the meta device have none
        self._sizes = {
            weight.untyped_storage()._cdata: weight.numel() * weight.element_size()
            for weight in weights
        }
        self._shapes = {
            shape
            for weight in weights
            if weight.ndim == 2
            for shape in (weight.shape, weight.shape[::-1])
        }
        self._formulas = _formulas()
        self.operations: list[Operation] = []
        self.dispatched = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation = function.overloadpacket
        kwargs = kwargs or {}
        formula = self._formulas.get(operation)
        if formula is None and function is not torch.ops.prim.device.default:
            with self:  # in inference mode there is no autograd that would have decomposed it
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result, _ = computed(function, args, kwargs)
        if function.is_view:
            return result
        self.dispatched += 1
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        weights = others = 0
        # a gather reads only the selected rows
        read = (
            []
            if operation.__name__ in _GATHERS
            else [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        )
        sizes = [self._sizes.get(leaf.untyped_storage()._cdata) for leaf in read]
        weights += sum(size for size in sizes if size is not None)
        if formula is not None:
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for leaf in [
                *results,
                *(leaf for leaf, size in zip(read, sizes, strict=True) if size is None),
            ]:
                weights += leaf.nbytes * (leaf.shape in self._shapes)
                others += leaf.nbytes * (leaf.shape not in self._shapes)
        if flops or weights or others:
            self.operations.append(Operation(flops, weights, others))
        return result


def counted(call: Callable[[], Any], weights: Iterable[Tensor], rows: int = 1) -> Counted:
    """Count one ``call`` on ``rows`` rows, which must not replay a CUDA graph.

    What gradient checkpointing computes again is counted, too.
    """
    with _Counter(list(weights)) as counter:
        call()
    return Counted(tuple(counter.operations), counter.dispatched, rows)


def counted_step(
    loss: Callable[[], Tensor], weights: Iterable[Tensor], rows: int = 1
) -> tuple[Counted, Counted]:
    """Count a forward pass on ``rows`` rows; return it, and it with its backward pass."""
    with _Counter(list(weights)) as counter:
        value = loss()
        forward = Counted(tuple(counter.operations), counter.dispatched, rows)
        value.backward()
    return forward, Counted(tuple(counter.operations), counter.dispatched, rows)


def work(call: Callable[[], Any], weights: Iterable[Tensor]) -> Work:
    """Return the work of one ``call``, counted as by ``counted``."""
    return counted(call, weights).work

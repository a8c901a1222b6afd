"""LoRA layers that are faster than peft's: factors in the input's dtype, products that accumulate.

peft casts the input of a float32 factor to float32: on a bfloat16 network a copy of every adapted
layer's input, twice its size, kept for the backward pass, and a product without bfloat16 units. A
factor is small (rank times the layer's width), so these cast the factor instead, at each call. As
in autocast, its gradient is computed in bfloat16, and cast and summed over micro-batches in
float32. On a float32 network nothing is cast.

peft's linear layer also scales the factors' product and adds it to the layer's output. These are
passes over tensors as large as the output, forward and backward, and cost as much time as the
factors. ``AdaptedLinear`` computes three matrix products instead, the last of which accumulates. On
a bfloat16 network the sum is also rounded less often.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LinearFactor(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


class Conv2dFactor(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(
            x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: LinearFactor, nn.Conv2d: Conv2dFactor}
"""Kind of a factor that peft makes -> the one that takes its place."""


def multiply_in_input_dtype(backbone: nn.Module) -> None:
    """Make the adapters of linear layers and images' convolutions so, in place.

    Others cast their input, as peft does. Names and weights do not change.
    """
    for layer in backbone.modules():
        if isinstance(layer, LoraLayer):
            factors = [*layer.lora_A.values(), *layer.lora_B.values()]
            if all(type(factor) in KINDS for factor in factors):
                layer.cast_input_dtype_enabled = False
                if type(layer) is Linear:
                    layer.__class__ = AdaptedLinear
                for factor in factors:
                    factor.__class__ = KINDS[type(factor)]


class AdaptedLinear(Linear):
    def forward(self, x: Tensor, *args: Any, **keywords: Any) -> Tensor:
        (name,) = self.active_adapters
        if self.merged or self.disable_adapters or self.lora_bias[name]:
            return super().forward(x, *args, **keywords)
        base = self.get_base_layer()
        rows = x.reshape(-1, x.shape[-1])
        a, b = (factors[name].weight.to(x.dtype) for factors in (self.lora_A, self.lora_B))
        result: Tensor = AdaptedProduct.apply(
            rows, base.weight, base.bias, a, b, self.scaling[name]
        )
        return result.view(*x.shape[:-1], -1)


class AdaptedProduct(torch.autograd.Function):
    """``x weight^T + bias + scale * x a^T b^T``: arXiv 2106.09685, equation 3.

    Shapes: x ``[N, in]``, weight ``[out, in]``, a ``[rank, in]``, b ``[out, rank]``. ``weight`` and
    ``bias`` get no gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        inner = x @ a.T
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scale = scale
        return F.linear(x, weight, bias).addmm_(inner, b.T, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, inner = ctx.saved_tensors
        to_inner = (gradient @ b).mul_(ctx.scale)
        to_x = (gradient @ weight).addmm_(to_inner, a) if ctx.needs_input_grad[0] else None
        return to_x, None, None, to_inner.T @ x, (gradient.T @ inner).mul_(ctx.scale), None

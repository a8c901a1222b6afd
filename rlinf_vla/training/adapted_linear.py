"""LoRA of a linear layer as three matrix products, the last of which accumulates.

peft's layer also scales the factors' product and adds it to the layer's output. These are passes
over tensors as large as the output, forward and backward, and cost as much time as the factors.
On a bfloat16 network the sum is also rounded less often.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd.function import once_differentiable


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

"""LoRA factors that are float32 and multiply in the dtype of their input.

peft casts the input of a float32 factor to float32: on a bfloat16 network a copy of every adapted
layer's input, twice its size, kept for the backward pass, and a product without bfloat16 units. A
factor is small (rank times the layer's width), so these cast the factor instead, at each call. As
in autocast, its gradient is computed in bfloat16, and cast and summed over micro-batches in
float32. On a float32 network nothing is cast. Linear layers also add the factors' product within
its multiplication (see ``adapted_linear.py``).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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
    from peft.tuners.lora import Linear, LoraLayer

    from rlinf_vla.training.adapted_linear import AdaptedLinear

    for layer in backbone.modules():
        if isinstance(layer, LoraLayer):
            factors = [*layer.lora_A.values(), *layer.lora_B.values()]
            if all(type(factor) in KINDS for factor in factors):
                layer.cast_input_dtype_enabled = False
                if type(layer) is Linear:
                    layer.__class__ = AdaptedLinear
                for factor in factors:
                    factor.__class__ = KINDS[type(factor)]

"""LoRA factors multiply in the dtype of their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import cast_adapter_dtype
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vla.training.lora_layers import AdaptedProduct, multiply_in_input_dtype

RANK = 4
SCALE = 2.0
ROUNDED = 2.0**-6
"""Relative: a few roundings to bfloat16."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 40)
        self.conv = nn.Conv2d(3, 8, kernel_size=2, stride=2)


def adapted(dtype: torch.dtype, ours: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    network = Network().to(dtype).requires_grad_(False)
    inject_adapter_in_model(
        LoraConfig(
            r=RANK, lora_alpha=int(RANK * SCALE), target_modules=["linear", "conv"], **options
        ),
        network,
    )
    cast_adapter_dtype(network, "default")
    with torch.no_grad():
        for name, value in network.named_parameters():
            if ".lora_" in name:
                value.normal_(std=0.3)
    if ours:
        multiply_in_input_dtype(network)
    return network


def factors(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


INPUTS = {"linear": torch.randn(5, 7, 48), "conv": torch.randn(5, 3, 6, 6)}


def product(layer: str, x: Tensor, factor: Tensor, **geometry: int) -> Tensor:
    return F.linear(x, factor) if layer == "linear" else F.conv2d(x, factor, **geometry)


@pytest.mark.parametrize("layer", list(INPUTS))
def test_the_product_is_in_bfloat16_and_the_gradient_in_float32(layer: str) -> None:
    adapter = getattr(adapted(torch.bfloat16), layer)
    x = INPUTS[layer].bfloat16()
    found = adapter(x)
    low = [factor.detach().bfloat16().requires_grad_() for factor in factors(adapter)]
    inner = product(layer, x, low[0], stride=2) if layer == "conv" else product(layer, x, low[0])
    expected = adapter.base_layer(x) + product(layer, inner, low[1]) * SCALE
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=ROUNDED, atol=ROUNDED)
    direction = torch.randn_like(found)
    for result in (found, expected):
        result.backward(direction)
    for factor, reference in zip(factors(adapter), low, strict=True):
        assert (
            factor.dtype == torch.float32 and factor.grad is not None and reference.grad is not None
        )
        assert factor.grad.dtype == torch.float32
        torch.testing.assert_close(
            factor.grad, reference.grad.float(), rtol=ROUNDED, atol=10 * ROUNDED
        )


@pytest.mark.parametrize("layer", list(INPUTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_other_networks_they_are_peft_s_own_numbers(layer: str, dtype: torch.dtype) -> None:
    found = {}
    for ours in (True, False):
        adapter = getattr(adapted(dtype, ours), layer)
        x = INPUTS[layer].to(dtype, copy=True).requires_grad_()
        result = adapter(x)
        result.square().sum().backward()
        found[ours] = [result, x.grad, *(factor.grad for factor in factors(adapter))]
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-5)


def test_the_adapted_product_has_the_derivatives_of_its_formula() -> None:
    sizes = {"x": (6, 5), "weight": (4, 5), "bias": (4,), "a": (2, 5), "b": (4, 2)}
    given = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    x, weight, bias, a, b = given.values()
    torch.testing.assert_close(
        AdaptedProduct.apply(x, weight, bias, a, b, SCALE),
        x @ weight.T + bias + SCALE * x @ a.T @ b.T,
    )
    for learned in ({"x", "a", "b"}, {"a", "b"}):
        inputs = [value.clone().requires_grad_(name in learned) for name, value in given.items()]
        assert torch.autograd.gradcheck(lambda *them: AdaptedProduct.apply(*them, SCALE), inputs)


def test_a_sum_in_bfloat16_is_rounded_less_often() -> None:
    """So it is nearer to the exact one than peft's, which rounds the factors' product and its multiple, too."""
    errors = {}
    for ours in (True, False):
        adapter = adapted(torch.bfloat16, ours).linear
        x = torch.randn(2000, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
        a, b = (factor.detach().bfloat16() for factor in factors(adapter))
        base = [parameter.double() for parameter in adapter.base_layer.parameters()]
        exact = F.linear(x.double(), *base) + SCALE * F.linear(F.linear(x, a).double(), b.double())
        errors[ours] = float((adapter(x).detach().double() - exact).square().mean())
    assert errors[True] < 0.6 * errors[False]


def test_an_adapter_that_is_switched_off_changes_nothing() -> None:
    adapter = adapted(torch.float32).linear
    x = INPUTS["linear"]
    expected = adapter(x)
    adapter.enable_adapters(False)
    assert torch.equal(adapter(x), adapter.base_layer(x))
    adapter.enable_adapters(True)
    adapter.merge()
    torch.testing.assert_close(adapter(x), expected)


class Float32Sizes(TorchDispatchMode):
    """Numbers in the largest float32 tensor that an operation within the context returns."""

    largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype == torch.float32:
            self.largest = max(self.largest, found.numel())
        return found


@pytest.mark.parametrize("layer", list(INPUTS))
@pytest.mark.parametrize("ours", [True, False])
def test_no_input_or_result_is_copied_to_float32(layer: str, ours: bool) -> None:
    """Forward and backward: only factors are; stock peft copies both."""
    adapter = getattr(adapted(torch.bfloat16, ours), layer)
    x = INPUTS[layer].bfloat16().repeat(20, *[1] * (INPUTS[layer].ndim - 1)).requires_grad_()
    with Float32Sizes() as seen:
        adapter(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert (seen.largest <= max(factor.numel() for factor in factors(adapter))) == ours
    assert ours or seen.largest >= x.numel()


def test_an_adapter_s_bias_is_cast_too() -> None:
    adapter = adapted(torch.bfloat16, lora_bias=True).linear
    x = INPUTS["linear"].bfloat16()
    a, b = (factor.bfloat16() for factor in factors(adapter))
    expected = (
        adapter.base_layer(x)
        + F.linear(F.linear(x, a), b, adapter.lora_B["default"].bias.bfloat16()) * SCALE
    )
    torch.testing.assert_close(adapter(x), expected, rtol=ROUNDED, atol=ROUNDED)


def test_other_layers_keep_peft_s_cast() -> None:
    network = nn.Sequential(nn.Conv1d(3, 8, 2), nn.Embedding(9, 4)).to(torch.bfloat16)
    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=["0", "1"]), network)
    cast_adapter_dtype(network, "default")
    multiply_in_input_dtype(network)
    assert (
        network[0](torch.randn(2, 3, 5).bfloat16()).dtype
        == network[1](torch.arange(3)).dtype
        == torch.bfloat16
    )

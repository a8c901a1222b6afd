"""Errors of ``evaluate`` that rounding explains, and those of wrong policies."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vla.algorithms.parity import BFLOAT16, FLOAT32, TF32, Parity, parity_errors, unit_of
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.devices import set_tf32
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Trajectory
from rlinf_vla.features.planner import synthetic
from rlinf_vla.models.openvla.oft import OpenVLAOFTOptions, OpenVLAOFTPolicy
from rlinf_vla.models.openvla.policy import OpenVLAOptions, OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.training.lora import add_lora, merged_lora

ASSETS = Path(__file__).parents[2] / "assets"
UNIT = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
POLICIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "openvla_tiny_pushcube": (OpenVLAPolicy, OpenVLAOptions, {"prompt_length": 26}),
    "openvla_oft_tiny_pushcube": (OpenVLAOFTPolicy, OpenVLAOFTOptions, {"prompt_length": 26}),
    "pi0_tiny_pushcube": (Pi0Policy, Pi0Options, {"prompt_length": 16}),
}
every_policy = pytest.mark.parametrize("name", list(POLICIES))
every_dtype = pytest.mark.parametrize("dtype", list(UNIT))


@cache
def played(name: str, dtype: torch.dtype) -> tuple[Policy, Trajectory]:
    kind, options, keys = POLICIES[name]
    policy = kind.load(ASSETS / name, options(dtype=str(dtype).removeprefix("torch."), **keys))
    return policy, synthetic.calls(policy, 64, Settings(0, 1.0, 8), 1)


def judged(
    policy: Policy, calls: Trajectory, dtype: torch.dtype, temperature: float = 1.0
) -> Parity:
    return Parity.of(parity_errors(policy, calls, temperature), UNIT[dtype])


@every_policy
@every_dtype
def test_a_right_policy_is_within_the_bounds(name: str, dtype: torch.dtype) -> None:
    found = judged(*played(name, dtype), dtype)
    assert found.within() and math.isfinite(found.high)
    found.check()


@every_policy
def test_a_network_that_rounds_every_layer_is_not_refused(name: str) -> None:
    """The float32 network with the same weights stands for another order of every sum."""
    low, calls = played(name, torch.bfloat16)
    full = POLICIES[name][0].load(ASSETS / name, POLICIES[name][1](**POLICIES[name][2]))
    with torch.no_grad():
        for parameter, rounded in zip(full.parameters(), low.parameters(), strict=True):
            parameter.copy_(rounded)
    found = judged(full, calls, torch.bfloat16)
    assert found.mean > 0.4 * BFLOAT16 and found.within()


PRODUCTS = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
}


class InTF32(TorchDispatchMode):
    """What is multiplied is rounded to 11 significant bits, as on a GPU with TF32."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in PRODUCTS:
            added = function in {torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default}
            args = (*args[:added], *map(to_tf32, args[added : added + 2]), *args[added + 2 :])
        return function(*args, **(kwargs or {}))


def to_tf32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@every_policy
@pytest.mark.parametrize("merged", [False, True])
def test_tf32_has_a_unit_of_its_own(name: str, merged: bool) -> None:
    """Its errors are beyond exact float32's bounds, and within those of 11 bits; another temperature is not."""
    kind, options, keys = POLICIES[name]
    policy = kind.load(ASSETS / name, options(**keys))
    add_lora(policy, LoraOptions(rank=8), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if ".lora_B." in parameter_name:
                parameter.normal_(std=0.01, generator=generator)
    with InTF32(), sdpa_kernel(SDPBackend.MATH):
        with merged_lora(policy) if merged else nullcontext():
            calls = synthetic.calls(policy, 64, Settings(0, 1.0, 8), 1)
        errors, wrong = (parity_errors(policy, calls, temperature) for temperature in (1.0, 1.6))
    assert Parity.of(errors, TF32).within()
    assert not merged or not Parity.of(errors, FLOAT32).within(4.0)
    with pytest.raises(RuntimeError, match="disagree"):
        Parity.of(wrong, TF32).check()


def test_the_unit_follows_weights_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    low, full = (
        played("openvla_tiny_pushcube", dtype)[0] for dtype in (torch.bfloat16, torch.float32)
    )
    assert (unit_of(low), unit_of(full)) == (BFLOAT16, FLOAT32)
    before = torch.get_float32_matmul_precision()
    try:
        set_tf32(True)
        assert unit_of(full) == FLOAT32, "the CPU has none"
        monkeypatch.setattr(
            "rlinf_vla.algorithms.parity.device_of", lambda policy: torch.device("cuda")
        )
        assert (unit_of(low), unit_of(full)) == (BFLOAT16, TF32)
        set_tf32(False)
        assert unit_of(full) == FLOAT32 and not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = True


@every_policy
@every_dtype
def test_an_evaluate_without_the_temperature_is_refused(name: str, dtype: torch.dtype) -> None:
    policy, calls = played(name, dtype)
    with pytest.raises(RuntimeError, match="act\\(\\) and evaluate\\(\\) disagree"):
        judged(policy, calls, dtype, temperature=1.6).check()


def moved_on(latent: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The first ``count`` calls have the sample of the call after them."""
    return {
        name: torch.cat([value[1 : count + 1], value[count:]]) for name, value in latent.items()
    }


@every_policy
@every_dtype
def test_samples_of_other_calls_are_refused(name: str, dtype: torch.dtype) -> None:
    policy, calls = played(name, dtype)
    with pytest.raises(RuntimeError, match="disagree"):
        judged(policy, replace(calls, latent=moved_on(calls.latent, 63)), dtype).check()


@pytest.mark.parametrize("name", ["openvla_tiny_pushcube", "openvla_oft_tiny_pushcube"])
@every_dtype
def test_one_token_off_is_refused(name: str, dtype: torch.dtype) -> None:
    """Only the last token of a call is scored wrongly."""
    policy, calls = played(name, dtype)
    (key, tokens), *_ = calls.latent.items()
    wrong = tokens.clone()
    wrong[..., -1] = tokens[..., -1].roll(1, 0)
    with pytest.raises(RuntimeError, match="disagree"):
        judged(policy, replace(calls, latent=calls.latent | {key: wrong}), dtype).check()


@every_dtype
def test_both_the_mean_and_the_quantile_are_judged(dtype: torch.dtype) -> None:
    unit = Parity.of(torch.zeros(1), UNIT[dtype])
    for factor, within, refused in (
        (0.9, True, False),
        (1.1, False, False),
        (3.9, False, False),
        (4.1, False, True),
    ):
        flat = Parity.of(torch.full((1000,), factor * unit.mean_bound), UNIT[dtype])
        few = torch.zeros(1000)
        few[:20] = factor * unit.high_bound
        for found in (flat, Parity.of(few, UNIT[dtype])):
            assert found.report().startswith("warning: ") == (not within)
            assert found.within() == within and found.within(4.0) == (not refused)
            if refused:
                with pytest.raises(RuntimeError, match="bound"):
                    found.check()
            else:
                found.check()


def test_a_single_rounding_accident_is_not_judged() -> None:
    errors = torch.zeros(64 * 56)
    errors[0] = 3.0
    assert Parity.of(errors, BFLOAT16).within()


def test_errors_that_are_no_numbers_are_refused() -> None:
    for wrong in (math.nan, math.inf):
        with pytest.raises(RuntimeError, match="disagree"):
            Parity.of(torch.tensor([0.0, wrong]), FLOAT32).check()

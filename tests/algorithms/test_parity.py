"""Errors of ``evaluate`` that rounding explains, and those of wrong policies."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.parity import Parity, parity_errors
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Trajectory
from rlinf_vla.models.openvla.oft import OpenVLAOFTOptions, OpenVLAOFTPolicy
from rlinf_vla.models.openvla.policy import OpenVLAOptions, OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.planner import synthetic
from rlinf_vla.rollout.actor import Settings

ASSETS = Path(__file__).parents[2] / "assets"
DTYPES = [torch.float32, torch.bfloat16]
POLICIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "openvla_tiny_pushcube": (OpenVLAPolicy, OpenVLAOptions, {"prompt_length": 26}),
    "openvla_oft_tiny_pushcube": (OpenVLAOFTPolicy, OpenVLAOFTOptions, {"prompt_length": 26}),
    "pi0_tiny_pushcube": (Pi0Policy, Pi0Options, {"prompt_length": 16}),
}
every_policy = pytest.mark.parametrize("name", list(POLICIES))
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@cache
def played(name: str, dtype: torch.dtype) -> tuple[Policy, Trajectory]:
    kind, options, keys = POLICIES[name]
    policy = kind.load(ASSETS / name, options(dtype=str(dtype).removeprefix("torch."), **keys))
    return policy, synthetic.calls(policy, 64, Settings(0, 1.0, 8), 1)


def judged(policy: Policy, calls: Trajectory, dtype: torch.dtype, temperature: float = 1.0) -> Parity:
    return Parity.of(parity_errors(policy, calls, temperature), dtype)


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
    assert found.mean > 0.5 * 2**-8 and found.within()


@every_policy
@every_dtype
def test_an_evaluate_without_the_temperature_is_refused(name: str, dtype: torch.dtype) -> None:
    policy, calls = played(name, dtype)
    with pytest.raises(RuntimeError, match="act\\(\\) and evaluate\\(\\) disagree"):
        judged(policy, calls, dtype, temperature=1.6).check()


def moved_on(latent: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The first ``count`` calls have the sample of the call after them."""
    return {name: torch.cat([value[1 : count + 1], value[count:]]) for name, value in latent.items()}


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
    unit = Parity.of(torch.zeros(1), dtype)
    for factor, within, refused in ((0.9, True, False), (1.1, False, False), (3.9, False, False), (4.1, False, True)):
        flat = Parity.of(torch.full((1000,), factor * unit.mean_bound), dtype)
        few = torch.zeros(1000)
        few[:20] = factor * unit.high_bound
        for found in (flat, Parity.of(few, dtype)):
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
    assert Parity.of(errors, torch.bfloat16).within()


def test_errors_that_are_no_numbers_are_refused() -> None:
    for wrong in (math.nan, math.inf):
        with pytest.raises(RuntimeError, match="disagree"):
            Parity.of(torch.tensor([0.0, wrong]), torch.float32).check()

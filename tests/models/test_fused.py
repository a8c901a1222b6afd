"""Fused kernels: who calls them, and with what. The kernels themselves run on CUDA (``make prove-gpu PARTS=fused``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.cli import compose
from rlinf_vla.core.devices import meta_tensors_as, set_fused_kernels
from rlinf_vla.features.planner.accounting import Allocations
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.models import flow_network, fused
from rlinf_vla.models.flow_network import few_queries_attention, rotations
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.policy import Pi0Options, Pi0Policy
from rlinf_vla.models.rotation import rotate
from rlinf_vla.runtime import recipes
from rlinf_vla.testing.policy_calls import observations
from tests.models.tiny_openvla import ASSETS, tiny


class Kernels:
    """liger-kernel's functions by PyTorch's operations, as it documents them; counts the calls."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, module: str, name: str) -> Any:
        self.calls[module] = self.calls.get(module, 0) + 1
        return type(name, (), {"apply": staticmethod(getattr(self, module))})

    @staticmethod
    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool
    ) -> Tensor:
        assert not in_place and mode == ("gemma" if offset else "llama")
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (
            normed.to(x.dtype) * weight
            if mode == "llama"
            else (normed * (offset + weight.float())).to(x.dtype)
        )

    @staticmethod
    def rope(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _positions: None, unsqueeze: int, width: int
    ) -> tuple[Tensor, Tensor]:
        assert unsqueeze == 1 and width == q.shape[-1]
        rotation = torch.stack([cos[..., : width // 2], sin[..., : width // 2]])[:, :, None]
        return rotate(q, *rotation), rotate(k, *rotation)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def geglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(fused, "kernel", found)
    return found


def openvla() -> OpenVLAPolicy:
    return tiny()


def pi0() -> Pi0Policy:
    return Pi0Policy.load(
        ASSETS / "pi0_tiny", Pi0Options(random_weights=True, denoise_steps=2, frozen_vlm=False)
    )


@pytest.mark.parametrize(
    ("build", "parts"),
    [(openvla, {"rms_norm", "rope", "swiglu"}), (pi0, {"rms_norm", "rope", "geglu"})],
    ids=["openvla", "pi0"],
)
def test_a_policy_computes_the_same_with_them(
    build: Any, parts: set[str], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build()
    inputs = policy.prepare(observations(policy, 2))
    with torch.no_grad():
        latent = policy.act(policy.encode(inputs), None, 0.0).latent
    expected = policy.evaluate(inputs, latent, 1.0)
    assert not kernels.calls, "a CPU has none"
    monkeypatch.setattr(fused, "usable", lambda x: True)
    found = policy.evaluate(inputs, latent, 1.0)
    assert set(kernels.calls) == parts
    torch.testing.assert_close(found.log_prob, expected.log_prob)
    torch.testing.assert_close(found.value, expected.value)


def test_they_are_for_cuda_and_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        device = torch.device("cuda")

    x: Any = OnCuda()
    monkeypatch.setattr(fused, "installed", lambda: True)
    assert fused.usable(x) and not fused.usable(torch.ones(1))
    with fused.unused():
        assert not fused.usable(x)
    assert fused.usable(x)
    set_fused_kernels(False)
    try:
        with fused.unused():
            pass
        assert not fused.usable(x), "a context does not turn them on"
    finally:
        set_fused_kernels(True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_few_queries_is_attention(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, before, k, v_before, v = (
        torch.randn(3, heads, count, 16, generator=generator, dtype=torch.float64)
        for heads, count in ((4, 5), (kv_heads, 13), (kv_heads, 5), (kv_heads, 13), (kv_heads, 5))
    )
    mask = torch.zeros(3, 1, 5, 18, dtype=torch.float64).masked_fill_(
        torch.rand(3, 1, 5, 18, generator=generator) < 0.3, float("-inf")
    )
    kept = mask.clone()
    found = few_queries_attention(q, (before, k), (v_before, v), mask)
    keys, values = torch.cat([before, k], 2), torch.cat([v_before, v], 2)
    torch.testing.assert_close(
        found, F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    )
    assert torch.equal(mask, kept)


def test_rotating_both_is_rotating_each(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 3, 8)
    rotation = rotations(torch.arange(3).expand(2, -1), 8)
    expected = rotate(q, *rotation), rotate(k, *rotation)
    for usable in (False, True):
        monkeypatch.setattr(fused, "usable", lambda x, usable=usable: usable)
        for found, each in zip(
            flow_network.rotate_both(q.clone(), k.clone(), rotation), expected, strict=True
        ):
            torch.testing.assert_close(found, each)


def test_on_the_meta_device_they_allocate_what_they_do_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "installed", lambda: True)
    x, up = (
        torch.empty(2, 3, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(2)
    )
    weight = torch.empty(16, device="meta", requires_grad=True)
    assert not fused.usable(x), "elsewhere, meta tensors are not on CUDA"
    with meta_tensors_as("cuda"), Allocations() as norm:
        assert fused.usable(x)
        normed = fused.rms_norm(x, weight, 1e-6)
    assert norm.now == 2 * x.numel() + 4 * 6, "the result, and a float32 number per row"
    with Allocations() as product:
        found = fused.silu_times(x, up)
    assert product.now == 2 * x.numel()
    with Allocations() as backward:
        torch.autograd.backward(
            [normed, found], [torch.empty_like(normed), torch.empty_like(found)]
        )
    assert x.grad is not None and backward.now < 6 * 2 * x.numel()


def test_a_run_with_them_is_counted_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For openvla-7b 71.7 GB were counted and 71.5 GB measured: docs/results/gpu_findings.md."""
    keys = [
        "recipe=maniskill_ppo",
        "cluster.device=cuda",
        "algorithm.minibatch_size=4",
        "cluster.micro_batch_size=4",
    ]
    counted = []
    for installed in (False, True):
        monkeypatch.setattr(fused, "installed", lambda installed=installed: installed)
        counted.append(MemoryModel(recipes.read(compose.load("train", keys))).update(4, False))
    assert counted[1] < 0.95 * counted[0]

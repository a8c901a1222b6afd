"""Memory counted on the meta device, compared with the same passes on real tensors on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rlinf_vla.cli import compose
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Policy
from rlinf_vla.planner.accounting import Allocations, allocated_gradients, fused_attention, peak_bytes
from rlinf_vla.planner.memory import MemoryModel, weights_of
from rlinf_vla.planner.synthetic import synthetic_batch, tensors_of
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.telemetry.measurement import saved_for_backward

ROWS = 6
TINY = {
    "openvla": ["recipe=maniskill_ppo"],
    "openvla, bfloat16": ["recipe=maniskill_ppo", "model.options.dtype=bfloat16"],
    "openvla_oft, all weights": ["recipe=maniskill_ppo", "model=openvla_oft", "model.lora.rank=0"],
    "pi0": ["recipe=maniskill_ppo", "model=pi0"],
    "pi0, one pass": ["recipe=maniskill_ppo", "model=pi0", "model.options.frozen_vlm=false", "cluster.reuse_frozen=false"],
}


def recipe(*overrides: str) -> Recipe:
    return recipes.read(compose.load("train", ["cluster=laptop", *overrides]))


def test_the_most_that_is_alive_at_one_time_counts() -> None:
    def chain() -> Tensor:
        x = torch.empty(100, device="meta")
        y = x.view(10, 10).exp()
        del x
        return y.exp_().t() @ y

    assert peak_bytes(chain, "cpu") == 2 * 400
    with Allocations() as found:
        for _ in range(3):
            torch.empty(250)
        assert found.now == 0
    assert found.peak == 1000


def test_gradient_checkpointing_and_more_rows_show_in_the_peak() -> None:
    model = MemoryModel(recipe("recipe=maniskill_ppo"))
    assert model.update(32, True) < 0.5 * model.update(32, False)
    assert model.update(64, False) == pytest.approx(2 * model.update(32, False), rel=0.01)
    assert model.rollout(64) == pytest.approx(2 * model.rollout(32), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", list(TINY))
def test_meta_and_cpu_agree_exactly(name: str, checkpointing: bool) -> None:
    """Bytes saved for the backward pass, and peaks of forward and backward pass and of acting.

    In bfloat16 nearly: the CPU keeps a norm's statistics in bfloat16, meta in float32, as CUDA does.
    """
    wanted = recipe(*TINY[name], f"cluster.gradient_checkpointing={str(checkpointing).lower()}")
    model = MemoryModel(wanted)
    policy = builders.build_policy(wanted)
    batch = synthetic_batch(wanted, policy, model.algorithm, ROWS)
    if model.kept:
        with torch.no_grad():
            learnt = policy.precompute(batch.calls.inputs)
        batch = batch[:ROWS]
        object.__setattr__(batch.calls, "inputs", learnt)
    assert weights_of(policy) == weights_of(model.policy)

    learner, meta = model.learner(checkpointing), model.batch(ROWS)
    assert [tensor.shape for tensor in tensors_of(batch)] == [tensor.shape for tensor in tensors_of(meta)]
    tolerance = 2e-3 if "bfloat16" in name else 0
    with fused_attention("cpu"):
        for measure in (partial(saved, model), partial(peak, model)):
            assert measure(learner, meta) == pytest.approx(measure(policy, batch), rel=tolerance)
    assert model.rollout(ROWS) == pytest.approx(acting(policy, model), rel=tolerance)


def saved(model: MemoryModel, policy: Policy, batch: object) -> int:
    known = [*policy.parameters(), *policy.buffers(), *tensors_of(batch)]  # type: ignore[arg-type]
    return saved_for_backward(lambda: model.loss(policy, batch).backward(), known)


def peak(model: MemoryModel, policy: Policy, batch: object) -> int:
    with allocated_gradients([each for each in policy.parameters() if each.requires_grad]), Allocations() as found:
        model.loss(policy, batch).backward()
    return found.peak


@torch.no_grad()
def acting(policy: Policy, model: MemoryModel) -> int:
    with Allocations() as found:
        model.act(policy, {name: torch.zeros_like(value, device="cpu") for name, value in model.inputs(ROWS).items()})
    return found.peak

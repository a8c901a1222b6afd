from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.algorithms.on_policy import Clip, joint, kl_loss, policy_loss, safe_ratio, value_loss
from tests.algorithms.trajectories import GARBAGE

LOW, HIGH = 0.2, 0.3


def ppo_policy_loss(
    log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """One element per call, all ``[N]``, every call of weight 1."""
    return policy_loss(
        log_prob[:, None],
        old[:, None],
        advantage,
        mask[:, None],
        torch.ones_like(advantage),
        Clip(LOW, HIGH),
    )


@dataclass
class Calls:
    """Random policy calls, float64 ``[N]``; masked-out elements hold garbage."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    value: Tensor
    old_value: Tensor
    target: Tensor
    mask: Tensor

    def policy_loss(self, rows: slice = slice(None)) -> tuple[Tensor, dict[str, Tensor]]:
        return ppo_policy_loss(
            self.log_prob[rows], self.old_log_prob[rows], self.advantage[rows], self.mask[rows]
        )

    def value_loss(self, clip: float | None, rows: slice = slice(None)) -> Tensor:
        return value_loss(
            self.value[rows], self.old_value[rows], self.target[rows], self.mask[rows], clip
        )


@st.composite
def calls(draw: st.DrawFn) -> Calls:
    size = draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    mask = torch.rand(size, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    poison = torch.tensor(GARBAGE, dtype=torch.float64)

    def numbers(scale: float) -> Tensor:
        values = torch.randn(size, generator=generator, dtype=torch.float64) * scale
        return torch.where(
            mask, values, poison[torch.randint(0, len(poison), (size,), generator=generator)]
        )

    return Calls(
        numbers(0.4), numbers(0.4), numbers(1.0), numbers(2.0), numbers(2.0), numbers(2.0), mask
    )


def assert_gradient(function: object, argument: Tensor, mask: Tensor) -> None:
    """``function()``'s gradient by ``argument`` equals central differences where the mask is true, and is exactly zero elsewhere."""
    assert callable(function)
    argument.requires_grad_(True)
    (gradient,) = torch.autograd.grad(function(), argument)
    assert (gradient[~mask] == 0).all()
    argument.requires_grad_(False)
    for i in mask.nonzero().flatten().tolist():
        original = argument[i].clone()
        differences = []
        for shift in (1e-6, -1e-6):
            argument[i] = original + shift
            differences.append(float(function()))
        argument[i] = original
        assert float(gradient[i]) == pytest.approx(
            (differences[0] - differences[1]) / 2e-6, abs=1e-5, rel=1e-5
        )


@given(calls())
def test_policy_loss_against_a_loop(drawn: Calls) -> None:
    loss, statistics = drawn.policy_loss()
    expected = {"loss": 0.0, "approx_kl": 0.0, "ppo_kl": 0.0, "clip_fraction": 0.0}
    for i in drawn.mask.nonzero().flatten().tolist():
        log_ratio = float(drawn.log_prob[i]) - float(drawn.old_log_prob[i])
        ratio = math.exp(log_ratio)
        advantage = float(drawn.advantage[i])
        expected["loss"] -= min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
        expected["approx_kl"] += ratio - 1 - log_ratio
        expected["ppo_kl"] -= log_ratio
        expected["clip_fraction"] += not 1 - LOW <= ratio <= 1 + HIGH
    assert {"loss": float(loss)} | {
        name: float(value) for name, value in statistics.items()
    } == pytest.approx(expected, abs=1e-9)


@given(calls())
def test_policy_statistics_are_within_their_ranges(drawn: Calls) -> None:
    statistics = drawn.policy_loss()[1]
    count = max(int(drawn.mask.sum()), 1)
    assert 0 <= float(statistics["clip_fraction"]) / count <= 1
    assert float(statistics["approx_kl"]) >= 0


@given(calls())
def test_policy_gradient_by_finite_differences(drawn: Calls) -> None:
    assert_gradient(lambda: drawn.policy_loss()[0], drawn.log_prob, drawn.mask)


@given(calls())
def test_at_ratio_one_the_gradient_is_the_policy_gradient(drawn: Calls) -> None:
    log_prob = drawn.old_log_prob.clone().requires_grad_(True)
    loss, statistics = ppo_policy_loss(log_prob, drawn.old_log_prob, drawn.advantage, drawn.mask)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(gradient, torch.where(drawn.mask, -drawn.advantage, 0))
    assert all(float(value) == 0 for value in statistics.values())


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.29, 1.0, True),
        (1.31, 1.0, False),
        (0.5, 1.0, True),
        (0.81, -1.0, True),
        (0.79, -1.0, False),
        (2.0, -1.0, True),
    ],
)
def test_each_side_of_the_clip(ratio: float, advantage: float, moves: bool) -> None:
    """Only an improving step further away from the old policy is clipped."""
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, _ = ppo_policy_loss(
        log_prob, torch.zeros(1), torch.tensor([advantage]), torch.ones(1, dtype=torch.bool)
    )
    loss.backward()
    assert log_prob.grad is not None
    assert float(log_prob.grad) == pytest.approx(-advantage * ratio if moves else 0)


@pytest.mark.parametrize("bad", [*GARBAGE, -1e30, 1e4])
def test_an_overflow_outside_the_mask_has_no_effect(bad: float) -> None:
    mask = torch.tensor([True, False])
    log_prob = torch.tensor([0.1, bad], requires_grad=True)
    log_ratio, ratio = safe_ratio(log_prob, torch.zeros(2), mask)
    assert log_ratio.tolist() == pytest.approx([0.1, 0.0]) and ratio.tolist() == pytest.approx(
        [math.exp(0.1), 1.0]
    )
    (gradient,) = torch.autograd.grad(
        (ratio * torch.tensor([1.0, bad]).where(mask, 0)).sum(), log_prob
    )
    assert gradient.tolist() == pytest.approx([math.exp(0.1), 0.0])


@pytest.mark.parametrize("difference", [25.0, 500.0])
def test_an_action_that_became_far_too_likely_has_a_gradient(difference: float) -> None:
    """Its probability would not decrease otherwise; the loss is that of a ratio of e**20."""
    log_prob = torch.tensor([difference, 0.1], requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    loss, _ = ppo_policy_loss(log_prob, torch.zeros(2), -torch.ones(2), mask)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert float(gradient[0]) == pytest.approx(math.exp(20), rel=1e-5)
    assert float(gradient[1]) == pytest.approx(math.exp(0.1), rel=1e-5)
    kl, _ = kl_loss(log_prob[:, None], torch.zeros(2, 1), mask[:, None], torch.ones(2))
    (gradient,) = torch.autograd.grad(kl, log_prob)
    assert float(gradient[0]) == pytest.approx(1 - math.exp(-20)), (
        "k3 grows by 1 per nat of what the reference does not say"
    )


@pytest.mark.parametrize("difference", [500.0, -500.0])
def test_an_overflow_that_counts_is_finite(difference: float) -> None:
    log_prob = torch.tensor([difference], requires_grad=True)
    for advantage in (torch.ones(1), -torch.ones(1)):
        loss, statistics = ppo_policy_loss(
            log_prob, torch.zeros(1), advantage, torch.ones(1, dtype=torch.bool)
        )
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert (
            loss.isfinite()
            and gradient.isfinite()
            and all(value.isfinite() for value in statistics.values())
        )


@given(calls(), st.sampled_from([None, 0.1, 1.0]))
def test_value_loss_against_a_loop(drawn: Calls, clip: float | None) -> None:
    expected = 0.0
    for i in drawn.mask.nonzero().flatten().tolist():
        value = float(drawn.value[i])
        old = float(drawn.old_value[i])
        target = float(drawn.target[i])
        held = value if clip is None else min(max(value, old - clip), old + clip)
        expected += 0.5 * max((target - value) ** 2, (target - held) ** 2)
    assert float(drawn.value_loss(clip)) == pytest.approx(expected)


@given(calls(), st.sampled_from([None, 0.5]))
def test_value_gradient_by_finite_differences(drawn: Calls, clip: float | None) -> None:
    assert_gradient(lambda: drawn.value_loss(clip), drawn.value, drawn.mask)


@given(calls(), st.integers(1, 7))
def test_micro_batches_add_up(drawn: Calls, size: int) -> None:
    rows = [slice(start, start + size) for start in range(0, len(drawn.mask), size)]
    loss, statistics = drawn.policy_loss()
    parts = [drawn.policy_loss(part) for part in rows]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    for name, value in statistics.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), value)
    torch.testing.assert_close(
        sum(drawn.value_loss(0.5, part) for part in rows), drawn.value_loss(0.5)
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_joint_adds_the_executed_actions(size: int, chunk: int, dims: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, chunk, dims, generator=generator, dtype=torch.float64)
    valid = torch.rand(size, chunk, generator=generator) < 0.6
    expected = [
        sum(float(values[n, c, d]) for c in range(chunk) if valid[n, c] for d in range(dims))
        for n in range(size)
    ]
    poisoned = torch.where(valid[..., None], values, float("-inf")).requires_grad_(True)
    result = joint(poisoned, valid)
    assert result.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(result.sum(), poisoned)
    assert torch.equal(gradient, valid[..., None].expand_as(values).double())

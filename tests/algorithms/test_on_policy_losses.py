"""Losses on elements finer than a chunk, and their averages, against loops."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.algorithms.on_policy import (
    AGGREGATIONS,
    GRANULARITIES,
    Clip,
    aggregation_weights,
    element_mask,
    elements,
    kl_loss,
    policy_loss,
    value_loss,
)
from tests.algorithms.trajectories import GARBAGE

CALLS, CHUNK, DIMS = 9, 3, 2


class Drawn:
    """Random calls, float64, with garbage where nothing was executed; some calls executed no action."""

    def __init__(self, seed: int, granularity: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        executed = torch.randint(0, CHUNK + 1, (CALLS,), generator=self.generator)
        executed[0] = CHUNK
        self.valid = torch.arange(CHUNK) < executed[:, None]
        self.new, self.old, self.near, self.reference = (self.log_probs() for _ in range(4))
        self.advantage = torch.randn(CALLS, generator=self.generator, dtype=torch.float64)
        self.advantage[executed == 0] = float("nan")
        self.episode = torch.randint(0, 5, (CALLS,), generator=self.generator)
        self.group = self.episode // 2
        self.granularity = granularity
        self.mask = element_mask(self.valid, DIMS, granularity)

    def log_probs(self) -> Tensor:
        values = (
            torch.randn(CALLS, CHUNK, DIMS, generator=self.generator, dtype=torch.float64) * 0.3
        )
        poison = torch.tensor(GARBAGE, dtype=torch.float64)[
            torch.randint(0, len(GARBAGE), values.shape, generator=self.generator)
        ]
        return torch.where(self.valid[..., None], values, poison)

    def elements(self, name: str) -> Tensor:
        return elements(getattr(self, name), self.valid, self.granularity)

    def each(self, name: str) -> dict[int, list[float]]:
        """The elements of each call that count, by the definition."""
        found: dict[int, list[float]] = defaultdict(list)
        for n in range(CALLS):
            executed = [
                [float(getattr(self, name)[n, c, d]) for d in range(DIMS)]
                for c in range(CHUNK)
                if self.valid[n, c]
            ]
            if executed:
                actions = [sum(action) for action in executed]
                tokens = [value for action in executed for value in action]
                found[n] = {"chunk": [sum(actions)], "action": actions, "token": tokens}[
                    self.granularity
                ]
        return found


drawn = st.builds(Drawn, st.integers(0, 2**32 - 1), st.sampled_from(GRANULARITIES))


@given(drawn)
def test_elements_and_their_mask(case: Drawn) -> None:
    found, expected = case.elements("new"), case.each("new")
    for n in range(CALLS):
        assert found[n][case.mask[n]].tolist() == pytest.approx(expected[n])


@given(drawn, st.sampled_from(AGGREGATIONS))
def test_aggregations_are_their_means(case: Drawn, aggregation: str) -> None:
    weight = aggregation_weights(case.mask, case.episode, case.group, aggregation)
    expected = mean_over(case, case.each("new"), aggregation)
    total = torch.where(case.mask, weight[:, None] * case.elements("new"), 0).sum()
    assert float(total) == pytest.approx(expected, abs=1e-6)
    assert float((weight * case.mask.sum(1)).sum()) == pytest.approx(1)


def mean_over(case: Drawn, values: dict[int, list[float]], aggregation: str) -> float:
    units: dict[int, list[float]] = defaultdict(list)
    for n, found in values.items():
        unit = {
            "token_mean": 0,
            "trajectory_mean": int(case.episode[n]),
            "group_mean": int(case.group[n]),
        }[aggregation]
        units[unit] += found
    means = [sum(unit) / len(unit) for unit in units.values()]
    return sum(means) / len(means)


CLIPS = [Clip(0.2, 0.28), Clip(0.1, 0.1, dual=1.3), Clip(0.2, 0.2, behaviour=1.05)]


@given(drawn, st.sampled_from(CLIPS), st.booleans())
def test_policy_loss_against_a_loop(case: Drawn, clip: Clip, decoupled: bool) -> None:
    weight = aggregation_weights(case.mask, case.episode, case.group, "trajectory_mean").double()
    near = case.each("near") if decoupled else case.each("old")
    expected = clipped = 0.0
    for n, new in case.each("new").items():
        for log_prob, proximal, old in zip(new, near[n], case.each("old")[n], strict=True):
            behaviour = math.exp(proximal - old)
            if decoupled and clip.behaviour is not None and behaviour > clip.behaviour:
                continue
            ratio = math.exp(log_prob - proximal)
            advantage = float(case.advantage[n])
            gain = min(ratio * advantage, min(max(ratio, 1 - clip.low), 1 + clip.high) * advantage)
            if clip.dual is not None and advantage < 0:
                gain = max(gain, clip.dual * advantage)
            expected -= float(weight[n]) * behaviour * gain
            clipped += float(weight[n]) * (not 1 - clip.low <= ratio <= 1 + clip.high)
    log_prob = case.elements("new").requires_grad_(True)
    proximal = case.elements("near") if decoupled else None
    loss, statistics = policy_loss(
        log_prob, case.elements("old"), case.advantage, case.mask, weight, clip, proximal
    )
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-9)
    assert float(statistics["clip_fraction"]) == pytest.approx(clipped, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient.isfinite().all() and (gradient[~case.mask] == 0).all()


@given(drawn)
def test_a_proximal_policy_equal_to_the_behaviour_policy_changes_nothing(case: Drawn) -> None:
    weight = torch.ones(CALLS, dtype=torch.float64)
    arguments: Any = (
        case.elements("new"),
        case.elements("old"),
        case.advantage,
        case.mask,
        weight,
        Clip(),
    )
    plain = policy_loss(*arguments)
    decoupled = policy_loss(*arguments, proximal=case.elements("old"))
    torch.testing.assert_close(plain[0], decoupled[0])
    for name, value in plain[1].items():
        torch.testing.assert_close(value, decoupled[1][name])


@given(drawn)
def test_divergence_from_a_reference(case: Drawn) -> None:
    weight = torch.rand(CALLS, generator=case.generator, dtype=torch.float64)
    k3, k1 = kl_loss(case.elements("new"), case.elements("reference"), case.mask, weight)
    expected3 = expected1 = 0.0
    for n, new in case.each("new").items():
        for log_prob, reference in zip(new, case.each("reference")[n], strict=True):
            expected3 += float(weight[n]) * (
                math.exp(reference - log_prob) - 1 - (reference - log_prob)
            )
            expected1 += float(weight[n]) * (log_prob - reference)
    assert (float(k3), float(k1)) == (
        pytest.approx(expected3, abs=1e-9),
        pytest.approx(expected1, abs=1e-9),
    )


def test_k3_estimates_the_divergence() -> None:
    """Between two categorical distributions, from samples of the first; and its gradient vanishes where they are equal."""
    logits = torch.randn(
        2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).log_softmax(-1)
    samples = torch.multinomial(
        logits[0].exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    log_prob, reference = logits[0][samples][:, None], logits[1][samples][:, None]
    weight = torch.full((len(samples),), 1 / len(samples), dtype=torch.float64)
    exact = float((logits[0].exp() * (logits[0] - logits[1])).sum())
    k3, k1 = kl_loss(log_prob, reference, torch.ones_like(log_prob, dtype=torch.bool), weight)
    assert (float(k3), float(k1)) == (
        pytest.approx(exact, rel=0.03),
        pytest.approx(exact, rel=0.03),
    )
    same = log_prob.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(
        kl_loss(same, log_prob, torch.ones_like(same, dtype=torch.bool), weight)[0], same
    )
    assert gradient.abs().max() < 1e-15


def test_a_huber_critic_is_linear_for_large_errors() -> None:
    value = torch.tensor([0.0, 0.5, 10.0], dtype=torch.float64)
    found = [
        float(
            value_loss(
                value[i : i + 1],
                value[:1],
                torch.zeros(1).double(),
                torch.ones(1).bool(),
                None,
                1.0,
            )
        )
        for i in range(3)
    ]
    assert found == pytest.approx([0.0, 0.125, 9.5])

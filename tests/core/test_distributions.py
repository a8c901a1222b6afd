"""Divergences of distributions against sums, integrals and PyTorch's own, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical as Chosen
from torch.distributions import Normal, kl_divergence

from rlinf_vla.core.distributions import Categorical, Gaussian

SHAPE = (2, 3, 2)
NUMBERS = torch.linspace(-1, 1, 5)[:, None].expand(-1, 2)
seeds = st.integers(0, 2**32 - 1)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def categorical(seed: int, scale: float = 2.0) -> Categorical:
    return Categorical((scale * normal(*SHAPE, 5, seed=seed)).log_softmax(-1), NUMBERS)


@given(seeds)
def test_of_tokens_it_is_the_sum_over_them(seed: int) -> None:
    p, q = categorical(seed), categorical(seed + 1)
    found = p.divergence(q)
    for at in np.ndindex(SHAPE):
        first, second = p.log_prob[at].exp().tolist(), q.log_prob[at].exp().tolist()
        total = sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))
        assert float(found[at]) == pytest.approx(total, abs=1e-12)
    torch.testing.assert_close(
        found, kl_divergence(Chosen(logits=p.log_prob), Chosen(logits=q.log_prob))
    )


def test_certain_choices_keep_it_and_its_gradient_finite() -> None:
    logits = torch.tensor([[[[0.0, 400.0, -900.0]]]], requires_grad=True)
    other = Categorical(torch.tensor([[[[500.0, 0.0, 0.0]]]]).log_softmax(-1), NUMBERS[:3])
    own = Categorical(logits.log_softmax(-1), NUMBERS[:3])
    for divergence in (own.divergence(other), other.divergence(own)):
        (gradient,) = torch.autograd.grad(divergence.sum(), logits, retain_graph=True)
        assert divergence.isfinite().all() and gradient.isfinite().all()


@given(seeds)
def test_of_gaussians_it_is_the_integral(seed: int) -> None:
    mean, log_std, other_mean, other_log_std = 0.7 * normal(4, *SHAPE, seed=seed)
    found = Gaussian(mean, log_std).divergence(Gaussian(other_mean, other_log_std))
    p, q = Normal(mean, log_std.exp()), Normal(other_mean, other_log_std.exp())
    x = mean + log_std.exp() * torch.linspace(-12, 12, 20_001, dtype=torch.float64).reshape(
        -1, 1, 1, 1
    )
    integral = torch.trapezoid(p.log_prob(x).exp() * (p.log_prob(x) - q.log_prob(x)), x, dim=0)
    torch.testing.assert_close(found, integral, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found, kl_divergence(p, q))


@given(seeds)
def test_the_reverse_one_has_the_mean_gradient_of_the_sampled_estimate(seed: int) -> None:
    """RLinf's on-policy distillation: a policy gradient with the advantage log p_T - log p_S of the
    student's own token. Its mean over all tokens is the gradient of KL(student || teacher)."""
    teacher = categorical(seed)
    logits = (2 * normal(*SHAPE, 5, seed=seed + 1)).requires_grad_()
    student = Categorical(logits.log_softmax(-1), NUMBERS)
    (exact,) = torch.autograd.grad(student.divergence(teacher).sum(), logits, retain_graph=True)
    advantage = (teacher.log_prob - student.log_prob).detach()
    probability = student.log_prob.detach().exp()
    estimate = -(probability * advantage * student.log_prob).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], exact)

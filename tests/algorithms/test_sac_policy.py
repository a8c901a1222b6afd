"""SAC's actor: its actions, their log-probabilities, and the effect of the temperature on both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.sac import LOG_STD_RANGE, SACConfig, SACPolicy, squash
from rlinf_vla.core.protocols import PolicySpec
from tests.rollout.walk import Places

PLACES, CHUNK, DIMS = 3, 2, 2


def policy(**changes: Any) -> SACPolicy:
    base = Places(PLACES, CHUNK)
    base.spec = PolicySpec(chunk=CHUNK, action_dim=DIMS, state_dim=PLACES, images={})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return SACPolicy(base, PLACES, SACConfig(critics=2, hidden=16, **changes))


INPUTS = {"place": torch.eye(PLACES)[[0, 1, 2, 1]]}


class Numbers:
    """Standard normal numbers that are given."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def normal(self, *shape: int) -> Tensor:
        assert self.values.shape[1:] == shape
        return self.values

    def uniform(self, *shape: int) -> Tensor:
        raise AssertionError


def drawn(seed: int) -> Tensor:
    return torch.randn(4, CHUNK, DIMS, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "seed"), [(0.1, 0), (0.5, 1), (1.0, 2), (2.0, 3)])
def test_the_temperature_scales_samples_and_their_density(temperature: float, seed: int) -> None:
    """Before the squashing, actions are ``mean + temperature std z`` of a standard normal z, with the density that follows."""
    subject = policy()
    z = drawn(seed)
    features = subject.encode(INPUTS)
    mean, log_std = subject.distribution(features.pooled)
    std = temperature * log_std.exp()
    sample = subject.act(features, Numbers(z), temperature)
    torch.testing.assert_close(sample.actions, (mean + std * z).tanh())
    normal = torch.distributions.Normal(mean.double(), std.double())
    pre = (mean + std * z).double()
    density = normal.log_prob(pre) - 2 * (
        math.log(2) - pre - torch.nn.functional.softplus(-2 * pre)
    )
    torch.testing.assert_close(sample.log_prob, density.float(), atol=1e-4, rtol=1e-4)
    again = subject.evaluate(INPUTS, sample.latent, temperature)
    torch.testing.assert_close(again.log_prob, sample.log_prob)
    torch.testing.assert_close(again.entropy, normal.entropy().float())
    torch.testing.assert_close(again.value, sample.value)


@torch.no_grad()
def test_temperature_zero_gives_the_mean() -> None:
    subject = policy()
    features = subject.encode(INPUTS)
    mean, _ = subject.distribution(features.pooled)
    greedy = subject.act(features, None, 0.0)
    torch.testing.assert_close(greedy.actions, mean.tanh())
    torch.testing.assert_close(
        greedy.log_prob, subject.evaluate(INPUTS, greedy.latent, 1.0).log_prob
    )


@torch.no_grad()
def test_samples_of_an_update_equal_those_of_a_rollout_at_temperature_one() -> None:
    subject = policy()
    z = drawn(5)
    features = subject.encode(INPUTS)
    chosen, log_prob = subject.draw(features.pooled, z)
    sample = subject.act(features, Numbers(z), 1.0)
    torch.testing.assert_close(chosen, sample.latent["chosen"])
    torch.testing.assert_close(log_prob, sample.log_prob.sum((1, 2)))


def test_samples_are_reparameterised() -> None:
    """The gradient of a sample reaches mean and standard deviation: d tanh(m + s z) = (1 - a**2) (dm + z ds)."""
    mean = torch.tensor([[0.3]], requires_grad=True)
    log_std = torch.tensor([[-1.0]], requires_grad=True)
    z = torch.tensor([[1.5]])
    action, _ = squash(mean + log_std.exp() * z, mean, log_std)
    by_mean, by_spread = torch.autograd.grad(action.sum(), (mean, log_std))
    slope = float(1 - action.detach() ** 2)
    assert by_mean.item() == pytest.approx(slope) and by_spread.item() == pytest.approx(
        slope * 1.5 * math.exp(-1)
    )


@pytest.mark.parametrize("free", [-100.0, 0.0, 100.0])
def test_the_standard_deviation_stays_in_its_range(free: float) -> None:
    subject = policy()
    last: Any = subject.actor[-2]
    torch.nn.init.zeros_(last.weight)
    last.bias.data[:] = free
    _, log_std = subject.distribution(torch.eye(PLACES))
    low, high = LOG_STD_RANGE
    expected = {-100.0: low, 0.0: (low + high) / 2, 100.0: high}[free]
    assert log_std.flatten().tolist() == pytest.approx([expected] * (PLACES * CHUNK * DIMS))


@torch.no_grad()
def test_a_value_is_the_mean_of_the_critics_for_the_likeliest_action() -> None:
    subject = policy()
    features = subject.encode(INPUTS)
    mean, _ = subject.distribution(features.pooled)
    expected = subject.critics(features.pooled, mean.tanh()).mean(dim=0)
    torch.testing.assert_close(subject.value(features), expected)


@torch.no_grad()
def test_imitation_is_the_mean_squared_distance_from_the_likeliest_action() -> None:
    subject = policy()
    shown = drawn(3).clamp(-1, 1)
    features = subject.encode(INPUTS).pooled
    mean, _ = subject.distribution(features)
    expected = [float(((mean[i].tanh() - shown[i]) ** 2).mean()) for i in range(4)]
    assert subject.imitation(features, shown).tolist() == pytest.approx(expected)


class Steered(Places):
    """Its actions equal their initial noise."""

    noise_dim = DIMS

    def act_from_noise(self, features: Any, noise: Tensor) -> Tensor:
        return noise[:, None].expand(-1, self.spec.chunk, -1)


@torch.no_grad()
def test_steered_noise_is_bounded_and_its_probability_counts_once_per_chunk() -> None:
    base = Steered(PLACES, CHUNK)
    base.spec = PolicySpec(chunk=CHUNK, action_dim=DIMS, state_dim=PLACES, images={})
    subject = SACPolicy(
        base, PLACES, SACConfig(critics=2, hidden=16, noise_bound=1.7, frozen_backbone=True)
    )
    z = drawn(2)[:, 0]
    features = subject.encode(INPUTS)
    sample = subject.act(features, Numbers(z), 1.0)
    mean, log_std = subject.distribution(features.pooled)
    chosen, log_prob = squash(mean + log_std.exp() * z, mean, log_std)
    torch.testing.assert_close(sample.actions, 1.7 * chosen[:, None].expand(-1, CHUNK, -1))
    assert sample.log_prob.shape == (4, CHUNK, DIMS)
    torch.testing.assert_close(sample.log_prob[:, 0, 0], log_prob.sum(1))
    assert sample.log_prob.flatten(1)[:, 1:].abs().max() == 0

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.models import flow

MEAN, STD = 0.3, 0.4


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """``E[noise - action | x_t]`` in closed form, for normal actions with MEAN and STD."""
    variance = t**2 + (1 - t) ** 2 * STD**2
    off = x - (1 - t) * MEAN
    return (t - (1 - t) * STD**2) / variance * off - MEAN


@pytest.mark.parametrize("stochastic", [False, True])
def test_samples_have_the_distribution_of_the_actions(stochastic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    steps = 200
    count = 40_000
    x = torch.randn(count, generator=generator)
    for time in flow.times(steps):
        v = velocity(x, time)
        if stochastic:
            mean, std = flow.sde_step(x, v, time.expand(count), steps, noise_level=0.5)
            x = mean + std * torch.randn(count, generator=generator)
        else:
            x = flow.ode_step(x, v, steps)
    assert abs(float(x.mean()) - MEAN) < 0.01
    assert abs(float(x.std()) - STD) < 0.01


@given(
    t=st.floats(0.05, 0.95),
    x=st.floats(-3, 3),
    v=st.floats(-3, 3),
    level=st.floats(0.05, 1.0),
    steps=st.integers(1, 20),
)
def test_a_stochastic_step_is_that_of_euler_and_maruyama(
    t: float, x: float, v: float, level: float, steps: int
) -> None:
    """``dx = (v - sigma**2 / 2 * score) dt + sigma dw``, backwards in time."""
    delta = 1 / steps
    remaining = delta if t >= 1 - 0.5 * delta else 1 - t
    sigma = level * (t / remaining) ** 0.5
    score = -(x + (1 - t) * v) / t
    mean, std = flow.sde_step(
        *(torch.tensor([value], dtype=torch.float64) for value in (x, v, t)), steps, level
    )
    assert float(mean) == pytest.approx(x - delta * (v - sigma**2 / 2 * score), rel=1e-6, abs=1e-6)
    assert float(std) == pytest.approx(sigma * delta**0.5, rel=1e-6)


def test_the_first_step_has_the_noise_level_for_any_number_of_steps() -> None:
    x = torch.randn(4)
    for steps in (1, 2, 5, 10):
        _, std = flow.sde_step(x, x, torch.ones(4), steps, noise_level=0.7)
        assert std.tolist() == pytest.approx([0.7] * 4)


def test_a_step_without_noise_is_eulers() -> None:
    x, v = torch.randn(5), torch.randn(5)
    mean, std = flow.sde_step(x, v, torch.full((5,), 0.5), 4, noise_level=0.0)
    torch.testing.assert_close(mean, flow.ode_step(x, v, 4))
    assert not std.any()


@given(mean=st.floats(-2, 2), std=st.floats(0.05, 2))
def test_densities_integrate_to_one_and_entropy_is_their_mean(mean: float, std: float) -> None:
    grid = torch.linspace(mean - 8 * std, mean + 8 * std, 4001, dtype=torch.float64)
    width = grid[1] - grid[0]
    log_prob = flow.gaussian_log_prob(
        grid, torch.full_like(grid, mean), torch.tensor(std, dtype=torch.float64)
    )
    assert float(log_prob.exp().sum() * width) == pytest.approx(1, abs=1e-6)
    entropy = flow.gaussian_entropy(torch.tensor(std, dtype=torch.float64))
    assert float(-(log_prob.exp() * log_prob).sum() * width) == pytest.approx(
        float(entropy), abs=1e-6
    )


def test_a_deterministic_step_adds_nothing_and_has_no_nan_gradient() -> None:
    mean = torch.randn(3, requires_grad=True)
    std = torch.tensor([0.0, 0.5, 0.0])
    log_prob = flow.gaussian_log_prob(mean.detach() + 0.1, mean, std)
    assert log_prob[[0, 2]].tolist() == [0, 0] and flow.gaussian_entropy(std)[[0, 2]].tolist() == [
        0,
        0,
    ]
    log_prob.sum().backward()
    assert mean.grad is not None and mean.grad[[0, 2]].tolist() == [0, 0] and mean.grad[1] != 0


def test_times_run_from_noise_to_the_last_step() -> None:
    times = flow.times(10)
    assert times[0] == 1 and len(times) == 10
    torch.testing.assert_close(times, torch.arange(10, 0, -1) / 10)


def test_training_times_are_those_of_openpi() -> None:
    """0.999 Beta(1.5, 1) + 0.001."""
    uniform = (torch.arange(100_000) + 0.5) / 100_000
    found = flow.training_times(uniform)
    beta = torch.distributions.Beta(torch.tensor(1.5), torch.tensor(1.0))
    assert float(found.mean()) == pytest.approx(0.999 * float(beta.mean) + 0.001, abs=1e-3)
    assert float(found.var()) == pytest.approx(0.999**2 * float(beta.variance), abs=1e-3)
    assert found.min() >= 0.001 and found.max() <= 1


def test_interpolation_and_its_velocity() -> None:
    actions = torch.randn(3, 2, 4)
    noise = torch.randn(3, 2, 4)
    time = torch.tensor([0.0, 0.25, 1.0])
    x, v = flow.interpolate(actions, noise, time)
    torch.testing.assert_close(x[0], actions[0])
    torch.testing.assert_close(x[2], noise[2])
    torch.testing.assert_close(x[1] - 0.25 * v[1], actions[1])

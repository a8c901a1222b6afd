"""Real-time chunking in a case with a closed form: jointly normal actions, which have a linear flow."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise, RealTimeChunking
from rlinf_vla.models import flow, real_time
from rlinf_vla.models.pi0.gemma import RMSNorm
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.testing.policy_calls import observations
from tests.models.test_pi0 import small

HORIZON = 12
MEAN = torch.linspace(-0.5, 0.5, HORIZON)
PLACE = torch.arange(HORIZON, dtype=torch.float32)
COVARIANCE = torch.exp(-(((PLACE[:, None] - PLACE) / 4) ** 2)) + 1e-3 * torch.eye(HORIZON)
"""Smooth trajectories."""


def field(t: Tensor) -> tuple[Tensor, Tensor]:
    """``A``, ``b``: the velocity ``E[noise - action | x]`` is ``A x + b``, for actions with MEAN and COVARIANCE."""
    inverse = torch.linalg.inv(t**2 * torch.eye(HORIZON) + (1 - t) ** 2 * COVARIANCE)
    slope = (t * torch.eye(HORIZON) - (1 - t) * COVARIANCE) @ inverse
    return slope, -MEAN - (1 - t) * slope @ MEAN


def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` ``[B, H, 1]``."""
    slope, offset = field(t)
    return (x[..., 0] @ slope.T + offset)[..., None], x


def sample(velocity_at: real_time.Velocity, count: int, steps: int) -> Tensor:
    """``[B, H]``."""
    x = torch.randn(count, HORIZON, 1, generator=torch.Generator().manual_seed(0))
    for time in flow.times(steps):
        x = flow.ode_step(x, velocity_at(x, time)[0], steps)
    return x[..., 0]


def onto(target: Tensor, committed: int, frozen: int) -> real_time.Velocity:
    return real_time.guided_velocity(
        velocity,
        target[None, :, None],
        real_time.prefix_weights(committed, frozen, HORIZON)[:, None],
    )


@given(st.integers(0, 12), st.integers(0, 12))
def test_weights_are_those_of_the_paper(committed: int, frozen: int) -> None:
    """Equation 5, with H - s committed actions."""
    frozen = min(frozen, committed)
    for place, found in enumerate(real_time.prefix_weights(committed, frozen, HORIZON).tolist()):
        c = (committed - place) / (committed - frozen + 1)
        soft = c * (math.exp(c) - 1) / (math.e - 1)
        assert found == pytest.approx(
            1 if place < frozen else soft if place < committed else 0, abs=1e-6
        )


@given(st.floats(0.001, 0.999))
def test_guidance_is_that_of_the_paper(t: float) -> None:
    tau = 1 - t
    r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
    assert float(real_time.guidance(torch.tensor(t, dtype=torch.float64))) == pytest.approx(
        min(5, (1 - tau) / (tau * r2)), rel=1e-6
    )


def test_guidance_is_bounded_for_pure_noise() -> None:
    assert float(real_time.guidance(torch.tensor(1.0))) == 5


def test_a_guided_step_in_closed_form() -> None:
    """``v - g (I - t A)^T W (Y - (I - t A) x + t b)``."""
    target = torch.randn(HORIZON)
    x = torch.randn(3, HORIZON, 1)
    weights = real_time.prefix_weights(8, 3, HORIZON)
    for time in (1.0, 0.7, 0.2):
        t = torch.tensor(time)
        slope, offset = field(t)
        jacobian = torch.eye(HORIZON) - t * slope
        error = weights * (target - (x[..., 0] @ jacobian.T - t * offset))
        expected = velocity(x, t)[0][..., 0] - real_time.guidance(t) * error @ jacobian
        torch.testing.assert_close(
            onto(target, 8, 3)(x, t)[0][..., 0], expected, atol=1e-5, rtol=1e-4
        )


def test_without_a_prefix_the_flow_is_unchanged() -> None:
    assert torch.equal(sample(onto(torch.zeros(HORIZON), 0, 0), 50, 10), sample(velocity, 50, 10))


def test_the_prefix_is_kept_and_the_rest_continues_it() -> None:
    before = (
        torch.linalg.cholesky(COVARIANCE)
        @ torch.randn(HORIZON, generator=torch.Generator().manual_seed(3))
        + MEAN
    )
    frozen = 5
    target = torch.where(PLACE < 9, before, 0)
    free = sample(velocity, 2000, 40)
    kept = sample(onto(target, 9, frozen), 2000, 40)
    prefix = before[:frozen]
    assert (free[:, :frozen] - prefix).abs().mean() > 0.5
    assert (kept[:, :frozen] - prefix).abs().mean() < 0.05
    # the conditional distribution of normal trajectories after that prefix
    gain = COVARIANCE[frozen:, :frozen] @ torch.linalg.inv(COVARIANCE[:frozen, :frozen])
    following = MEAN[frozen] + (gain @ (prefix - MEAN[:frozen]))[0]
    assert (kept[:, frozen].mean() - following).abs() < 0.1, "the next step is almost certain"
    jumps = (free[:, frozen] - prefix[-1]).abs().mean(), (kept[:, frozen] - prefix[-1]).abs().mean()
    natural = (before[1:] - before[:-1]).abs().max()
    assert jumps[1] < natural < jumps[0], (
        "a chunk that is spliced onto the prefix jumps; this one does not"
    )
    assert kept[:, -1].std() > 0.5, "distant steps are not constrained"


def noise(count: int) -> Noise:
    number = torch.arange(count)
    return CounterNoise(7, torch.zeros_like(number), number, torch.zeros_like(number))


@pytest.mark.parametrize("sampler", ["flow_sde", "flow_sde_all", "flow_noise"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_pi0_with_an_empty_prefix_acts_as_without(
    tmp_path: Path, sampler: str, temperature: float
) -> None:
    policy = small(tmp_path / "pi0", sampler=sampler)
    assert isinstance(policy, RealTimeChunking)
    features = policy.encode(policy.prepare(observations(policy, 3)))
    plain = policy.act(features, noise(3), temperature)
    found = policy.act_with_prefix(features, noise(3), temperature, torch.zeros(3, 0, 4), 0)
    assert torch.equal(found.actions, plain.actions) and torch.equal(found.log_prob, plain.log_prob)


@pytest.mark.parametrize("pi05", [False, True])
@torch.no_grad()
def test_pi0_continues_the_committed_actions(tmp_path: Path, pi05: bool) -> None:
    policy = small(tmp_path / "pi0", pi05, denoise_steps=10, delta_mask=[3, -1])
    features = policy.encode(policy.prepare(observations(policy, 8)))
    plain = policy.act(features, noise(8), 1.0).actions
    committed = plain[:, :3] + 0.2
    found = policy.act_with_prefix(features, noise(8), 1.0, committed, 2).actions
    assert torch.equal(found[:, :2], committed[:, :2])
    distance, before = ((each[:, 2] - committed[:, 2]).abs().mean() for each in (found, plain))
    assert distance < 0.8 * before
    assert not torch.equal(found[:, 3], plain[:, 3]), (
        "later actions depend on it through the network"
    )
    assert policy.backbone.action_out_proj.weight.grad is None


@given(st.integers(1, 8), st.floats(0.01, 0.99))
def test_simulated_delays_are_equally_frequent(longest: int, time: float) -> None:
    uniform = (torch.arange(9000) + 0.5) / 9000
    times = real_time.simulated_times(torch.full((9000,), time), uniform, longest, HORIZON)
    delays = (times == 0).sum(1)
    assert torch.equal(times, torch.where(delays[:, None] > PLACE, 0.0, torch.tensor(time)))
    assert delays.bincount().tolist() == pytest.approx(
        [9000 / (longest + 1)] * (longest + 1), abs=1
    )


@pytest.mark.parametrize("pi05", [False, True])
@torch.no_grad()
def test_equal_times_of_all_actions_are_one_time(tmp_path: Path, pi05: bool) -> None:
    policy = with_live_conditions(small(tmp_path / "pi0", pi05))
    features = policy.encode(policy.prepare(observations(policy, 3)))
    x = torch.randn(3, policy.config.horizon, policy.config.action_dim)
    time = torch.tensor([0.2, 0.5, 1.0])
    one, each = (
        policy.backbone.velocity(features.prefix, features.state, x, t)[0]
        for t in (time, time[:, None].expand(x.shape[:2]))
    )
    torch.testing.assert_close(each, one, atol=1e-6, rtol=1e-5)
    changed = policy.backbone.velocity(
        features.prefix,
        features.state,
        x,
        torch.cat([time[:, None] / 2, time[:, None].expand(3, x.shape[1] - 1)], 1),
    )[0]
    assert (changed - one).abs().amax(dim=2).gt(1e-6).all(), (
        "the time of one action reaches all through attention"
    )


@pytest.mark.parametrize("pi05", [False, True])
@torch.no_grad()
def test_the_loss_leaves_out_given_actions(tmp_path: Path, pi05: bool) -> None:
    """Against the definition in arXiv 2512.05964, example by example."""
    policy = with_live_conditions(small(tmp_path / "pi0", pi05, simulated_delay=2))
    horizon, dim = policy.config.horizon, policy.config.action_dim
    inputs = policy.prepare(observations(policy, 12))
    actions = torch.rand(12, horizon, policy.spec.action_dim)
    found = policy.supervised_loss(inputs, actions, noise(12))
    again = noise(12)
    time = flow.training_times(again.uniform(1)[:, 0])
    delays = (3 * again.uniform(1)[:, 0]).long().tolist()
    normal = again.normal(horizon, dim)
    features = policy.encode(inputs)
    target = policy.action_normalizer(actions)
    target = torch.nn.functional.pad(target, (0, dim - target.shape[2]))
    assert set(delays) == {0, 1, 2}
    for row, delay in enumerate(delays):
        x = target.clone()
        times = torch.zeros(12, horizon)
        x[row, delay:] = time[row] * normal[row, delay:] + (1 - time[row]) * target[row, delay:]
        times[row, delay:] = time[row]
        velocity = policy.backbone.velocity(features.prefix, features.state, x, times)[0]
        expected = (velocity - (normal - target))[row, delay:].square().mean()
        assert float(found[row]) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("pi05", [False, True])
@torch.no_grad()
def test_a_policy_of_simulated_delays_is_given_the_committed_actions(
    tmp_path: Path, pi05: bool
) -> None:
    """Its chunk depends on the frozen actions and on nothing else of what is committed."""
    policy = with_live_conditions(small(tmp_path / "pi0", pi05, simulated_delay=2))
    features = policy.encode(policy.prepare(observations(policy, 4)))
    committed = policy.act(features, noise(4), 1.0).actions[:, :3] + 0.1

    def rest(committed: Tensor, frozen: int) -> Tensor:
        found = policy.act_with_prefix(features, noise(4), 1.0, committed, frozen).actions
        assert torch.equal(found[:, :frozen], committed[:, :frozen])
        return found[:, frozen:]

    torch.testing.assert_close(rest(committed, 0), policy.act(features, noise(4), 1.0).actions)
    beyond, within = committed.clone(), committed.clone()
    beyond[:, 2] += 0.3
    within[:, 1] += 0.3
    assert torch.equal(rest(beyond, 2), rest(committed, 2))
    assert not torch.equal(rest(within, 2), rest(committed, 2))
    assert torch.equal(rest(beyond, 3), rest(committed, 3)), (
        "a longer delay counts as the longest simulated one"
    )


def test_a_simulated_delay_is_stored_in_the_checkpoint_and_must_fit(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    policy = small(tmp_path / "small", simulated_delay=2)
    policy.save(saved)
    assert json.loads((saved / "config.json").read_text())["simulated_delay"] == 2
    with pytest.raises(UserError, match="simulated_delay=3 leaves nothing of a chunk of 3 actions"):
        small(tmp_path / "other", chunk=3, simulated_delay=3)


def with_live_conditions(policy: Pi0Policy) -> Pi0Policy:
    """Give adaRMS weights: a new network has zeros, which ignore the time."""
    for module in policy.modules():
        if isinstance(module, RMSNorm) and module.adaptive:
            torch.nn.init.normal_(
                module.dense.weight, std=0.2, generator=torch.Generator().manual_seed(1)
            )
    return policy

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlinf_vla.algorithms.advantages import GAMMA_UNITS, gae
from rlinf_vla.algorithms.base import CRITIC
from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import Trajectory
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

CONFIG = PPOConfig(
    gamma=0.9,
    gae_lambda=0.8,
    value_coef=0.3,
    entropy_coef=0.2,
    clip_low=0.1,
    clip_high=0.15,
    target_kl=None,
)


@pytest.fixture
def policy() -> LinearPolicy:
    return LinearPolicy(LinearOptions(chunk=3))


@pytest.fixture
def rollouts(policy: LinearPolicy) -> Trajectory:
    return collect(Actor(policy, Settings(1, 1.0, 3)), groups(6, 2), 0, 0, 5, Timeline())


def test_row_groups_divide_a_minibatch() -> None:
    PPO(replace(CONFIG, minibatch_size=12, row_groups=4), 1.0)
    with pytest.raises(
        UserError, match=r"algorithm.row_groups=8 does not divide algorithm.minibatch_size=12"
    ):
        PPO(replace(CONFIG, minibatch_size=12, row_groups=8), 1.0)


@pytest.mark.parametrize(("epsilon", "decay"), [(1e-8, 0.0), (0.5, 0.0), (1e-8, 0.3), (0.02, 0.01)])
def test_the_first_step_is_that_of_adamw(epsilon: float, decay: float) -> None:
    """Adam's moments cancel in the first step: w (1 - rate decay) - rate g / (|g| + epsilon)."""
    config = replace(
        CONFIG, adam_eps=epsilon, weight_decay=decay, learning_rate=0.1, value_learning_rate=0.05
    )
    start = 2.0
    slope = -0.25
    actor, critic = (torch.nn.Parameter(torch.tensor(start, dtype=torch.float64)) for _ in range(2))
    (optimizer,) = (
        PPO(config, 1.0).optimizers({"head.weight": actor, f"{CRITIC}head.weight": critic}).values()
    )
    actor.grad, critic.grad = (torch.tensor(slope, dtype=torch.float64) for _ in range(2))
    optimizer.step()
    for weight, rate in ((actor, 0.1), (critic, 0.05)):
        assert weight.item() == pytest.approx(
            start * (1 - rate * decay) - rate * slope / (abs(slope) + epsilon), abs=1e-9
        )


def moved(policy: LinearPolicy, by: float = 0.02) -> LinearPolicy:
    """Some way from the policy that collected the data."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * by
            )
    return policy


def batch_of(rollouts: Trajectory, config: PPOConfig = CONFIG) -> Batch:
    return PPO(config, 1.0).advantages(rollouts)[0]


@pytest.mark.parametrize("value_only", [False, True])
def test_the_loss_against_a_loop(
    policy: LinearPolicy, rollouts: Trajectory, value_only: bool
) -> None:
    batch = batch_of(rollouts)
    with torch.no_grad():
        new = moved(policy).evaluate(batch.calls.inputs, batch.calls.latent, 1.0)
    actor = critic = entropy = clipped = 0.0
    for n in range(len(batch)):
        executed = batch.calls.valid[n].nonzero().flatten().tolist()
        log_ratio = sum(float((new.log_prob - batch.calls.log_prob)[n, c].sum()) for c in executed)
        ratio = math.exp(log_ratio)
        advantage = float(batch.advantage[n])
        actor -= min(ratio * advantage, min(max(ratio, 0.9), 1.15) * advantage)
        clipped += not 0.9 <= ratio <= 1.15
        critic += 0.5 * (float(new.value[n]) - float(batch.target[n])) ** 2
        entropy += sum(float(new.entropy[n, c].sum()) for c in executed)
    loss, statistics = PPO(CONFIG, 1.0).loss(policy, batch, value_only)
    assert loss.item() == pytest.approx(
        0.3 * critic + (0 if value_only else actor - 0.2 * entropy), rel=1e-4
    )
    expected = {
        "actor/pg_loss": actor,
        "critic/vf_loss": critic,
        "actor/entropy": entropy,
        "actor/clip_fraction": clipped,
    }
    assert {name: statistics[name].item() for name in expected} == pytest.approx(
        expected, rel=1e-3, abs=1e-4
    )
    assert 0 < clipped < len(batch) and not batch.calls.valid.all()


def test_micro_batches_add_up(policy: LinearPolicy, rollouts: Trajectory) -> None:
    batch = batch_of(rollouts)
    algorithm = PPO(CONFIG, 1.0)
    whole, statistics = algorithm.loss(moved(policy), batch, False)
    parts = [
        algorithm.loss(policy, batch[start : start + 7], False) for start in range(0, len(batch), 7)
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-4, atol=1e-4)
    for name, value in statistics.items():
        torch.testing.assert_close(
            sum(part[name] for _, part in parts), value, rtol=1e-4, atol=1e-4
        )


def test_actions_that_were_not_executed_do_not_matter(
    policy: LinearPolicy, rollouts: Trajectory
) -> None:
    spoilt = torch.where(rollouts.valid[..., None], rollouts.log_prob, float("nan"))
    algorithm = PPO(CONFIG, 1.0)
    results = []
    for calls in (rollouts, replace(rollouts, log_prob=spoilt)):
        policy.zero_grad()
        algorithm.loss(policy, batch_of(calls), False)[0].backward()
        results.append(
            [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        )
    assert len(results[0]) > 0
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@pytest.mark.parametrize("unit", GAMMA_UNITS)
@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_are_optionally_normalised_over_the_batch(
    rollouts: Trajectory, normalize: bool, unit: str
) -> None:
    config = replace(CONFIG, normalize_advantages=normalize, gamma_unit=unit)
    batch, metrics = PPO(config, 1.0).advantages(rollouts)
    advantage, target = gae(rollouts, 0.9, 0.8, unit)
    assert torch.equal(batch.target, target.flatten()) and len(batch) == 30
    if normalize:
        assert batch.advantage.mean().abs() < 1e-5 and batch.advantage.std(
            unbiased=False
        ) == pytest.approx(1, abs=1e-4)
    else:
        assert torch.equal(batch.advantage, advantage.flatten())
    assert metrics["critic/advantage_std"] == pytest.approx(advantage.std(unbiased=False).item())
    assert metrics["critic/return_mean"] == pytest.approx(target.mean().item())


def test_target_kl_ends_the_updates() -> None:
    metrics = {"actor/approx_kl": 0.05}
    assert [
        PPO(replace(CONFIG, target_kl=limit), 1.0).enough(metrics) for limit in (None, 0.01, 0.1)
    ] == [False, True, False]

"""The loss of PPO and GRPO against a loop over calls, with different values of all coefficients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.core.types import Trajectory
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

TEMPERATURE = 0.6
CONFIG = PPOConfig(
    value_coef=0.3, entropy_coef=0.2, kl_coef=0.7, clip_low=0.1, clip_high=0.15, target_kl=0.01
)


def moved(by: float = 0.02) -> LinearPolicy:
    policy = LinearPolicy(LinearOptions(chunk=2))
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters()):
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * by
            )
    return policy


def calls() -> Trajectory:
    """Collected by the policy before its update, with log-probabilities of a reference."""
    actor = Actor(LinearPolicy(LinearOptions(chunk=2)), Settings(1, TEMPERATURE, 3))
    found = collect(actor, groups(6, 2), 0, 0, 4, Timeline()).flatten()
    noise = torch.randn(found.log_prob.shape, generator=torch.Generator().manual_seed(0))
    return replace(found, reference=found.log_prob + 0.2 * noise)


def batch(config: PPOConfig, rollouts: Trajectory) -> Batch:
    generator = torch.Generator().manual_seed(3)
    advantage, target = torch.randn(2, len(rollouts), generator=generator)
    return replace(PPO(config, TEMPERATURE).weighted(rollouts, advantage), target=target)


@pytest.mark.parametrize("value_only", [False, True])
def test_all_terms_of_the_loss_against_a_loop(value_only: bool) -> None:
    policy = moved()
    drawn = batch(CONFIG, calls())
    with torch.no_grad():
        new = policy.evaluate(drawn.calls.inputs, drawn.calls.latent, TEMPERATURE)
    actor = critic = entropy = divergence = 0.0

    def total(of: Tensor, n: int) -> float:
        return sum(float(of[n, c].sum()) for c in range(2) if drawn.calls.valid[n, c])

    assert drawn.target is not None and drawn.calls.reference is not None
    for n in range(len(drawn)):
        ratio = math.exp(total(new.log_prob - drawn.calls.log_prob, n))
        advantage = float(drawn.advantage[n])
        actor -= min(ratio * advantage, min(max(ratio, 0.9), 1.15) * advantage)
        away = total(drawn.calls.reference - new.log_prob, n)
        divergence += math.exp(away) - 1 - away
        entropy += total(new.entropy, n)
        critic += 0.5 * (float(new.value[n]) - float(drawn.target[n])) ** 2
    loss, statistics = PPO(CONFIG, TEMPERATURE).loss(policy, drawn, value_only)
    expected = 0.3 * critic + (0 if value_only else actor - 0.2 * entropy + 0.7 * divergence)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert statistics["actor/kl_loss"].item() == pytest.approx(divergence, rel=1e-3)
    policy.zero_grad()
    loss.backward()
    logits: Any = policy.backbone["logits"]  # type: ignore[index]
    assert (logits.weight.grad is None or not logits.weight.grad.any()) == value_only


@pytest.mark.parametrize("aggregation", ["token_mean", "trajectory_mean"])
def test_weights_are_one_on_average_over_the_calls_that_count(aggregation: str) -> None:
    rollouts = calls()
    valid = rollouts.valid.clone()
    valid[::3] = False
    rollouts = replace(rollouts, valid=valid)
    config = replace(CONFIG, aggregation=aggregation)
    weight = PPO(config, TEMPERATURE).weighted(rollouts, torch.zeros(len(rollouts))).weight
    counts = valid.any(-1)
    assert (
        float(weight[counts].mean()) == pytest.approx(1)
        and not weight[~counts].any()
        and not counts.all()
    )


@pytest.mark.parametrize(("divergence", "stops"), [(0.009, False), (0.01, False), (0.011, True)])
def test_updates_end_once_the_divergence_passes_its_limit(divergence: float, stops: bool) -> None:
    assert PPO(CONFIG, 1.0).enough({"actor/approx_kl": divergence}) == stops
    assert not PPO(replace(CONFIG, target_kl=None), 1.0).enough({"actor/approx_kl": divergence})


class Given:
    """A flow that counts updates of the critic only."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.versions = 0
        self.value_only: list[bool] = []

    def collect(self, horizon: int) -> list[Trajectory]:
        actor = Actor(LinearPolicy(LinearOptions(chunk=2)), Settings(1, TEMPERATURE, 3))
        return [collect(actor, groups(2, 1), 0, 0, 3, Timeline())]

    def score(self, rollouts: Any) -> Any:
        return rollouts

    def update(self, batch: Batch, algorithm: Any, value_only: bool = False) -> bool:
        self.value_only.append(value_only)
        return False

    def publish(self) -> None:
        self.versions += 1

    def log(self, metrics: dict[str, float]) -> None: ...


def test_the_first_iterations_train_only_the_critic() -> None:
    found = []
    for iteration in range(4):
        flow = Given(iteration)
        PPO(replace(CONFIG, kl_coef=0.0, value_warmup=2), TEMPERATURE).iteration(flow)  # type: ignore[arg-type]
        found += flow.value_only
        assert flow.versions == 1
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("iterations", "expected"), [(5, [0.2, 0.15, 0.1, 0.05, 0.0]), (1, [0.2]), (2, [0.2, 0.0])]
)
def test_the_entropy_coefficient_goes_to_its_end_in_a_straight_line(
    iterations: int, expected: list[float]
) -> None:
    algorithm = PPO(replace(CONFIG, kl_coef=0.0, entropy_coef_end=0.0), TEMPERATURE, iterations)
    for iteration, coefficient in enumerate(expected):
        algorithm.iteration(Given(iteration))  # type: ignore[arg-type]
        assert algorithm.entropy_coef == pytest.approx(coefficient)
        assert algorithm.state() == {"entropy_coef": algorithm.entropy_coef}


def test_a_trainer_learns_with_the_restored_entropy_coefficient() -> None:
    config = replace(CONFIG, entropy_coef_end=0.0)
    driver = PPO(config, TEMPERATURE, 5)
    driver.schedule(2)
    trainer = PPO(config, TEMPERATURE, 5)
    trainer.restore(driver.state())
    drawn = batch(config, calls())
    found, _ = trainer.loss(moved(), drawn, False)
    expected, _ = PPO(replace(CONFIG, entropy_coef=0.1), TEMPERATURE).loss(moved(), drawn, False)
    assert found.item() == pytest.approx(expected.item())


def test_a_constant_coefficient_is_not_stored() -> None:
    assert PPO(CONFIG, TEMPERATURE, 5).state() == {}

"""The metrics of an iteration in a macro flow."""

from __future__ import annotations

import pytest

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer
from tests.runtime.here import on_policy_flow


def flow(**options: int | None) -> OnPolicyFlow:
    policy = LinearPolicy(LinearOptions(chunk=2))
    trainer = Trainer(policy, OptimizerConfig(0.05, 0.01, 0.5), 100)
    algorithm = PPO(PPOConfig(), 1.0)
    return on_policy_flow(policy, groups(4, 2), trainer, Settings(0, 1.0, 2), algorithm, **options)


@pytest.mark.parametrize(
    "updates",
    [[(3, 1.0), (1, 5.0)], [(1, 2.0), (4, 3.0), (5, -1.0)], [(2, 1.5)], [(0, 0.0), (2, 1.5)]],
)
def test_metrics_of_several_updates_are_means_over_all_optimiser_steps(
    updates: list[tuple[int, float]],
) -> None:
    subject = flow()
    for _ in range(2):  # an iteration does not include the previous one
        subject.begin(0)
        for steps, loss in updates:
            subject.log_update({"actor/pg_loss": loss, "actor/updates": float(steps)})
        total = sum(steps for steps, _ in updates)
        assert subject.metrics["actor/updates"] == total
        assert subject.metrics["actor/pg_loss"] == pytest.approx(
            sum(steps * loss for steps, loss in updates) / total
        )


def test_rollouts_of_an_iteration_are_summed() -> None:
    subject = flow()
    for _ in range(2):
        subject.begin(0)
        subject.log_rollout(2.0, 30)
        subject.log_rollout(3.0, 70)
        assert subject.metrics == {"timing_s/rollout": 5.0, "throughput/rollout_steps_per_s": 20.0}


@pytest.mark.parametrize(
    ("staleness", "iterations", "begun"),
    [
        (0, None, [[(0, 0)], [(1, 1)], [(2, 2)], [(3, 3)]]),
        (1, None, [[(0, 0), (1, 0)], [(2, 1)], [(3, 2)], [(4, 3)]]),
        (1, 4, [[(0, 0), (1, 0)], [(2, 1)], [(3, 2)], []]),
        (2, 3, [[(0, 0), (1, 0), (2, 0)], [], []]),
    ],
)
def test_rollouts_start_staleness_iterations_ahead_with_the_policy_of_then(
    staleness: int, iterations: int | None, begun: list[list[tuple[int, int]]]
) -> None:
    """(iteration, version of the policy) of the rollouts that start in each iteration; unused ones are not started."""
    subject = flow(staleness=staleness, iterations=iterations)
    started: list[tuple[int, int]] = []

    def start(iteration: int, version: int, horizon: int) -> list[object]:
        started.append((iteration, version))
        return [(iteration, horizon)]

    subject.start_slots = start  # type: ignore[method-assign, assignment]
    for iteration, expected in enumerate(begun):
        started.clear()
        subject.begin(iteration)
        assert subject.collect(12) == [(iteration, 12)]
        assert started == expected
        subject.publish()
        assert subject.is_pending_version(iteration) == (
            staleness > 0
        ) and not subject.is_pending_version(iteration + 1)
        assert not subject.is_pending_version(iteration - staleness)

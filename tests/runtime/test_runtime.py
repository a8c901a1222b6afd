from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig, OptimizerConfig
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.core.types import Inputs, gather
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer
from tests.runtime.here import HERE, on_policy_flow, policy_of, trainer_of
from tests.runtime.ray.counting import (
    PPO_CONFIG,
    Recipe,
    algorithm,
    in_process,
    trained,
    with_staleness,
)

CONFIG = PPOConfig(horizon=12, epochs=2, minibatch_size=10, target_kl=None)


def flow(
    policy: LinearPolicy | None = None, config: PPOConfig = CONFIG, **options: Any
) -> OnPolicyFlow:
    policy = policy or LinearPolicy(LinearOptions(chunk=2))
    return on_policy_flow(
        policy,
        groups(4, 2),
        Trainer(policy, OptimizerConfig(0.05, 0.01, 0.5), 100),
        Settings(0, 1.0, 2),
        PPO(config, 1.0),
        **options,
    )


def iterate(
    subject: OnPolicyFlow, count: int, config: PPOConfig = CONFIG
) -> list[dict[str, float]]:
    found = []
    for iteration in range(subject.iteration, subject.iteration + count):
        subject.begin(iteration)
        PPO(config, 1.0).iteration(subject)
        found.append(subject.metrics)
    return found


def test_an_iteration_collects_updates_and_publishes() -> None:
    subject = flow()
    before = {name: value.clone() for name, value in policy_of(subject).state_dict().items()}
    (metrics,) = iterate(subject, 1)
    assert subject.policy_version == 1 and subject.parity is not None and subject.parity.high < 1e-5
    assert any(
        not torch.equal(value, before[name])
        for name, value in policy_of(subject).state_dict().items()
    )
    # six calls of two steps in four environments; two epochs of 24 calls in minibatches of ten
    assert 24 < metrics["rollout/steps"] <= 48 and metrics["actor/updates"] == 6
    assert 0 <= metrics["actor/clip_fraction"] <= 1
    assert {
        "rollout/reward_mean",
        "critic/explained_variance",
        "actor/entropy",
        "timing_s/rollout",
        "timing_s/update",
    } <= metrics.keys()


class HalfFrozen(LinearPolicy):
    """Its features are frozen: ``precompute`` computes them."""

    fixed_rows = 0

    def precompute(self, inputs: Inputs) -> Inputs:
        assert not torch.is_grad_enabled()
        self.fixed_rows += len(inputs["image"])
        return {"features": super().encode(inputs)}

    def encode(self, inputs: Inputs) -> Tensor:
        return inputs["features"] if "features" in inputs else super().encode(inputs)


def test_the_frozen_part_is_computed_once_per_update_with_the_same_result() -> None:
    found = []
    for policy, options in (
        (LinearPolicy, {}),
        (HalfFrozen, {}),
        (HalfFrozen, {"cluster": replace(HERE, reuse_frozen=False)}),
    ):
        subject = flow(policy(LinearOptions(chunk=2)), **options)
        iterate(subject, 2)
        found.append(
            (getattr(policy_of(subject), "fixed_rows", 0), policy_of(subject).state_dict())
        )
    assert [rows for rows, _ in found] == [0, 48, 0], "twice 24 calls for any number of epochs"
    for _, state in found[1:]:
        assert all(torch.equal(value, found[0][1][name]) for name, value in state.items())


def test_one_epoch_reuses_nothing() -> None:
    policy = HalfFrozen(LinearOptions(chunk=2))
    single = replace(CONFIG, epochs=1)
    iterate(flow(policy, single), 1, single)
    assert policy.fixed_rows == 0


def test_co_training_with_demonstrations() -> None:
    """The imitation loss falls, faster with a larger weight, and a resumed run draws the same states."""
    config = replace(CONFIG, demonstrations=DemonstrationConfig(episodes=8), sft_batch_size=12)
    taught_config = replace(config, sft_coef=5.0)
    plain = iterate(flow(config=config), 3, config)
    taught = iterate(flow(config=taught_config), 3, taught_config)
    assert "sft/loss" not in plain[-1] and taught[0]["sft/expert_success"] > 0
    assert taught[-1]["sft/loss"] < taught[0]["sft/loss"] - 0.05
    straight, again = flow(config=taught_config), flow(config=taught_config)
    iterate(straight, 2, taught_config)
    iterate(again, 1, taught_config)
    resumed = flow(policy_of(again), taught_config)
    trainer_of(resumed).load_state(trainer_of(again).state())
    resumed.iteration = 1
    iterate(resumed, 1, taught_config)
    for name, value in policy_of(straight).state_dict().items():
        assert torch.equal(value, policy_of(resumed).state_dict()[name])


def test_an_iteration_learns_with_its_share_of_the_learning_rate() -> None:
    """The last one has none left: its updates change nothing."""
    config = replace(CONFIG, learning_rate_end=0.0)
    policy = LinearPolicy(LinearOptions(chunk=2))
    subject = on_policy_flow(
        policy,
        groups(4, 2),
        Trainer(policy, OptimizerConfig(0.05, 0.01, 0.5), 100),
        Settings(0, 1.0, 2),
        PPO(config, 1.0, 2),
    )
    algorithm = PPO(config, 1.0, 2)
    states = [{name: value.clone() for name, value in policy.state_dict().items()}]
    for iteration in range(2):
        subject.begin(iteration)
        algorithm.iteration(subject)
        states.append({name: value.clone() for name, value in policy.state_dict().items()})
    start, middle, end = states
    assert any(not torch.equal(value, start[name]) for name, value in middle.items())
    assert all(torch.equal(value, middle[name]) for name, value in end.items())
    assert subject.metrics["actor/learning_rate"] == 0 and subject.metrics["actor/updates"] > 0


def test_updates_of_an_iteration_are_logged_as_means_and_peaks() -> None:
    subject = flow()
    subject.begin(0)
    subject.log_update({"actor/updates": 1.0, "actor/loss": 3.0, "memory/update_gb": 5.0})
    subject.log_update({"actor/updates": 2.0, "actor/loss": 6.0, "memory/update_gb": 4.0})
    assert subject.metrics["actor/updates"] == 3
    assert subject.metrics["actor/loss"] == 5 and subject.metrics["memory/update_gb"] == 5


def test_rollouts_have_the_version_of_their_policy() -> None:
    subject = flow()
    subject.policy_version = 7
    subject.begin(0)
    assert (gather(subject.collect(12)).policy_version == 7).all()


def test_a_large_step_ends_the_updates_of_its_iteration() -> None:
    cautious = replace(CONFIG, target_kl=1e-9)
    assert iterate(flow(config=cautious), 1, cautious)[0]["actor/updates"] < 6


def test_each_iteration_has_other_episodes_and_another_order() -> None:
    subject = flow()
    seeds = []
    orders = []
    update = trainer_of(subject).update

    def watching(batch: Any, loss: Any, minibatches: Any, **named: Any) -> dict[str, float]:
        seeds.append(batch.calls.seed.unique().tolist())
        orders.append(tuple(torch.cat(minibatches).tolist()))
        return update(batch, loss, minibatches, **named)

    trainer_of(subject).update = watching  # type: ignore[method-assign]
    iterate(subject, 3)
    assert len(set(orders)) == 3 and len({seed for each in seeds for seed in each}) == sum(
        map(len, seeds)
    )


def test_an_iteration_sets_its_threads_and_reports_progress() -> None:
    threads = {"rollout": set[int](), "update": set[int]()}
    fractions: dict[str, list[float]] = {"rollout": [], "update": []}

    def progress(stage: str, fraction: float) -> None:
        fractions[stage].append(fraction)
        threads[stage].add(torch.get_num_threads())

    before = torch.get_num_threads()
    subject = flow(cluster=replace(HERE, update_threads=before + 1))
    subject.progress = progress
    iterate(subject, 1)
    assert before + 1 in threads["update"] and before + 1 not in threads["rollout"]
    assert torch.get_num_threads() == before
    for told in fractions.values():
        assert max(told) == 1


@pytest.mark.parametrize("staleness", [1, 2])
def test_stale_rollouts_are_of_an_older_policy_and_a_resumed_run_repeats_them(
    staleness: int,
) -> None:
    recipe = with_staleness(Recipe(PPO_CONFIG), staleness)
    straight = in_process(recipe)
    metrics = counted(straight, recipe, range(5))
    assert [each["rollout/staleness"] for each in metrics] == [min(i, staleness) for i in range(5)]
    first = in_process(recipe)
    counted(first, recipe, range(3))
    earlier_weights = {
        version: packed.tensors() for version, packed in first.packed_earlier().items()
    }
    again = in_process(recipe)
    assert sorted(earlier_weights) == list(range(3 - staleness, 3))
    trainer_of(again).load_state(trainer_of(first).state())
    policy_of(again).load_state_dict(policy_of(first).state_dict())
    again.restore_earlier_weights(earlier_weights)
    again.policy_version = 3
    counted(again, recipe, range(3, 5))
    assert all(
        torch.equal(value, trained(straight)[name]) for name, value in trained(again).items()
    )
    none = in_process(Recipe(PPO_CONFIG))
    counted(none, Recipe(PPO_CONFIG), range(5))
    assert any(
        not torch.equal(value, trained(straight)[name]) for name, value in trained(none).items()
    )


def counted(subject: OnPolicyFlow, recipe: Recipe, iterations: range) -> list[dict[str, float]]:
    subject.iterations = None
    found = []
    for iteration in iterations:
        subject.begin(iteration)
        algorithm(recipe.config).iteration(subject)
        found.append(subject.metrics)
    return found

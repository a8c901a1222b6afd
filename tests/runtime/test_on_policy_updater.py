"""An on-policy update in the trainer's process: its clip range, and the demonstrations for co-training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig
from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise
from rlinf_vla.core.types import Inputs, Trajectory
from rlinf_vla.features.planner import synthetic
from rlinf_vla.models.openvla.policy import OpenVLAOptions, OpenVLAPolicy
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect
from rlinf_vla.runtime.workers.trainer import OnPolicyUpdater
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.policy_calls import with_critic
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer

SETTINGS = Settings(0, 1.0, 2)
CONFIG = PPOConfig(epochs=1, minibatch_size=1000, target_kl=None)


class Watched(LinearPolicy):
    """Records the imitated states and their random numbers."""

    def __init__(self) -> None:
        super().__init__(LinearOptions(chunk=2))
        self.asked: list[list[int]] = []
        self.noise: list[list[float]] = []

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        self.asked.append(inputs["number"].tolist())
        self.noise.append(noise.uniform(1)[:, 0].tolist())
        return super().supervised_loss(inputs, actions, noise)


def learning(
    policy: LinearPolicy | None = None, run_seed: int = 0, rate: float = 0.05
) -> OnPolicyUpdater:
    found = policy or LinearPolicy(LinearOptions(chunk=2))
    return OnPolicyUpdater(
        Trainer(found, OptimizerConfig(rate, rate, 10.0), 100, keep_reference=True),
        run_seed,
        1.0,
        reuse_frozen=True,
    )


def calls(policy: LinearPolicy) -> Trajectory:
    return collect(Actor(policy, SETTINGS), groups(4, 2), 0, 0, 6, Timeline()).flatten()


def batch(rollouts: Trajectory, config: PPOConfig = CONFIG) -> Batch:
    advantage = torch.linspace(-1, 1, len(rollouts))
    return replace(
        PPO(config, 1.0).weighted(rollouts, advantage), target=torch.zeros(len(rollouts))
    )


def update(
    subject: OnPolicyUpdater,
    rollouts: Trajectory,
    config: PPOConfig,
    iteration: int = 0,
    version: int = 1,
) -> dict[str, float]:
    return subject.update(batch(rollouts, config), PPO(config, 1.0), False, iteration, version)


def test_a_decoupled_update_is_clipped_around_the_policy_at_its_start() -> None:
    """Another policy acted. In a single step on all rows the present policy has not changed yet, and each gain is weighted by how much
    more probable it makes the action; clipped around the behaviour policy, part of the gain would be lost."""
    subject = learning()
    rollouts = calls(subject.policy)  # type: ignore[arg-type]
    noise = torch.randn(rollouts.log_prob.shape, generator=torch.Generator().manual_seed(0))
    stale = replace(rollouts, log_prob=rollouts.log_prob + 0.3 * noise)
    metrics = update(subject, stale, replace(CONFIG, decoupled=True))
    assert (
        metrics["actor/approx_kl"] == pytest.approx(0, abs=1e-6)
        and metrics["actor/clip_fraction"] == 0
    )
    counts = stale.valid.any(-1)
    advantage = torch.linspace(-1, 1, len(stale))
    present, acted = (
        torch.where(stale.valid[..., None], each, 0).sum((1, 2))
        for each in (rollouts.log_prob, stale.log_prob)
    )
    expected = -((present - acted).exp() * advantage)[counts].mean()
    assert metrics["actor/pg_loss"] == pytest.approx(float(expected), abs=1e-5)
    coupled = update(learning(), stale, CONFIG)
    assert coupled["actor/approx_kl"] > 0.01 and coupled["actor/clip_fraction"] > 0.1


def test_the_reference_is_the_policy_before_the_first_update() -> None:
    subject = learning()
    rollouts = calls(subject.policy)  # type: ignore[arg-type]
    for iteration in range(2):
        update(subject, rollouts, CONFIG, iteration, version=iteration)
    assert (subject.log_prob(rollouts) - rollouts.log_prob).abs().max() > 0.01
    torch.testing.assert_close(subject.reference(rollouts), rollouts.log_prob, atol=1e-5, rtol=0)


def taught(updates: list[int], run_seed: int = 0, epochs: int = 2) -> Watched:
    """``updates``: the iteration of each, three optimiser steps per epoch."""
    policy = Watched()
    subject = learning(policy, run_seed)
    size = 10_000
    image = torch.zeros(size, 8, 8, 3, dtype=torch.uint8)
    subject.demonstrations = Demonstrations(
        {"image": image, "number": torch.arange(size)}, torch.zeros(size, 2, 4), torch.arange(size)
    )
    rollouts = calls(policy)[:12]
    config = replace(CONFIG, epochs=epochs, minibatch_size=4, sft_coef=0.1, sft_batch_size=5)
    for iteration in updates:
        update(subject, rollouts, config, iteration)
    return policy


def test_every_optimiser_step_of_a_run_imitates_other_states_and_noise() -> None:
    """Two updates in one iteration, and one in the next."""
    found = taught([0, 0, 1])
    assert len(found.asked) == 3 * 6
    assert len({tuple(each) for each in found.asked}) == 18, "18 times other states"
    drawn = [each for step in found.noise for each in step]
    assert len(set(drawn)) == len(drawn) == 18 * 5


def test_imitated_states_depend_only_on_run_and_step() -> None:
    whole = taught([0, 0, 1])
    resumed = taught([1])
    other = taught([1], run_seed=1)
    assert resumed.asked == whole.asked[12:] and resumed.noise == whole.noise[12:], (
        "a resumed run draws the same"
    )
    assert other.asked != resumed.asked and not set(other.noise[0]) & set(resumed.noise[0])


@pytest.mark.parametrize(("off", "passes"), [(1e-5, True), (7e-5, True), (1e-4, False)])
def test_a_policy_that_contradicts_its_rollout_is_refused(off: float, passes: bool) -> None:
    subject = learning()
    rollouts = calls(subject.policy)  # type: ignore[arg-type]
    wrong = replace(rollouts, log_prob=rollouts.log_prob - off)
    if passes:
        update(subject, wrong, CONFIG, version=0)
        assert subject.parity is not None and subject.parity.mean == pytest.approx(off, abs=1e-6)
        assert subject.parity.within() == (off < 2e-5)
    else:
        with pytest.raises(
            RuntimeError, match="does not reproduce the rollout's log-probabilities"
        ):
            update(subject, wrong, CONFIG, version=0)
        update(
            learning(), wrong, CONFIG, version=1
        )  # rollouts of another version cannot be checked


def test_updates_of_only_the_critic_imitate_nothing() -> None:
    policy = Watched()
    subject, rollouts = learning(policy), calls(policy)
    before = {name: value.clone() for name, value in policy.backbone.state_dict().items()}
    algorithm: Any = PPO(replace(CONFIG, sft_coef=0.1), 1.0)
    subject.update(batch(rollouts), algorithm, True, 0, 0)
    assert not policy.asked and all(
        torch.equal(value, before[name]) for name, value in policy.backbone.state_dict().items()
    )


OPENVLA = Path(__file__).parents[2] / "assets" / "openvla_tiny_pushcube"


def acted(dtype: str, micro_batch_size: int = 8) -> tuple[OnPolicyUpdater, Trajectory]:
    """OpenVLA acts token by token, so that the rollout rounds differently from ``evaluate``."""
    policy = with_critic(OpenVLAPolicy.load(OPENVLA, OpenVLAOptions(dtype=dtype, prompt_length=26)))
    trainer = Trainer(policy, OptimizerConfig(1e-4, 1e-4, 10.0), micro_batch_size)
    return OnPolicyUpdater(trainer, 0, 1.0, reuse_frozen=True), synthetic.calls(
        policy, 22, Settings(0, 1.0, 2), 1
    )


@pytest.mark.parametrize("micro_batch_size", [3, 8])
def test_in_bfloat16_the_first_ratio_is_exactly_one(micro_batch_size: int) -> None:
    config = replace(CONFIG, minibatch_size=11, epochs=2)
    found = []
    for each in (
        config,
        replace(config, decoupled=True),
        replace(config, recompute_log_prob=False),
    ):
        subject, exact = acted("bfloat16", micro_batch_size)
        rollouts = replace(
            exact, log_prob=exact.log_prob + 1e-3
        )  # not every processor rounds acting otherwise than learning
        seen: list[dict[str, float]] = []
        algorithm = PPO(each, 1.0)
        algorithm.enough = lambda metrics, seen=seen: seen.append(metrics) or True  # type: ignore[method-assign, misc]
        subject.update(batch(rollouts, each), algorithm, False, 0, 0)
        found.append(seen[0])
    for first in found[:2]:
        assert first["actor/approx_kl"] == first["actor/ppo_kl"] == 0.0
    assert found[2]["actor/approx_kl"] > 0


@pytest.mark.parametrize("micro_batch_size", [3, 8])
def test_log_probabilities_are_recomputed_in_passes_of_the_sizes_of_the_loss(
    micro_batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some processors, the rounding of a matrix product depends on its rows."""
    subject, rollouts = acted("bfloat16", micro_batch_size)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    evaluate = subject.policy.evaluate

    def recorded(inputs: Inputs, *rest: Any) -> Any:
        sizes[torch.is_grad_enabled()].append(len(next(iter(inputs.values()))))
        return evaluate(inputs, *rest)

    monkeypatch.setattr(subject.policy, "evaluate", recorded)
    config = replace(CONFIG, minibatch_size=11, decoupled=True)
    subject.update(batch(rollouts, config), PPO(config, 1.0), False, 0, 1)
    assert sizes[True] == sizes[False] and len(sizes[True]) > 2


@pytest.mark.slow
def test_log_probabilities_are_recomputed_only_where_they_are_those_of_the_present_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    compute = OnPolicyUpdater.log_prob_by
    monkeypatch.setattr(
        OnPolicyUpdater, "log_prob_by", lambda *of: (asked.append(1), compute(*of))[1]
    )

    def times(
        dtype: str = "bfloat16",
        value_only: bool = False,
        version: int = 0,
        updates: int = 1,
        **keys: Any,
    ) -> int:
        asked.clear()
        subject, rollouts = acted(dtype)
        config = replace(CONFIG, **keys)
        for _ in range(updates):
            subject.update(batch(rollouts, config), PPO(config, 1.0), value_only, 0, version)
        return len(asked)

    assert times() == times("float32", recompute_log_prob=True) == 1
    assert times("float32") == times(recompute_log_prob=False) == 0
    assert times(version=1) == 0, "older weights collected the calls"
    assert times(updates=2) == 1, "the first update of an iteration has changed the weights"
    assert times(value_only=True) == 0
    with pytest.raises(UserError, match="the decoupled objective needs the rollout's"):
        times(recompute_log_prob=True, decoupled=True)


def test_later_updates_of_an_iteration_are_clipped_around_the_policy_at_its_start() -> None:
    """Each step has groups of its own, and the policy has moved since the first."""
    config = GRPOConfig(decoupled=True, groups_per_step=1, aggregation="token_mean")
    algorithm = GRPO(config, 1.0)
    subject = learning(rate=0.002)
    rollouts = calls(subject.policy)  # type: ignore[arg-type]
    counts = rollouts.valid.any(-1)
    start = subject.log_prob(rollouts)
    for iteration in range(2):
        for step in range(3):
            present = subject.log_prob(rollouts)
            given = algorithm.weighted(rollouts, torch.linspace(-1, 1, len(rollouts)))
            metrics = subject.update(given, algorithm, False, iteration, version=9)
            start = start if step else present
            moved = torch.where(rollouts.valid[..., None], present - start, 0).sum((1, 2))
            expected = (moved.exp() - 1 - moved)[counts].mean()
            assert metrics["actor/approx_kl"] == pytest.approx(float(expected), abs=1e-5)
            assert (metrics["actor/approx_kl"] > 1e-3) == (step > 0)

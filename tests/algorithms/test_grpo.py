"""Group-relative advantages against loops, and GRPO's iteration on the counter world."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.algorithms.advantages import (
    BASELINES,
    SCALES,
    all_equal,
    episode_returns,
    relative_advantages,
)
from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import Episodes, Trajectory, flattened
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect_episodes
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer
from tests.algorithms.trajectories import trajectory
from tests.algorithms.variants import VARIANTS
from tests.runtime.here import on_policy_flow

CONFIG = GRPOConfig(episodes=12, group_size=4, minibatch_size=10, target_kl=None)
CONFIGURED = GRPO(GRPOConfig(), 1.0)
SETTINGS = Settings(run_seed=3, temperature=1.0, batch_size=2)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from(BASELINES),
    st.sampled_from(SCALES),
    st.integers(0, 2**32 - 1),
)
def test_relative_advantages_against_a_loop(
    sizes: list[int], baseline: str, scale: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[
        torch.randperm(sum(sizes), generator=generator)
    ]
    score = torch.randn(len(group), generator=generator, dtype=torch.float64)
    differences, spreads = [], []
    for i in range(len(group)):
        members = [float(score[j]) for j in range(len(group)) if group[j] == group[i]]
        others = [float(score[j]) for j in range(len(group)) if group[j] == group[i] and j != i]
        compared = {
            "group_mean": statistics.fmean(members),
            "leave_one_out": statistics.fmean(others) if others else float(score[i]),
            "batch_mean": float(score.mean()),
        }
        differences.append(float(score[i]) - compared[baseline])
        spreads.append(statistics.pstdev(members))
    overall = statistics.pstdev(differences) + 1e-6
    divisors = {
        "none": [1.0] * len(group),
        "group_std": [spread + 1e-6 for spread in spreads],
        "batch_std": [overall] * len(group),
    }
    expected = [
        difference / divisor
        for difference, divisor in zip(differences, divisors[scale], strict=True)
    ]
    assert relative_advantages(score, group, baseline, scale).tolist() == pytest.approx(
        expected, abs=1e-9
    )


@given(
    st.floats(-1e6, 1e6, width=32),
    st.integers(1, 40),
    st.sampled_from(BASELINES),
    st.sampled_from(SCALES),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_scores_give_no_gradient(
    score: float, count: int, baseline: str, scale: str, dtype: torch.dtype
) -> None:
    scores = torch.full((count,), score, dtype=dtype)
    group = torch.zeros(count, dtype=torch.int64)
    assert not relative_advantages(scores, group, baseline, scale).any()
    assert all_equal(scores, group).all()


@given(
    st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=300),
    st.floats(-3, 3, width=32),
    st.randoms(),
)
def test_equal_returns_of_differently_ordered_rewards_give_no_gradient(
    rewards: list[float], offset: float, random: Random
) -> None:
    """The order of equal float32 rewards does not matter, nor does the order in which a GPU sums them."""
    orders = []
    for _ in range(8):
        random.shuffle(rewards)
        orders.append(torch.tensor(rewards) + offset)
    calls = steps(torch.stack(orders))
    assert not CONFIGURED.informative(calls).any() and not CONFIGURED.advantages(calls).any()


def test_a_hundred_rewards_that_float32_cannot_represent() -> None:
    for reward in (-0.07, -0.1, 1 / 3):
        calls = steps(torch.full((8, 100), reward))
        assert not CONFIGURED.informative(calls).any() and not CONFIGURED.advantages(calls).any()


def test_ten_rewards_of_a_tenth_equal_one() -> None:
    """0.1 is not a float32 number: the sums differ by 1.5e-8."""
    rewards = torch.zeros(2, 10)
    rewards[0, 4], rewards[1] = 1.0, 0.1
    calls = steps(rewards)
    assert not CONFIGURED.informative(calls).any() and not CONFIGURED.advantages(calls).any()


@given(st.integers(2, 8), st.floats(2**-10, 1, width=32), st.floats(-10, 10, width=32))
def test_a_difference_of_a_thousandth_gives_a_gradient(
    count: int, bonus: float, offset: float
) -> None:
    rewards = torch.full((count, 10), offset)
    rewards[0, 3] += bonus
    calls = steps(rewards)
    advantages = CONFIGURED.advantages(calls).view(10, count)
    assert CONFIGURED.informative(calls).all() and advantages.dtype == torch.float32
    assert (advantages[:, 0] > 0).all() and (advantages[:, 1:] < 0).all()


@given(st.integers(0, 2**32 - 1))
def test_the_order_of_the_sum_does_not_matter(seed: int) -> None:
    """As ``index_add`` on a GPU adds in any order."""
    generator = torch.Generator().manual_seed(seed)
    calls = steps(torch.randn(6, 50, generator=generator))
    order = torch.randperm(len(calls), generator=generator)
    assert torch.equal(CONFIGURED.advantages(calls[order]), CONFIGURED.advantages(calls)[order])


def steps(rewards: Tensor) -> Trajectory:
    """One group: the attempts ``[E]`` at an episode, with ``rewards`` ``[E, T]`` of one step per call; flattened calls."""
    attempts, length = rewards.shape
    flags = torch.zeros(length, attempts, 1, dtype=torch.bool)
    last = flags.clone()
    last[-1] = True
    zeros = torch.zeros(length, attempts)
    calls = trajectory(rewards.T[..., None], zeros, ~flags, last, flags, zeros)
    attempt = torch.arange(attempts).expand(length, -1)
    step = torch.arange(length)[:, None].expand(-1, attempts)
    return flattened(replace(calls, attempt=attempt, step=step))


def played(episodes: Episodes, envs: int = 4, depth: int = 2, chunk: int = 2) -> Trajectory:
    return collect_episodes(
        Actor(LinearPolicy(LinearOptions(chunk=chunk)), SETTINGS),
        groups(envs, depth),
        episodes,
        0,
        Timeline(),
    )


def test_attempts_start_equally_and_differ_only_in_noise() -> None:
    episodes = numbered_episodes(range(100), 0, 3, 2).repeat(4)
    assert (
        episodes.seed.tolist() == [0] * 4 + [0] * 4 + [1] * 4
        and episodes.attempt.tolist() == [0, 1, 2, 3] * 3
    )
    calls = played(episodes)
    first = calls[calls.step == 0]
    assert len(first) == 12
    for group in range(3):
        members = first[first.group_ids() == group]
        assert members.task_id.unique().numel() == 1
        assert (members.inputs["image"] == members.inputs["image"][:1]).all(), (
            "the same initial state"
        )
        choices = members.latent["choice"].flatten(1)
        assert len(choices.unique(dim=0)) == 4, "other actions"


def test_complete_episodes_in_order_for_any_grouping() -> None:
    episodes = numbered_episodes(range(100), 0, 5, 2).repeat(3)
    expected = played(episodes)
    assert torch.equal(
        torch.unique_consecutive(expected.episode_ids()).sort().values, torch.arange(15)
    ), "each once, without a gap"
    starts = expected.step == 0
    assert (
        expected.seed[starts].tolist() == episodes.seed.tolist()
        and expected.attempt[starts].tolist() == episodes.attempt.tolist()
    )
    for n in range(1, len(expected)):
        if not starts[n]:
            assert expected.step[n] == expected.step[n - 1] + expected.valid[n - 1].sum()
    ended = ((expected.terminated | expected.truncated) & expected.valid).any(-1)
    assert ended.sum() == 15
    for envs, depth in ((8, 1), (2, 1), (40, 2)):
        found = played(episodes, envs, depth)
        assert torch.equal(found.latent["choice"], expected.latent["choice"]) and torch.equal(
            found.reward, expected.reward
        )
        assert torch.equal(found.seed, expected.seed) and torch.equal(found.step, expected.step)


@pytest.mark.parametrize(("gamma", "unit"), [(1.0, "step"), (0.8, "step"), (0.8, "chunk")])
def test_returns_of_episodes_against_a_loop(gamma: float, unit: str) -> None:
    calls = played(numbered_episodes(range(100), 0, 4, 2).repeat(2), chunk=3)
    expected = defaultdict[tuple[int, ...], float](float)
    played_calls = defaultdict[tuple[int, ...], int](int)
    for n in range(len(calls)):  # in order of (episode, step)
        key = (int(calls.task_id[n]), int(calls.seed[n]), int(calls.attempt[n]))
        for i in calls.valid[n].nonzero().flatten().tolist():
            elapsed = played_calls[key] if unit == "chunk" else int(calls.step[n]) + i
            expected[key] += gamma**elapsed * float(calls.reward[n, i])
        played_calls[key] += 1
    ids = calls.episode_ids()
    found = episode_returns(calls, gamma, unit)
    for n in range(len(calls)):
        assert float(found[ids[n]]) == pytest.approx(
            expected[int(calls.task_id[n]), int(calls.seed[n]), int(calls.attempt[n])],
            rel=1e-12,
            abs=1e-12,
        )


def flow(config: GRPOConfig) -> OnPolicyFlow:
    policy = LinearPolicy(LinearOptions(chunk=2))
    return on_policy_flow(
        policy,
        groups(4, 2),
        Trainer(policy, OptimizerConfig(0.05, 0.05, 0.5), 100, keep_reference=True),
        SETTINGS,
        GRPO(config, 1.0),
    )


def run(config: GRPOConfig, iterations: int = 1) -> tuple[OnPolicyFlow, list[dict[str, float]]]:
    subject = flow(config)
    metrics = []
    for iteration in range(iterations):
        subject.begin(iteration)
        GRPO(config, 1.0).iteration(subject)
        metrics.append(subject.metrics)
    return subject, metrics


def test_an_iteration_learns_from_groups_that_differ() -> None:
    subject, (metrics,) = run(CONFIG)
    assert (
        metrics["rollout/episodes"] == 12
        and metrics["grpo/groups"] == 3
        and 0 < metrics["grpo/frac_informative"] <= 1
    )
    assert (
        metrics["actor/updates"] > 0
        and subject.policy_version == 1
        and "critic/vf_loss" not in metrics
    )
    assert subject.parity is not None and subject.parity.high < 1e-5


def test_training_improves_success() -> None:
    """From 0.2; eight run seeds reached 0.74 to 1.0."""
    config = replace(
        CONFIG, episodes=64, group_size=8, learning_rate=0.02, epochs=1, minibatch_size=64
    )
    success = [metrics["rollout/success_once"] for metrics in run(config, iterations=8)[1]]
    assert sum(success[-2:]) / 2 > success[0] + 0.2


class Known:
    """A flow whose groups have given success rates: 0 and 1 are uninformative."""

    iteration = 0

    def __init__(self, rates: list[list[float]]) -> None:
        self.rates = rates
        self.drawn = []
        self.updated = None
        self.steps = []
        self.metrics = {}

    def collect_groups(self, groups: int, attempts: int, draw: int) -> list[Trajectory]:
        self.drawn.append(groups)
        seed = torch.arange(groups) + 100 * draw
        calls = played(Episodes.first_attempts(torch.zeros_like(seed), seed).repeat(attempts))
        calls = calls[calls.step == 0]
        rates = torch.tensor(self.rates[draw])[calls.group_ids()]
        success = torch.zeros_like(calls.success)
        success[:, 0] = calls.attempt < rates * attempts
        calls = replace(
            calls, success=success, reward=success.float(), valid=torch.ones_like(calls.valid)
        )
        return [calls[: 2 * attempts], calls[2 * attempts :]][: 1 + (groups > 2)]

    def score(self, rollouts: Any) -> Any:
        return rollouts

    def update(self, batch: Any, algorithm: Any) -> bool:
        self.updated = batch
        self.steps.append(sorted(set(batch.calls.seed.tolist())))
        return False

    def publish(self) -> None: ...

    def log(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics


def test_uninformative_groups_are_excluded_and_drawn_again() -> None:
    subject = Known([[0.0, 0.5, 1.0], [1.0, 0.25], [0.75]])
    GRPO(replace(CONFIG, resample=5), 1.0).iteration(subject)  # type: ignore[arg-type]
    assert subject.drawn == [3, 2, 1]
    assert subject.metrics == {"grpo/groups": 6, "grpo/frac_informative": 0.5}
    batch = subject.updated
    assert sorted(set(batch.calls.seed.tolist())) == [1, 101, 200]
    assert len(batch) == 12 and float(batch.weight.sum()) == pytest.approx(12)
    assert batch.advantage.abs().min() > 0.5


def test_resampling_ends_at_its_limit_without_an_update() -> None:
    subject = Known([[0.0, 0.0, 1.0]] * 3)
    GRPO(replace(CONFIG, resample=2), 1.0).iteration(subject)  # type: ignore[arg-type]
    assert subject.drawn == [3, 3, 3] and subject.updated is None
    assert subject.metrics["grpo/frac_informative"] == 0


def test_a_step_takes_groups_in_order_and_the_last_takes_the_rest() -> None:
    subject = Known([[0.5, 0.0, 0.25, 0.75, 0.5, 1.0], [0.25, 1.0]])
    GRPO(replace(CONFIG, episodes=24, resample=1, groups_per_step=2), 1.0).iteration(subject)  # type: ignore[arg-type]
    assert subject.steps == [[0, 2], [3, 4], [100]]


def test_a_range_of_success_rates() -> None:
    subject = Known([[0.25, 0.5, 0.75]])
    GRPO(replace(CONFIG, success_range=[0.4, 0.6]), 1.0).iteration(subject)  # type: ignore[arg-type]
    assert set(subject.updated.calls.seed.tolist()) == {1}


def test_reinforce_needs_no_groups() -> None:
    config = replace(VARIANTS["reinforce_pp"], episodes=6, target_kl=None)
    _, (metrics,) = run(config)
    assert metrics["grpo/groups"] == 6 and metrics["actor/updates"] > 0
    assert metrics["actor/reference_kl"] == pytest.approx(0, abs=1e-5), (
        "the first update starts at the reference"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"episodes": 10},
            "algorithm.episodes=10 is not a multiple of algorithm.group_size=4: use 8",
        ),
        ({"group_size": 1}, "algorithm.group_size=1 has no group statistics"),
        (
            {"baseline": "batch_mean", "scale": "batch_std", "groups_per_step": 2},
            "need all episodes of an iteration",
        ),
        ({"scale": "batch_std", "groups_per_step": 1}, "algorithm.groups_per_step=null"),
        (
            {"baseline": "batch_mean"},
            "a group of equal returns has standard deviation 0; use scale=batch_std",
        ),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GRPO(replace(CONFIG, **changes), 1.0)

"""The Lagrangian penalty against loops, and the multiplier against its recursion."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.algorithms.advantages import episode_returns, gae
from rlinf_vla.algorithms.base import EPISODE_COST, Charged
from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.core.transitions import COST, REWARD, RankRows, Transitions
from rlinf_vla.core.types import Trajectory
from rlinf_vla.rollout.collector import cost_metrics
from tests.algorithms.trajectories import trajectories

LIMITED = PPOConfig(cost_limit=2.0, cost_rate=0.25, cost_initial=0.5)


def with_costs(calls: Trajectory, seed: int) -> Trajectory:
    counts = torch.randint(0, 3, calls.reward.shape, generator=torch.Generator().manual_seed(seed))
    return replace(calls, cost=torch.where(calls.valid, counts, 0).float())


@given(
    st.lists(st.none() | st.floats(0, 20), max_size=12),
    st.floats(0, 5),
    st.floats(0, 0.5),
    st.floats(0, 3),
)
def test_the_multiplier_climbs_by_the_excess(
    costs: list[float | None], limit: float, rate: float, first: float
) -> None:
    """It is never negative."""
    subject = PPO(replace(LIMITED, cost_limit=limit, cost_rate=rate, cost_initial=first))
    wanted = first
    for cost in costs:
        told = subject.adapt({} if cost is None else {EPISODE_COST: cost})
        if cost is not None:  # without an ended episode there is nothing to learn from
            wanted = max(0.0, wanted + rate * (cost - limit))
        assert told == {
            "actor/cost_multiplier": subject.multiplier
        } and subject.multiplier == pytest.approx(wanted)
    resumed = PPO(subject.config)
    resumed.restore(subject.state())
    assert resumed.multiplier == subject.multiplier
    resumed.restore({})
    assert resumed.multiplier == first, "a new run begins with the initial multiplier"


@pytest.mark.parametrize(
    "subject",
    [PPO(PPOConfig(cost_initial=1.0)), SAC(SACConfig(cost_initial=1.0))],
    ids=["ppo", "sac"],
)
def test_without_a_limit_nothing_is_charged(subject: PPO | SAC) -> None:
    assert subject.adapt({EPISODE_COST: 9.0}) == {} == subject.state() and subject.multiplier == 0.0


@given(trajectories(), st.integers(0, 99), st.floats(0.01, 3))
def test_advantages_of_ppo_are_those_of_the_reward_less_the_penalty(
    rollouts: Trajectory, seed: int, multiplier: float
) -> None:
    rollouts = with_costs(rollouts, seed)
    assert rollouts.cost is not None
    (charged,) = Charged([rollouts], multiplier)
    by_hand = rollouts.reward.clone()
    for index in (
        torch.cartesian_prod(*map(torch.arange, rollouts.reward.shape)).reshape(-1, 3).tolist()
    ):
        by_hand[tuple(index)] -= multiplier * float(rollouts.cost[tuple(index)])
    for ours, wanted in zip(
        gae(charged, 0.9, 0.8), gae(replace(rollouts, reward=by_hand), 0.9, 0.8), strict=True
    ):
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)  # costs are float32


def test_scores_of_grpo_are_returns_less_the_discounted_penalty() -> None:
    group = calls(attempts=3, length=2)
    found = list(Charged([group], 0.5))
    subject = GRPO(GRPOConfig(gamma=0.9))
    again = list(Charged([group], 0.5))
    assert len(found) == len(again) == 1
    paid = torch.tensor(
        [sum(0.9**step * (number + step) for step in range(2)) for number in range(3)],
        dtype=torch.float64,
    )
    score = episode_returns(group, 0.9) - 0.5 * paid
    wanted = (score - score.mean()) / (score.std(unbiased=False) + 1e-6)
    torch.testing.assert_close(
        subject.advantages(found[0])[::2].double(), wanted, atol=1e-5, rtol=1e-5
    )


def calls(attempts: int, length: int) -> Trajectory:
    """Attempts at one episode of ``length`` calls of one action; the call ``t`` of attempt ``i`` costs ``i + t``."""
    attempt = torch.arange(attempts).repeat_interleave(length)
    step = torch.arange(length).repeat(attempts)
    zeros = torch.zeros_like(step)
    one = torch.ones(len(step), 1, dtype=torch.bool)
    last = (step == length - 1)[:, None]
    return Trajectory(
        inputs={},
        latent={},
        log_prob=torch.zeros(len(step), 1, 1),
        value=zeros.float(),
        bootstrap_value=zeros.float(),
        cut=zeros.bool(),
        reward=(attempt == 1).float()[:, None] * last,
        terminated=last,
        truncated=~one,
        success=~one,
        valid=one,
        task_id=zeros,
        seed=zeros,
        attempt=attempt,
        step=step,
        policy_version=zeros,
        cost=(attempt + step).float()[:, None],
    )


def test_the_mean_cost_is_over_the_episodes_that_ended() -> None:
    group = calls(attempts=3, length=2)
    assert cost_metrics(group) == {EPISODE_COST: (1 + 3 + 5) / 3}
    under_way = replace(group, terminated=group.terminated & (group.attempt != 2)[:, None])
    assert cost_metrics(under_way) == {EPISODE_COST: (1 + 3) / 2}
    assert (
        cost_metrics(replace(group, terminated=torch.zeros_like(group.terminated)))
        == {}
        == cost_metrics(replace(group, cost=None))
    )
    shuffled = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(0))]
    assert cost_metrics(shuffled) == cost_metrics(group)


def test_a_replay_batch_is_charged_with_the_present_multiplier() -> None:
    subject = SAC(SACConfig(cost_limit=1.0, cost_rate=0.5))
    now = {
        REWARD: torch.tensor([1.0, 0.0]),
        COST: torch.tensor([0.0, 2.0]),
        "state": torch.rand(2, 3),
    }
    batch = Transitions(now, now, RankRows(torch.tensor([0, 1]), 4))
    assert subject.charged(batch) is batch
    subject.adapt({EPISODE_COST: 2.0})
    charged = subject.charged(batch)
    assert (
        charged.now[REWARD].tolist() == [1.0, -1.0]
        and charged.of_rank is batch.of_rank
        and charged.following is batch.following
    )
    assert charged.now["state"] is now["state"] and now[REWARD].tolist() == [1.0, 0.0]

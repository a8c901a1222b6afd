from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.algorithms.advantages import (
    GAMMA_UNITS,
    chunk_rewards,
    explained_variance,
    gae,
    standardise,
)
from rlinf_vla.core.types import Trajectory
from tests.algorithms.trajectories import trajectories, trajectory

gammas = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
lambdas = st.sampled_from([0.0, 0.4, 0.95, 1.0])
units = st.sampled_from(GAMMA_UNITS)


def assert_close(found: Tensor, expected: list[list[float]] | Tensor) -> None:
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=found.dtype), rtol=1e-9, atol=1e-9
    )


def episodes(rollouts: Trajectory, env: int) -> list[list[int]]:
    """The calls of one environment, cut into episodes."""
    found: list[list[int]] = [[]]
    for t in range(rollouts.shape[0]):
        found[-1].append(t)
        if ((rollouts.terminated | rollouts.truncated) & rollouts.valid)[t, env].any():
            found.append([])
    return [calls for calls in found if calls]


def executed(rollouts: Trajectory, t: int, env: int) -> list[float]:
    return [
        float(r)
        for r, valid in zip(rollouts.reward[t, env], rollouts.valid[t, env], strict=True)
        if valid
    ]


def value_after(rollouts: Trajectory, t: int, env: int, last: bool) -> float:
    """The value after call ``t``: 0 if terminated, the critic's estimate if the episode was truncated."""
    if (rollouts.terminated & rollouts.valid)[t, env].any():
        return 0.0
    return float(rollouts.bootstrap_value[t, env] if last else rollouts.value[t + 1, env])


def reference_chunk(rewards: list[float], gamma: float, unit: str) -> tuple[float, float]:
    """The discounted reward of the executed steps, and the discount of the value after them."""
    earned, discount = 0.0, 1.0
    for reward in rewards:
        earned += discount * reward
        discount *= gamma if unit == "step" else 1.0
    return earned, gamma if unit == "chunk" and rewards else discount


def reference_gae(
    rollouts: Trajectory, gamma: float, gae_lambda: float, unit: str
) -> list[list[float]]:
    """Equation 16 of Schulman et al. literally: a sum over the rest of the episode, for every call."""
    calls, envs = rollouts.shape
    advantage = [[0.0] * envs for _ in range(calls)]
    for env in range(envs):
        for episode in episodes(rollouts, env):
            delta, discount = {}, {}
            for t in episode:
                rewards = executed(rollouts, t, env)
                earned, discount[t] = reference_chunk(rewards, gamma, unit)
                future = discount[t] * value_after(rollouts, t, env, t == episode[-1])
                delta[t] = earned + future - float(rollouts.value[t, env])
            for t in episode:
                weight = 1.0
                for k in episode[episode.index(t) :]:
                    advantage[t][env] += weight * delta[k]
                    weight *= discount[k] * gae_lambda
    return advantage


@given(trajectories(garbage=True), gammas, units)
def test_chunk_rewards_are_discounted_per_executed_step_or_per_chunk(
    rollouts: Trajectory, gamma: float, unit: str
) -> None:
    reward, discount = chunk_rewards(rollouts.reward, rollouts.valid, gamma, unit)
    calls, envs = rollouts.shape
    expected = [
        [reference_chunk(executed(rollouts, t, env), gamma, unit) for env in range(envs)]
        for t in range(calls)
    ]
    assert_close(reward, [[earned for earned, _ in row] for row in expected])
    assert_close(discount, [[worth for _, worth in row] for row in expected])


def test_a_chunk_that_arrives_late_is_discounted_from_its_first_executed_step() -> None:
    """With a deadline the first executed action has the place of the delay."""
    valid = torch.tensor([[False, False, True, True, False], [True, True, False, False, False]])
    reward, discount = chunk_rewards(
        torch.tensor([[9.0, 9, 1, 2, 9], [1.0, 2, 9, 9, 9]]), valid, 0.5
    )
    assert reward.tolist() == [2.0, 2.0] and discount.tolist() == [0.25, 0.25]


def test_a_chunk_in_which_nothing_was_executed_discounts_nothing() -> None:
    nothing = torch.zeros(1, 3)
    for unit in GAMMA_UNITS:
        reward, discount = chunk_rewards(nothing + 7, nothing.bool(), 0.5, unit)
        assert reward.tolist() == [0.0] and discount.tolist() == [1.0]


@given(trajectories(garbage=True), gammas, lambdas, units)
def test_gae_is_the_sum_over_the_rest_of_each_episode(
    rollouts: Trajectory, gamma: float, gae_lambda: float, unit: str
) -> None:
    advantage, target = gae(rollouts, gamma, gae_lambda, unit)
    assert_close(advantage, reference_gae(rollouts, gamma, gae_lambda, unit))
    assert_close(target, advantage + rollouts.value)


@given(trajectories(), gammas, lambdas, units)
def test_a_termination_that_is_cut_is_worth_what_the_critic_says(
    rollouts: Trajectory, gamma: float, gae_lambda: float, unit: str
) -> None:
    """As RLinf's bootstrap_type=always: what is known of the end is added to its reward, and nothing follows."""
    terminated = (rollouts.terminated & rollouts.valid).any(-1)
    after = torch.where(terminated, 3.0, rollouts.bootstrap_value)
    valued = replace(rollouts, cut=rollouts.cut | terminated, bootstrap_value=after)
    *_, position = torch.broadcast_tensors(rollouts.valid, torch.arange(rollouts.valid.shape[-1]))
    final = position == torch.where(rollouts.valid, position, -1).amax(-1, keepdim=True)
    elapsed = torch.where(
        torch.tensor(unit == "chunk"), 0, (rollouts.valid.cumsum(-1) - 1).clamp(min=0)
    )
    _, discount = chunk_rewards(rollouts.reward, rollouts.valid, gamma, unit)
    share = discount[..., None] / torch.where(elapsed > 0, gamma ** elapsed.double(), 1.0)
    if gamma == 0 and unit == "step":
        return  # nothing later counts
    paid = replace(
        rollouts,
        reward=rollouts.reward + torch.where(final & terminated[..., None], 3.0 * share, 0.0),
    )
    for found, expected in zip(
        gae(valued, gamma, gae_lambda, unit), gae(paid, gamma, gae_lambda, unit), strict=True
    ):
        assert_close(found, expected)


@given(trajectories(), gammas)
def test_lambda_one_gives_the_discounted_return_of_control_steps(
    rollouts: Trajectory, gamma: float
) -> None:
    """Computed step by step, without chunks."""
    _, target = gae(rollouts, gamma, 1.0)
    for env in range(rollouts.shape[1]):
        for episode in episodes(rollouts, env):
            value = value_after(rollouts, episode[-1], env, last=True)
            for t in reversed(episode):
                for reward in reversed(executed(rollouts, t, env)):
                    value = reward + gamma * value
                assert float(target[t, env]) == pytest.approx(value, abs=1e-9)


@given(trajectories(), gammas)
def test_lambda_zero_gives_one_step_temporal_differences(
    rollouts: Trajectory, gamma: float
) -> None:
    advantage, _ = gae(rollouts, gamma, 0.0)
    for env in range(rollouts.shape[1]):
        for episode in episodes(rollouts, env):
            for t in episode:
                expected = value_after(rollouts, t, env, t == episode[-1])
                for reward in reversed(executed(rollouts, t, env)):
                    expected = reward + gamma * expected
                assert float(advantage[t, env]) == pytest.approx(
                    expected - float(rollouts.value[t, env]), abs=1e-9
                )


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def one_chunk(ending: str) -> Trajectory:
    """Two of three actions execute; the episode ends by ``ending`` at the second."""
    last = torch.tensor([[[False, True, False]]])
    nothing = torch.zeros_like(last)
    return trajectory(
        reward=torch.tensor([[[1.0, 2.0, 1e9]]], dtype=torch.float64),
        value=column(10.0),
        valid=torch.tensor([[[True, True, False]]]),
        terminated=last if ending == "terminated" else nothing,
        truncated=last if ending == "truncated" else nothing,
        bootstrap=column(100.0),
    )


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("terminated", 1 + 0.5 * 2 - 10), ("truncated", 1 + 0.5 * 2 + 0.25 * 100 - 10)],
)
def test_an_episode_that_ends_inside_a_chunk(ending: str, expected: float) -> None:
    advantage, target = gae(one_chunk(ending), gamma=0.5, gae_lambda=0.95)
    assert_close(advantage, [[expected]])
    assert_close(target, [[expected + 10]])


def test_the_end_of_the_rollout_truncates() -> None:
    steps = torch.ones(2, 1, 1, dtype=torch.bool)
    rollouts = trajectory(
        column(1.0, 1.0)[..., None], column(3.0, 5.0), steps, ~steps, ~steps, column(7.0, 7.0)
    )
    advantage, _ = gae(rollouts, gamma=0.5, gae_lambda=0.5)
    last = 1 + 0.5 * 7 - 5
    assert_close(advantage, [[1 + 0.5 * 5 - 3 + 0.25 * last], [last]])


@given(trajectories(), st.data())
def test_nothing_flows_into_an_earlier_episode(rollouts: Trajectory, data: st.DataObject) -> None:
    env = data.draw(st.integers(0, rollouts.shape[1] - 1))
    episode = data.draw(st.sampled_from(episodes(rollouts, env)))
    later = torch.arange(rollouts.shape[0]) > episode[-1]
    change = torch.where(later, 1e6, 0.0).double()
    other = replace(
        rollouts,
        reward=rollouts.reward + change[:, None, None],
        value=rollouts.value + change[:, None],
        bootstrap_value=rollouts.bootstrap_value + change[:, None],
    )
    before, after = gae(rollouts, 0.9, 0.9)[0][:, env], gae(other, 0.9, 0.9)[0][:, env]
    assert torch.equal(before[episode], after[episode])


@given(trajectories(dtype=torch.float32), st.data())
def test_environments_are_independent(rollouts: Trajectory, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(rollouts.shape[1]))))
    assert torch.equal(gae(rollouts[:, order], 0.97, 0.9)[0], gae(rollouts, 0.97, 0.9)[0][:, order])


masked = (
    st.integers(1, 30)
    .flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(-100, 100), min_size=n, max_size=n),
            st.lists(st.booleans(), min_size=n, max_size=n),
        )
    )
    .map(lambda pair: (torch.tensor(pair[0], dtype=torch.float64), torch.tensor(pair[1])))
)


@given(masked)
def test_standardise_uses_only_masked_elements(drawn: tuple[Tensor, Tensor]) -> None:
    values, mask = drawn
    result = standardise(torch.where(mask, values, float("nan")), mask)
    assert (result[~mask] == 0).all()
    kept = values[mask].numpy()
    if len(kept):
        expected = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
        np.testing.assert_allclose(result[mask].numpy(), expected, atol=1e-6)


@given(masked, st.data())
def test_standardise_does_not_depend_on_positions(
    drawn: tuple[Tensor, Tensor], data: st.DataObject
) -> None:
    values, mask = drawn
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    torch.testing.assert_close(
        standardise(values[order], mask[order]), standardise(values, mask)[order], rtol=0, atol=1e-6
    )


def test_standardise_of_equal_and_of_random_values() -> None:
    assert torch.equal(
        standardise(torch.full((2, 3), 5.0), torch.ones(2, 3, dtype=torch.bool)), torch.zeros(2, 3)
    )
    result = standardise(torch.randn(2000), torch.ones(2000, dtype=torch.bool))
    assert result.mean().abs() < 1e-5 and abs(result.std(unbiased=False) - 1) < 1e-5


@given(masked)
def test_explained_variance_limits(drawn: tuple[Tensor, Tensor]) -> None:
    target, mask = drawn
    spoilt = torch.where(mask, target, float("inf"))
    if mask.sum() == 0 or target[mask].var(unbiased=False) < 1e-6:
        return
    assert explained_variance(spoilt, spoilt, mask) == pytest.approx(1)
    assert explained_variance(torch.zeros_like(target), spoilt, mask) == pytest.approx(0, abs=1e-9)
    assert explained_variance(spoilt + 3, spoilt, mask) == pytest.approx(1), (
        "a constant offset explains all the variance"
    )
    assert explained_variance(-spoilt, spoilt, mask) == pytest.approx(-3)


def test_explained_variance_against_numpy() -> None:
    prediction, target = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    expected = 1 - np.var(target.numpy() - prediction.numpy()) / np.var(target.numpy())
    assert explained_variance(
        prediction, target, torch.ones(50, dtype=torch.bool)
    ) == pytest.approx(expected, rel=1e-5)
    assert math.isnan(
        explained_variance(prediction, torch.ones(50), torch.ones(50, dtype=torch.bool))
    )

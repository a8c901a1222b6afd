"""A reward of the observations before and after each step, also in an episode's second step and in the next episode."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlinf_vla.core.types import Episodes, Observation, StepResult
from rlinf_vla.rollout.reward_shaping import RewardedEnv, RewardShaper
from tests.rollout.walk import Walk


def moved(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """10 times the position before, plus the position after."""
    places = 10 * before.state.argmax(1) + result.observation.state.argmax(1)
    return replace(result, reward=places[:, None].float().expand_as(result.reward))


def test_every_step_is_judged_by_the_observations_around_it() -> None:
    env = RewardedEnv(Walk([0.0] * 6, limit=3, num_envs=2), RewardShaper(moved))
    found = []
    for seeds in ([0, 3], [2, 5]):
        env.reset(Episodes.first_attempts(torch.zeros(2, dtype=torch.int64), torch.tensor(seeds)))
        found += [env.step(torch.zeros(2, 1, 1)).reward[:, 0].tolist() for _ in range(3)]
    assert found == [[1, 34], [12, 45], [23, 50], [23, 50], [34, 1], [45, 12]]


def test_lost_simulators_are_those_of_the_wrapped_environment() -> None:
    class Lossy(Walk):
        def losses(self) -> int:
            return 3

    assert RewardedEnv(Lossy([0.0], limit=3), RewardShaper(moved)).losses() == 3

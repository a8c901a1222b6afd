from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core.types import ActionSample, Episodes, Observation, StepResult, Trajectory
from rlinf_vla.rollout.player import Call
from rlinf_vla.rollout.reward_shaping import RewardedEnv, RewardShaper, relabel_rewards, seen
from rlinf_vla.testing.toy_env import CounterWorld

EPISODES = Episodes.first_attempts(torch.tensor([0, 0, 1]), torch.tensor([2, 0, 0]))
UP = torch.ones(3, 4, 4)


def levels(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """The rise of the level in the chunk, for each of its steps; garbage where nothing was executed."""
    rise = (result.observation.state[:, 0] - before.state[:, 0])[:, None].expand(result.valid.shape)
    return replace(result, reward=torch.where(result.valid, rise, torch.nan))


def played(env: CounterWorld | RewardedEnv, chunks: int = 1) -> list[StepResult]:
    env.reset(EPISODES)
    return [env.step(UP) for _ in range(chunks)]


def test_rewards_come_from_the_plugin_and_the_rest_from_the_environment() -> None:
    (own,) = played(CounterWorld(3))
    (seen,) = played(RewardedEnv(CounterWorld(3), RewardShaper(levels)))
    assert (
        torch.equal(seen.valid, own.valid)
        and torch.equal(seen.success, own.success)
        and torch.equal(seen.terminated, own.terminated)
    )
    rise = own.observation.state[:, :1] - CounterWorld(3).reset(EPISODES).state[:, :1]
    assert torch.equal(seen.reward, torch.where(own.valid, rise, 0.0))
    assert not own.valid.all()  # garbage after an episode's end was used


def test_weights_mix_both_rewards() -> None:
    (own,) = played(CounterWorld(3))
    (alone,) = played(RewardedEnv(CounterWorld(3), RewardShaper(levels)))
    (mixed,) = played(
        RewardedEnv(CounterWorld(3), RewardShaper(levels, weight=0.5, env_weight=2.0))
    )
    assert torch.allclose(mixed.reward, 0.5 * alone.reward + 2.0 * own.reward)


def test_a_terminal_reward_is_given_only_in_the_last_step() -> None:
    (own,) = played(CounterWorld(3))
    (alone,) = played(RewardedEnv(CounterWorld(3), RewardShaper(levels)))
    (terminal,) = played(RewardedEnv(CounterWorld(3), RewardShaper(levels, terminal=True)))
    ends = own.terminated | own.truncated
    assert torch.equal(terminal.reward, torch.where(ends, alone.reward, 0.0)) and ends.any()


def test_the_observation_before_is_the_last_one_of_the_row() -> None:
    clocks: list[Tensor] = []

    def note(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        clocks.append(before.state[:, 1].clone())
        return result

    env = RewardedEnv(CounterWorld(3, ends_at_goal=False), RewardShaper(note))
    first = env.reset(EPISODES)
    second = env.step(UP[:, :2]).observation
    third = env.reset(EPISODES, torch.tensor([True, False, False]))
    env.step(UP[:, :1])
    assert torch.equal(clocks[0], first.state[:, 1]) and torch.equal(clocks[1], third.state[:, 1])
    assert third.state[0, 1] == first.state[0, 1] and third.state[1, 1] == second.state[1, 1]


def test_a_reward_of_another_shape_is_refused() -> None:
    env = RewardedEnv(
        CounterWorld(3),
        RewardShaper(lambda before, actions, result: replace(result, reward=torch.zeros(3))),
    )
    env.reset(EPISODES)
    with pytest.raises(ValueError, match="shape"):
        env.step(UP)


def test_a_recorded_step_whose_reward_is_not_finite_is_refused() -> None:
    env = CounterWorld(3)
    before, result = env.reset(EPISODES), env.step(UP)
    shaper = RewardShaper(
        lambda before, actions, result: replace(result, reward=result.reward + torch.nan)
    )
    with pytest.raises(Failure, match="not finite"):
        shaper(before, UP, result)


def test_a_reward_may_end_an_episode() -> None:
    def at_once(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        return replace(result, terminated=result.valid)

    env = RewardedEnv(CounterWorld(3), RewardShaper(at_once))
    env.reset(EPISODES)
    assert env.step(UP[:, :1]).done.all()


def test_a_reward_worker_reads_whole_instructions_and_refuses_longer_ones() -> None:
    env = CounterWorld(3)
    told = list[str]()

    def note(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        told.extend(before.instruction)
        return result

    lines = ["a" * 1024, "ein Würfel " * 60, ""]
    before = replace(env.reset(EPISODES), instruction=lines)
    result = env.step(UP)
    nothing = torch.zeros(3)
    numbers = torch.zeros(3, dtype=torch.int64)
    outcome = (result.reward, result.terminated, result.truncated, result.success, result.valid)
    calls = Trajectory({}, {}, nothing, nothing, nothing, nothing, *outcome, *[numbers] * 5)
    call = Call(
        EPISODES,
        numbers,
        before,
        {},
        ActionSample(UP, {}, nothing, nothing),
        result,
        numbers > 0,
        nothing,
    )
    found = relabel_rewards(calls, seen(call), RewardShaper(note), 3)
    assert told == lines and torch.equal(found, torch.where(result.valid, result.reward, 0.0))
    with pytest.raises(
        UserError, match="has 1025 bytes, another process gets at most 1024: shorten it"
    ):
        seen(replace(call, observation=replace(before, instruction=["a" * 1025] * 3)))

"""Episodes in which a simulator fails are cut, and everything else is as without the failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.feature_policy import ACTOR_OUTPUT
from rlinf_vla.config.errors import Failure
from rlinf_vla.core.protocols import VectorEnv, WrappedEnv
from rlinf_vla.core.types import (
    FAULTS,
    REWARD_FAULT,
    STATE_FAULT,
    Episodes,
    Observation,
    StepResult,
)
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect, collect_episodes
from rlinf_vla.rollout.evaluation_episodes import play_evaluation
from rlinf_vla.rollout.faults import GIVE_UP, GuardedEnv, faults_of
from rlinf_vla.rollout.reward_shaping import RewardedEnv, RewardShaper
from rlinf_vla.rollout.transitions import faults_of_records, record_transitions
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance
from rlinf_vla.testing.toy_env import CounterWorld
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.rollout.walk import Walk

NAN, INFINITE = float("nan"), float("inf")
PLACES, LIMIT = 8, 6


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [GuardedEnv(CounterWorld(NUM_ENVS, EPISODE_LIMIT)) for _ in range(2)]


class Failing(Walk):
    """In places of ``states`` the state, and on leaving one of ``rewards`` the reward, is not a number."""

    def __init__(
        self, states: dict[int, float], rewards: dict[int, float], num_envs: int = 3
    ) -> None:
        super().__init__(
            [rewards.get(place, 1.0 + place) for place in range(PLACES)], LIMIT, num_envs
        )
        self._states = states

    def reset_wait(self) -> Observation:
        observation = super().reset_wait()
        state = observation.state.clone()
        for place, value in self._states.items():
            state[state[:, place] == 1, 0] = value
        return replace(observation, state=state)


def from_places(*places: int) -> Episodes:
    return Episodes.first_attempts(
        torch.zeros(len(places), dtype=torch.int64), torch.tensor(places)
    )


def actions(chunk: int, num_envs: int = 3) -> Tensor:
    return torch.zeros(num_envs, chunk, 1)


def started(
    states: dict[int, float], rewards: dict[int, float], *places: int
) -> tuple[GuardedEnv, Observation]:
    env = GuardedEnv(Failing(states, rewards))
    return env, env.reset(from_places(*places))


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
def test_a_state_that_is_not_finite_cuts_its_episode(value: float) -> None:
    env, before = started({3: value}, {}, 2, 4, 5)
    result = env.step(actions(1))
    assert result.truncated.tolist() == [[True], [False], [False]] and not result.terminated.any()
    assert result.valid.all() and result.reward[:, 0].tolist() == [0.0, 5.0, 6.0]
    assert result.fault is not None and result.fault[:, 0].tolist() == [STATE_FAULT, 0, 0]
    assert torch.equal(result.observation.state[0], before.state[0]), "what was seen before"
    assert result.observation.state.isfinite().all()


@pytest.mark.parametrize("value", [NAN, INFINITE])
def test_a_reward_that_is_not_finite_cuts_its_episode_at_the_end_of_the_chunk(value: float) -> None:
    env, _ = started({}, {3: value}, 2, 4, 5)
    result = env.step(actions(3))
    assert result.reward[0].tolist() == [3.0, 0.0, 0.0] and result.reward[1].tolist() == [
        5.0,
        6.0,
        7.0,
    ]
    assert result.truncated.tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert result.fault is not None and result.fault.tolist() == [
        [0, 0, REWARD_FAULT],
        [0] * 3,
        [0] * 3,
    ]


def test_an_episode_that_was_cut_rests_until_it_is_reset() -> None:
    env, _ = started({3: NAN}, {}, 2, 4, 5)
    env.step(actions(1))
    env.step_async(actions(2), skip_ended=True)
    result = env.step_wait()
    assert not any(bool(value[0].any()) for value in result.outcome.values()), (
        "it executes nothing, and does not fail again"
    )
    assert result.valid[1:].all() and result.observation.state.isfinite().all()
    again = env.reset(from_places(6, 0, 0), torch.tensor([True, False, False]))
    assert again.state[0].tolist() == [0.0] * 6 + [1.0, 0.0]
    assert env.step(actions(1)).valid.all()


def test_an_episode_that_begins_with_such_a_state_has_one_call() -> None:
    env, before = started({2: NAN}, {}, 2, 4, 5)
    assert before.state.isfinite().all()
    result = env.step(actions(2))
    assert result.fault is not None and result.fault.tolist() == [[0, STATE_FAULT], [0, 0], [0, 0]]


def test_a_simulator_that_only_fails_ends_the_run() -> None:
    env = GuardedEnv(Failing({3: NAN}, {}))
    for _ in range(GIVE_UP - 1):
        env.reset(from_places(2, 2, 2))
        env.step(actions(1))
    env.reset(from_places(2, 4, 4))
    with pytest.raises(
        Failure, match=rf"{GIVE_UP} episodes failed .* {FAULTS[STATE_FAULT]} \(task walk, seed 2\)"
    ):
        env.step(actions(1))


def test_a_simulator_that_fails_now_and_then_does_not() -> None:
    env = GuardedEnv(Failing({1: NAN}, {}))
    for _ in range(2 * GIVE_UP):
        env.reset(from_places(0, 2, 2))
        env.step(actions(1))
        env.step_async(actions(LIMIT), skip_ended=True)
        assert env.step_wait().truncated[1:].any()


class Exploding(WrappedEnv):
    """The state after the second control step of an episode with an odd seed is not a number."""

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        fresh = torch.ones(len(episodes), dtype=torch.bool) if mask is None else mask
        self._odd = torch.where(
            fresh, episodes.seed % 2 == 1, self._odd if mask is not None else False
        )
        super().reset_async(episodes, mask)

    def step_wait(self) -> StepResult:
        result = super().step_wait()
        result.observation.state[self._odd & (result.observation.state[:, 1] == 2)] = NAN
        return result


def exploding() -> tuple[LinearPolicy, Actor, list[GuardedEnv]]:
    policy = LinearPolicy(LinearOptions(chunk=2))
    return policy, Actor(policy, Settings(0, 1.0, 4)), [GuardedEnv(Exploding(CounterWorld(4, 6)))]


def test_rollouts_tell_which_episodes_were_cut() -> None:
    _, actor, groups = exploding()
    episodes = Episodes.first_attempts(torch.zeros(6, dtype=torch.int64), torch.arange(6))
    calls = collect_episodes(actor, groups, episodes, 0, Timeline())
    found = faults_of(calls, groups[0].spec.tasks)
    assert [(each.task, each.seed, each.step) for each in found] == [
        (groups[0].spec.tasks[0], seed, 2) for seed in (1, 3, 5)
    ]
    assert "seed 1" in str(found[0]) and found[0].document()["reason"] == FAULTS[STATE_FAULT]
    slots = collect(actor, groups, 0, 0, 6, Timeline())
    assert len(faults_of(slots, groups[0].spec.tasks)) > 0
    assert all(
        bool(value.isfinite().all()) for value in (slots.reward, slots.value, slots.bootstrap_value)
    )


def test_replay_records_of_a_cut_episode_end_with_a_state_that_was_seen() -> None:
    policy, actor, groups = exploding()
    episodes = Episodes.first_attempts(torch.zeros(4, dtype=torch.int64), torch.arange(4))

    def chunks(reward: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        return reward.sum(1), valid.any(1).float()

    class Recorded(Actor):
        def act(self, *arguments: Any) -> Any:
            sample = super().act(*arguments)
            return replace(sample, latent={ACTOR_OUTPUT: sample.actions} | sample.latent)

    found = record_transitions(
        policy, Recorded(policy, actor.settings), groups, episodes, chunks, False, Timeline()
    )
    cut = faults_of_records(episodes, found, groups[0].spec.tasks)
    assert [each.seed for each in cut] == [1, 3] and [
        each.steps for each in found if each.fault
    ] == [2, 2]
    assert all(bool(value.isfinite().all()) for each in found for value in each.records.values())


def test_an_evaluation_episode_that_was_cut_says_why() -> None:
    _, actor, groups = exploding()
    results = play_evaluation(actor, groups, range(8), Timeline())
    for each in results:
        assert each.row().get("fault") == (FAULTS[STATE_FAULT] if each.seed % 2 else None)
        assert not (each.seed % 2 and each.success)


def test_results_are_those_of_the_simulator_if_nothing_fails() -> None:
    bare = Failing({}, {})
    guarded = GuardedEnv(Failing({}, {}))
    for env in (bare, guarded):
        env.reset(from_places(1, 2, 3))
    for _ in range(2):
        expected, found = bare.step(actions(3)), guarded.step(actions(3))
        assert isinstance(found, StepResult) and torch.equal(
            found.observation.state, expected.observation.state
        )
        assert all(
            torch.equal(found.outcome[name], value) for name, value in expected.outcome.items()
        )


def test_a_reward_plug_in_that_is_not_finite_cuts_its_episode() -> None:
    def undefined_at_3(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        at_3 = before.state[:, 3:4] == 1
        return replace(
            result, reward=torch.where(at_3, torch.log(torch.zeros(1)) * 0, result.reward)
        )

    env = GuardedEnv(RewardedEnv(GuardedEnv(Failing({6: NAN}, {})), RewardShaper(undefined_at_3)))
    env.reset(from_places(3, 4, 5))
    result = env.step(actions(1))
    assert result.fault is not None and result.fault[:, 0].tolist() == [
        REWARD_FAULT,
        0,
        STATE_FAULT,
    ]
    assert result.truncated[:, 0].tolist() == [True, False, True] and result.reward[
        :, 0
    ].tolist() == [0.0, 5.0, 0.0]


class NothingAfterTheEnd(WrappedEnv):
    """Gives NaN as the reward of steps that were not executed."""

    def step_wait(self) -> StepResult:
        result = super().step_wait()
        return replace(result, reward=result.reward.where(result.valid, torch.nan))


def test_the_reward_of_a_step_that_was_not_executed_is_no_fault() -> None:
    env = GuardedEnv(NothingAfterTheEnd(Walk([1.0] * PLACES, limit=2, num_envs=2)))
    env.reset(from_places(0, 1))
    result = env.step(actions(3, num_envs=2))
    assert result.reward.tolist() == [[1.0, 1.0, 0.0]] * 2
    assert result.fault is not None and not result.fault.any()

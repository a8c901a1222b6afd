from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_evaluation
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import GOALS, INSTRUCTIONS, CounterWorld, groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

SETTINGS = Settings(run_seed=4, temperature=1.0, batch_size=2)


def play(
    episodes: int,
    envs: list[CounterWorld],
    chunk: int = 2,
    temperature: float = 1.0,
    filmed: int = 0,
) -> list[EpisodeResult]:
    policy = LinearPolicy(LinearOptions(chunk=chunk))
    return play_evaluation(
        Actor(policy, replace(SETTINGS, temperature=temperature)),
        envs,
        range(episodes),
        Timeline(),
        filmed,
    )


def listed(episodes: int) -> list[tuple[str, int]]:
    """Task and seed of the first ``episodes``."""
    return [
        (list(GOALS)[number % len(GOALS)], EVALUATION_SEEDS[number // len(GOALS)])
        for number in range(episodes)
    ]


@torch.no_grad()
def reference(episode: int, chunk: int, temperature: float, **world: bool) -> EpisodeResult:
    """One episode, alone."""
    policy = LinearPolicy(LinearOptions(chunk=chunk))
    env = CounterWorld(1, **world)
    task = list(GOALS)[episode % len(GOALS)]
    place = Episodes.first_attempts(
        torch.tensor([episode % len(GOALS)]),
        torch.tensor([EVALUATION_SEEDS[episode // len(GOALS)]]),
    )
    result = EpisodeResult(task, int(place.seed), INSTRUCTIONS[task])
    observation = env.reset(place)
    done = False
    while not done:
        noise = (
            CounterNoise(SETTINGS.run_seed, place.task_id, place.seed, torch.tensor([result.steps]))
            if temperature
            else None
        )
        step = env.step(
            policy.act(policy.encode(policy.prepare(observation)), noise, temperature).actions
        )
        observation = step.observation
        done = bool(step.done)
        result.steps += int(step.valid.sum())
        result.episode_return += float(step.reward.sum())
        result.success |= bool(step.success.any())
    return result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [1, 4])
def test_every_episode_equals_that_run_alone(chunk: int, temperature: float) -> None:
    found = play(13, groups(4, 2), chunk, temperature)
    assert len(found) == 13
    for index, result in enumerate(found):
        expected = reference(index, chunk, temperature)
        assert replace(result, episode_return=0) == replace(expected, episode_return=0)
        assert result.episode_return == pytest.approx(expected.episode_return, abs=1e-5)
    if temperature:
        assert 0 < sum(result.success for result in found) < 13


def test_a_success_before_the_end_counts() -> None:
    """If the simulator does not end the episode there, and the final state is no success."""
    found = play(20, groups(4, 2, ends_at_goal=False), chunk=1)
    assert [result.success for result in found] == [
        reference(i, 1, 1.0, ends_at_goal=False).success for i in range(20)
    ]
    assert all(result.steps == 6 for result in found) and any(result.success for result in found)


@pytest.mark.parametrize("episodes", [1, 3, 8, 21])
def test_the_number_of_groups_does_not_change_the_result(episodes: int) -> None:
    whole = play(episodes, groups(8, 1))
    assert [(result.task, result.seed) for result in whole] == listed(episodes), (
        "in the order of the list"
    )
    for count in (2, 4):
        assert play(episodes, groups(8, count)) == whole
    assert play(episodes, groups(2, 1)) == whole


@pytest.mark.parametrize("episodes", [1, 5, 9])
def test_each_episode_runs_once(episodes: int) -> None:
    """Environments that get none at the start repeat the last one, once; others rest when none is left."""
    envs = groups(6, 3)
    play(episodes, envs)
    played = [each for env in envs for each in env.played]
    assert set(played) == set(listed(episodes))
    assert all(played.count(each) == 1 for each in listed(episodes - 1))
    assert len(played) == max(episodes, 6)


def test_only_the_first_episodes_are_recorded_as_video() -> None:
    found = play(9, groups(4, 2), chunk=1, filmed=3)
    for index, result in enumerate(found):
        assert len(result.frames) == (result.steps if index < 3 else 0), (
            "one frame after every policy call"
        )
        assert all(
            frame.shape == (64, 64, 3) and frame.dtype == torch.uint8 for frame in result.frames
        )
        assert all((frame[..., 2] == result.seed % 251).all() for frame in result.frames), (
            "of its own episode"
        )
    clocks = [int((frame[:, -1, 1] == 255).sum()) for frame in found[0].frames]
    assert clocks == [3 * step for step in range(1, found[0].steps + 1)]


def test_progress_counts_finished_episodes() -> None:
    seen: list[float] = []
    play_evaluation(
        Actor(LinearPolicy(LinearOptions()), SETTINGS),
        groups(4, 2),
        range(5),
        Timeline(),
        progress=seen.append,
    )
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(set(seen)) > 3


def test_a_part_of_the_list_runs_as_within_the_full_list() -> None:
    actor = Actor(LinearPolicy(LinearOptions()), SETTINGS)
    whole = groups(4, 2)
    everything = play_evaluation(actor, whole, range(11), Timeline(), filmed=6)
    part = play_evaluation(actor, groups(3, 1), range(5, 9), Timeline(), filmed=6)
    assert [(each.task, each.seed, each.success, each.steps) for each in part] == [
        (each.task, each.seed, each.success, each.steps) for each in everything[5:9]
    ]
    assert [len(each.frames) > 0 for each in part] == [True, False, False, False]


def test_no_task_repeats_an_initial_state() -> None:
    """More episodes of a task than it has initial states would count the same twice."""
    actor = Actor(LinearPolicy(LinearOptions()), SETTINGS)
    (env,) = groups(4, 1)
    env.spec = replace(env.spec, starts=2)
    assert len(play_evaluation(actor, [env], range(2 * len(GOALS)), Timeline())) == 2 * len(GOALS)
    with pytest.raises(UserError, match="3 of each task, which has only 2 initial states"):
        play_evaluation(actor, [env], range(2 * len(GOALS), 2 * len(GOALS) + 1), Timeline())

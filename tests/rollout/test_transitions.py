"""Replay records of episodes, in a chain where every number is known."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.advantages import GAMMA_UNITS, chunk_rewards
from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.core.transitions import EpisodeRecords
from rlinf_vla.core.types import Episodes, Inputs
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.transitions import record_transitions, transition_metrics
from rlinf_vla.telemetry.timeline import Timeline
from tests.rollout.walk import Places, Walk, tabular

REWARDS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
GAMMA = 0.5


def played(
    chunk: int = 2,
    limit: int = 5,
    terminates: bool = False,
    unit: str = "step",
    seeds: list[int] | None = None,
) -> list[EpisodeRecords]:
    policy = tabular(len(REWARDS), chunk, SACConfig(critics=2, hidden=8))
    seed = torch.tensor([0] if seeds is None else seeds)
    rewards = partial(chunk_rewards, gamma=GAMMA, unit=unit)
    actor = Actor(policy, Settings(0, 1.0, 2))
    episodes = Episodes.first_attempts(torch.zeros_like(seed), seed)
    return record_transitions(
        policy, actor, [Walk(REWARDS, limit, 2, terminates)], episodes, rewards, False, Timeline()
    )


@pytest.mark.parametrize("unit", GAMMA_UNITS)
@pytest.mark.parametrize("terminates", [False, True])
def test_each_chunk_is_a_record_and_truncation_adds_the_final_observation(
    terminates: bool, unit: str
) -> None:
    """Five control steps in chunks of two: the last chunk executes only one action."""
    (episode,) = played(terminates=terminates, unit=unit)
    records = episode.records
    per_step = unit == "step"
    earned = [1 + GAMMA * 2, 3 + GAMMA * 4, 5.0] if per_step else [3.0, 7.0, 5.0]
    discount = [GAMMA**2, GAMMA**2, GAMMA] if per_step else [GAMMA] * 3
    if terminates:
        discount[-1] = 0.0
        assert (
            records["place"].argmax(1).tolist() == [0, 2, 4]
            and records["acted"].tolist() == [True] * 3
        )
    else:  # one more record where the episode was truncated, after five steps, without an action
        earned, discount = [*earned, 0.0], [*discount, 0.0]
        assert records["place"].argmax(1).tolist() == [0, 2, 4, 5] and records[
            "acted"
        ].tolist() == [True] * 3 + [False]
    assert records["reward"].tolist() == earned and records["discount"].tolist() == discount
    assert episode.steps == 5 and not episode.success
    assert records["action"].shape[1:] == (2, 1) and records["action"].abs().max() <= 1
    assert len(records["action"][:3].flatten().unique()) == 6, "all actions differ"


def test_a_frozen_backbone_gets_blocks_of_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where episodes were cut."""
    policy = SAC(SACConfig(critics=2, hidden=8, frozen_backbone=True)).wrap(
        Places(len(REWARDS), 1), 0
    )
    sizes = list[int]()
    original = policy.base.encode

    def encode(inputs: Inputs) -> Any:
        sizes.append(len(next(iter(inputs.values()))))
        return original(inputs)

    monkeypatch.setattr(policy.base, "encode", encode)
    seed = torch.arange(6)
    episodes = Episodes.first_attempts(torch.zeros_like(seed), seed)
    rewards = partial(chunk_rewards, gamma=GAMMA)
    record_transitions(
        policy,
        Actor(policy, Settings(0, 1.0, 2)),
        [Walk(REWARDS, 5, 6)],
        episodes,
        rewards,
        False,
        Timeline(),
    )
    assert sizes == [2] * (3 * 5 + 3)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_episodes_of_any_chunk_are_in_the_order_of_the_list(chunk: int) -> None:
    seeds = [4, 0, 2, 6, 1]
    for seed, episode in zip(seeds, played(chunk, seeds=seeds), strict=True):
        places = episode.records["place"].argmax(1).tolist()
        assert places == [(seed + step) % 7 for step in [*range(0, 5, chunk), 5]]
        total = sum(GAMMA**i * REWARDS[(seed + i) % 7] for i in range(5))
        steps = [min(chunk, 5 - first) for first in range(0, 5, chunk)]
        rewards = episode.records["reward"].tolist()
        elapsed = 0
        found = 0.0
        for reward, length in zip(rewards, steps, strict=False):
            found = found + GAMMA**elapsed * reward
            elapsed = elapsed + length
        assert found == pytest.approx(total), (
            "a chunk's discounted rewards are those of its control steps"
        )


def test_metrics_are_per_episode_and_per_control_step() -> None:
    episodes = [
        EpisodeRecords({"reward": torch.tensor([1.0, 2.0])}, True, 3),
        EpisodeRecords({"reward": torch.tensor([3.0])}, False, 1),
        EpisodeRecords({"reward": torch.tensor([-1.0])}, False, 6),
    ]
    assert transition_metrics(episodes) == pytest.approx(
        {
            "rollout/episodes": 3,
            "rollout/success_once": 1 / 3,
            "rollout/episode_len": 10 / 3,
            "rollout/reward_mean": 0.5,
            "rollout/return_min": -1.0,
            "rollout/return_max": 3.0,
        }
    )

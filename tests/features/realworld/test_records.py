"""Replay records of robot episodes against a sum over single steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.core.protocols import Convention
from rlinf_vla.core.transitions import ACTED, ACTION, COST, DISCOUNT, REWARD, EpisodeRecords
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.episode import TRAINING, Job, RobotEpisode
from rlinf_vla.features.realworld.records import RecordForm, operator_records, training_records

GAMMA = 0.8
OPENS = ArmConvention(Convention())


@st.composite
def episodes(draw: st.DrawFn) -> RobotEpisode:
    """Chunks of the policy, of which takeovers cut some, and periods in which the arm was held."""
    human = draw(st.lists(st.booleans(), min_size=1, max_size=14))
    begins = [
        not by and (step == 0 or human[step - 1] or draw(st.booleans()))
        for step, by in enumerate(human)
    ]
    waits = draw(st.lists(st.integers(1, 3), min_size=len(human), max_size=len(human)))
    rewards = draw(st.lists(st.floats(-1, 1, width=16), min_size=len(human), max_size=len(human)))
    steps = len(human)
    terminated = draw(st.booleans())
    return RobotEpisode(
        job=Job(TRAINING, 0, 0),
        task="toy",
        instruction="",
        images={},
        state=torch.arange(steps + 1.0)[:, None].repeat(1, 8),
        tick=torch.tensor([0, *torch.tensor(waits).cumsum(0).tolist()]),
        action=torch.rand(steps, 4, generator=torch.Generator().manual_seed(steps)),
        human=torch.tensor(human),
        begins=torch.tensor(begins),
        chosen=torch.arange(steps).float()[:, None],
        reward=torch.tensor(rewards),
        cost=torch.tensor(rewards).flip(0).abs(),
        terminated=terminated,
        success=terminated,
        ended="",
    )


def steps_of(found: EpisodeRecords) -> list[tuple[int, int]]:
    """First step of each record and of the next one; the observation is the step's number."""
    at = found.records["state"][:, 0].int().tolist()
    end = at[0] + found.steps
    return list(zip(at, [*at[1:], end], strict=False))[: int(found.records[ACTED].sum())]


def check(episode: RobotEpisode, found: EpisodeRecords, chunk: int) -> None:
    rows = steps_of(found)
    assert rows[0][0] + found.steps == rows[-1][1], "the records cover every step"
    assert found.cost == pytest.approx(
        float(episode.cost[rows[0][0] : rows[-1][1]].sum()), abs=1e-5
    )
    for number, (first, end) in enumerate(rows):
        assert 1 <= end - first <= chunk
        assert not (episode.human[first:end] != episode.human[first]).any(), "one hand per record"
        assert not episode.begins[first + 1 : end].any(), "one inference per record"
        tick = episode.tick.tolist()
        earned = sum(
            GAMMA ** (tick[step] - tick[first]) * float(episode.reward[step])
            for step in range(first, end)
        )
        torch.testing.assert_close(
            float(found.records[REWARD][number]), earned, atol=1e-5, rtol=1e-5
        )
        paid = sum(
            GAMMA ** (tick[step] - tick[first]) * float(episode.cost[step])
            for step in range(first, end)
        )
        torch.testing.assert_close(float(found.records[COST][number]), paid, atol=1e-5, rtol=1e-5)
        over = episode.terminated and end == len(episode)
        wanted = 0.0 if over else GAMMA ** (tick[end] - tick[first])
        torch.testing.assert_close(float(found.records[DISCOUNT][number]), wanted)
    kept = len(rows) + (not (episode.terminated and rows[-1][1] == len(episode)))
    assert all(len(values) == kept for values in found.records.values()), (
        "a truncated episode has its last observation"
    )


def inputs(episode: RobotEpisode) -> dict[str, Tensor]:
    return {"state": episode.state}


@given(episodes(), st.integers(1, 5))
def test_records_are_steps_of_a_semi_markov_process(episode: RobotEpisode, chunk: int) -> None:
    (found,) = training_records(episode, inputs(episode), RecordForm(chunk, OPENS, False, GAMMA))
    assert found.steps == len(episode) and found.success == episode.success
    check(episode, found, chunk)
    for number, (first, end) in enumerate(steps_of(found)):
        action = found.records[ACTION][number]
        assert action.shape == (chunk, 4)
        for place in range(chunk):
            torch.testing.assert_close(action[place], episode.action[min(first + place, end - 1)])


@given(episodes(), st.integers(1, 5))
def test_the_operators_steps_are_episodes_of_their_own(episode: RobotEpisode, chunk: int) -> None:
    found = operator_records(episode, inputs(episode), RecordForm(chunk, OPENS, False, GAMMA))
    shown = [step for each in found for first, end in steps_of(each) for step in range(first, end)]
    assert shown == torch.nonzero(episode.human)[:, 0].tolist()
    for each in found:
        check(episode, each, chunk)


@given(episodes())
def test_an_actor_of_noise_learns_from_whole_inferences_of_its_own(episode: RobotEpisode) -> None:
    form = RecordForm(20, OPENS, True, GAMMA)
    assert operator_records(episode, inputs(episode), form) == []
    seen = list[int]()
    for each in training_records(episode, inputs(episode), form):
        check(episode, each, 20)
        for number, (first, end) in enumerate(steps_of(each)):
            assert episode.begins[first], "a record begins with an inference, whose noise is known"
            assert each.records[ACTION][number].tolist() == [first]
            seen += range(first, end)
    assert seen == torch.nonzero(~episode.human)[:, 0].tolist()

"""Visits of a policy and the expert, whose labels and mixture are known in closed form in the counter world."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.transitions import EpisodeRecords
from rlinf_vla.core.types import Episodes, Inputs, Observation
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect_episodes
from rlinf_vla.rollout.demonstrations import LABEL
from rlinf_vla.rollout.faults import GuardedEnv
from rlinf_vla.rollout.player import Call
from rlinf_vla.rollout.visits import record_visits
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import CounterWorld, groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.rollout.test_faults import Exploding

LIMIT = 6


class WholeImages(LinearPolicy):
    """Keeps the complete image, from which level and clock can be read."""

    def prepare(self, obs: Observation) -> Inputs:
        return {"image": obs.images["base"].clone()}

    def encode(self, inputs: Inputs) -> Tensor:
        return super().encode({"image": inputs["image"][:, ::8, ::8]})


def episodes(count: int) -> Episodes:
    number = torch.arange(count)
    return Episodes.first_attempts(number % 2, number)


def visited(
    chunk: int,
    beta: float,
    count: int = 9,
    envs: list[VectorEnv] | None = None,
    calls: list[Call] | None = None,
) -> list[EpisodeRecords]:
    policy = WholeImages(LinearOptions(chunk=chunk))
    return record_visits(
        policy,
        Actor(policy, Settings(0, 1.0, 1)),
        envs or list(groups(4, 2)),
        episodes(count),
        beta,
        Timeline(),
        watch=lambda call: None if calls is None else calls.append(call),
    )


@pytest.mark.parametrize("chunk", [1, 3])
def test_without_the_expert_the_states_are_those_of_whole_chunks(chunk: int) -> None:
    policy = WholeImages(LinearOptions(chunk=chunk))
    actor = Actor(policy, Settings(0, 1.0, 1))
    whole = collect_episodes(actor, list(groups(4, 2)), episodes(9), 0, Timeline())
    records = visited(chunk, 0.0)
    images = torch.cat([record.records["image"] for record in records])
    rewards = torch.cat([record.records["reward"] for record in records])
    assert torch.equal(rewards, whole.reward[whole.valid])
    first = torch.cat([torch.arange(len(record.records["reward"])) for record in records])
    assert torch.equal(images[first % chunk == 0], whole.inputs["image"])


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_label_is_the_experts_action_in_this_state_and_the_next_ones(beta: float) -> None:
    for record in visited(3, beta):
        images, labels = record.records["image"], record.records["action"]
        clock = (images[:, :, -1, 1] == 255).sum(1) // 3
        level = ((images[:, -1, :, 0] == 255).sum(1) - 32) // 8
        assert clock.tolist() == list(range(record.steps)) and record.records["acted"].all()
        ones = torch.ones(record.steps)
        own = torch.stack([ones, level / 4, clock / 32, torch.zeros(record.steps)], 1)
        expected = [
            [own[min(step + ahead, record.steps - 1)].tolist() for ahead in range(3)]
            for step in range(record.steps)
        ]
        torch.testing.assert_close(labels, torch.tensor(expected))


def test_the_expert_acts_in_its_share_of_the_chunks() -> None:
    """Each chunk is one draw. After the first step no action of the policy can be the expert's."""
    calls = list[Call]()
    visited(2, 0.3, 600, [CounterWorld(8, LIMIT)], calls)
    by_expert = dict[tuple[int, int], set[bool]]()
    for call in calls:
        same = (call.sample.actions[:, 0] == call.sample.latent[LABEL]).all(1)
        for seed, step, expert in zip(
            call.episodes.seed.tolist(), call.step.tolist(), same.tolist(), strict=True
        ):
            if step:
                by_expert.setdefault((seed, step // 2), set()).add(expert)
    assert all(len(acted) == 1 for acted in by_expert.values())
    share = sum(acted == {True} for acted in by_expert.values()) / len(by_expert)
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / len(by_expert)) ** 0.5


def test_with_the_expert_alone_the_policy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearPolicy, "act", lambda *arguments: pytest.fail("the policy acted"))
    assert all(record.success for record in visited(2, 1.0))


def test_records_do_not_depend_on_the_environments() -> None:
    for one, other in zip(visited(3, 0.5), visited(3, 0.5, envs=list(groups(3, 1))), strict=True):
        assert one.records.keys() == other.records.keys() and one.success == other.success
        assert all(torch.equal(one.records[name], other.records[name]) for name in one.records)


def test_where_the_simulator_failed_nothing_is_learnt() -> None:
    records = visited(2, 0.0, 4, [GuardedEnv(Exploding(CounterWorld(4, LIMIT)))])
    failed = [record for record in records if record.fault]
    assert failed and all(record.steps == 2 for record in failed)
    for record in failed:
        assert record.records["acted"].tolist() == [True, False]
        label = record.records["action"]
        assert torch.equal(label[0, 0], label[0, 1]) and not label[1].any()

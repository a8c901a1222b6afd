"""Policy calls in blocks, and as recorded graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.core.types import Episodes, Inputs, Observation
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions
from rlinf_vla.rollout.actor import Actor, CudaGraphed, GraphPool, Settings
from rlinf_vla.testing.policy_calls import observations, rows, with_critic
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.models.tiny_openvla import ASSETS


class Rerun:
    """What a CUDA graph does: the same work on the same memory."""

    def __init__(
        self, function: Any, arguments: dict[str, Tensor], results: dict[str, Tensor]
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.results = results

    def replay(self) -> None:
        for name, value in self.function(self.arguments).items():
            self.results[name].copy_(value)


class RecordedOnTheCPU(CudaGraphed):
    recordings = 0

    def _record(self, arguments: dict[str, Tensor]) -> Any:
        self.recordings += 1
        results = {
            name: torch.empty_like(value) for name, value in self.function(arguments).items()
        }
        return Rerun(self.function, arguments, results), arguments, results


class Recorder:
    """Keeps what it made."""

    def __init__(self) -> None:
        self.made: list[RecordedOnTheCPU] = []

    def __call__(self, function: Any) -> RecordedOnTheCPU:
        self.made.append(RecordedOnTheCPU(function))
        return self.made[-1]


def test_a_recording_follows_its_arguments_and_keeps_its_results_apart() -> None:
    recorded = RecordedOnTheCPU(lambda tensors: {"sum": tensors["a"] + tensors["b"]})
    first = recorded({"a": torch.ones(2), "b": torch.ones(2)})
    second = recorded({"a": torch.full((2,), 5.0), "b": torch.ones(2)})
    assert first["sum"].tolist() == [2, 2] and second["sum"].tolist() == [6, 6]
    assert recorded.recordings == 1
    recorded({"a": torch.ones(3), "b": torch.ones(3)})
    recorded({"a": torch.ones(2).int(), "b": torch.ones(2)})
    assert recorded.recordings == 3, "one per shapes and types"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocks_and_recordings_change_nothing(temperature: float) -> None:
    policy = with_critic(LinearPolicy(LinearOptions(chunk=2)))
    inputs = policy.prepare(observations(policy, 7))
    episodes = Episodes.first_attempts(torch.zeros(7).long(), torch.arange(7))
    step = torch.arange(7) * 3
    whole = Actor(policy, Settings(5, temperature, 7))
    blocks = Actor(policy, Settings(5, temperature, 3))
    recorded = Actor(policy, Settings(5, temperature, 3))
    recorded.record(recorder := Recorder())
    expected = whole.act(inputs, episodes, step)
    for actor in (blocks, recorded, recorded):
        found = actor.act(inputs, episodes, step)
        torch.testing.assert_close(found.actions, expected.actions)
        torch.testing.assert_close(found.log_prob, expected.log_prob)
        assert found.latent.keys() == expected.latent.keys()
        torch.testing.assert_close(actor.values(inputs), whole.values(inputs))
    assert [each.recordings for each in recorder.made] == [2, 2], (
        "acting and valuing: blocks of three rows and of one"
    )
    recorded.forget()
    torch.testing.assert_close(
        recorded.act(rows(inputs, slice(0, 2)), episodes[:2], step[:2]).actions,
        expected.actions[:2],
    )
    assert [each.recordings for each in recorder.made] == [2, 2], "no new shape was recorded"


@pytest.mark.parametrize("wanted", [[1], [6], [0, 2, 4], list(range(7))])
def test_values_of_some_rows_are_those_of_all(wanted: list[int]) -> None:
    """Bit for bit; blocks without such a row are neither prepared nor computed."""
    policy = with_critic(
        OpenVLAOFTPolicy.load(
            ASSETS / "openvla_oft_tiny_pushcube", OpenVLAOFTOptions(prompt_length=26)
        )
    )
    actor = Actor(policy, Settings(5, 1.0, 3))
    obs = observations(policy, 7)
    obs = replace(obs, jpeg={name: 255 - image for name, image in obs.images.items()})
    everything = actor.values(actor.prepare(obs))
    assert len(everything.unique()) == 7
    actor.record(recorder := Counter())
    prepared: list[int] = []
    prepare = policy.prepare

    def watched(some: Observation) -> Inputs:
        prepared.append(len(some.instruction))
        assert all(
            torch.equal(some.jpeg[name], 255 - image) for name, image in some.images.items()
        ), "no second JPEG round trip"
        return prepare(some)

    policy.prepare = watched  # type: ignore[method-assign]
    mask = torch.zeros(7, dtype=torch.bool).index_fill(
        0, torch.tensor(wanted, dtype=torch.int64), True
    )
    assert torch.equal(actor.value(obs, mask), torch.where(mask, everything, 0))
    blocks = {row // 3 for row in wanted}
    assert prepared == [sum(1 if block == 2 else 3 for block in blocks)] and recorder.calls == len(
        blocks
    )


class Counter:
    """Counts the blocks computed."""

    calls = 0

    def __call__(self, function: Any) -> Any:
        def counted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            self.calls += 1
            return function(tensors)

        return counted


def test_recordings_share_memory_until_the_last_of_them_is_gone() -> None:
    """PyTorch frees the pool with its last graph, and then refuses its handle."""

    class Graph:
        pass

    pool = GraphPool(object)
    first, second = Graph(), Graph()
    shared = pool.of(first)
    assert pool.of(second) is shared
    del first
    third = Graph()
    assert pool.of(third) is shared
    del second, third
    assert pool.of(Graph()) is not shared

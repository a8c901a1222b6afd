"""Compares workloads with rollouts of the real player, in environments whose episodes have given lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation, StepResult
from rlinf_vla.features.planner.workload import Round, Workload, rounds
from rlinf_vla.rollout.player import interleave, play_episodes, rollout_generator
from rlinf_vla.telemetry.timeline import Timeline


@dataclass
class Spec:
    num_envs: int


@dataclass
class Clockwork:
    """An episode's seed sets its number of policy calls; it is truncated at the limit. Records its calls."""

    spec: Any
    limit: int
    told: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    lasts: dict[int, int] = field(default_factory=dict)

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        rows = list(range(self.spec.num_envs)) if mask is None else mask.nonzero()[:, 0].tolist()
        self.left = self.left or [0] * self.spec.num_envs
        for row in rows:
            self.left[row] = self.lasts[row] = int(episodes.seed[row])
        if mask is not None:
            self.told.append(("reset", tuple(rows)))

    def reset_wait(self) -> Observation:
        return Observation({}, torch.zeros(self.spec.num_envs, 0), [""] * self.spec.num_envs)

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self.told.append(("step", ()))

    def step_wait(self) -> StepResult:
        self.left = [calls - 1 for calls in self.left]
        ended = torch.tensor([[calls == 0] for calls in self.left])
        cut = torch.tensor(
            [
                [length == self.limit]
                for length in (self.lasts[row] for row in range(self.spec.num_envs))
            ]
        )
        valid = torch.ones_like(ended)
        return StepResult(
            self.reset_wait(),
            torch.zeros(valid.shape),
            ended & ~cut,
            ended & cut,
            ended & ~cut,
            valid,
        )


class Nobody:
    """A policy that does nothing and records requests for values."""

    def __init__(self, env: Clockwork) -> None:
        self.env = env
        self.policy = self

    def prepare(self, obs: Observation) -> Inputs:
        return {}

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        size = self.env.spec.num_envs
        return ActionSample(torch.zeros(size, 1, 1), {}, torch.zeros(size, 1, 1), torch.zeros(size))

    def value(self, obs: Observation, wanted: Tensor) -> Tensor:
        self.env.told.append(("value", ()))
        return torch.zeros(self.env.spec.num_envs)


def as_rounds(told: Sequence[tuple[str, tuple[int, ...]]]) -> list[Round]:
    found: list[Round] = []
    for what, rows in told:
        if what == "step":
            found.append(Round(False, ()))
        else:
            found[-1] = Round(found[-1].valued or what == "value", rows or found[-1].resets)
    return found


def episodes_of(lengths: Sequence[int]) -> Episodes:
    seeds = torch.tensor(lengths)
    return Episodes.first_attempts(torch.zeros_like(seeds), seeds)


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=7)
LIMIT = 4


def workload(lengths: Sequence[int], **options: Any) -> Workload:
    plain = {
        "envs": 4,
        "batch_size": 4,
        "minibatch_size": 8,
        "epochs": 1,
        "episode_calls": LIMIT,
        "chunk": 1,
    }
    return Workload(
        **plain | {"lengths": tuple((calls, calls == LIMIT) for calls in lengths)} | options
    )  # type: ignore[arg-type]


@given(LENGTHS, st.integers(1, 9), st.sampled_from([1, 2]))
def test_environments_that_run_for_a_fixed_time(lengths: list[int], calls: int, depth: int) -> None:
    load = workload(lengths, calls=calls)
    size = 4 // depth
    envs = [Clockwork(Spec(size), LIMIT) for _ in range(depth)]
    players = []
    for group, env in enumerate(envs):
        ordinals = [0] * size

        def following(
            done: Tensor, group: int = group, ordinals: list[int] = ordinals
        ) -> tuple[Episodes, Tensor]:
            for row in done.nonzero()[:, 0].tolist():
                ordinals[row] += 1
            return episodes_of(
                [
                    load.length(group * size + row, ordinal)[0]
                    for row, ordinal in enumerate(ordinals)
                ]
            ), done

        first, _ = following(torch.zeros(size))
        players.append(
            rollout_generator(
                Nobody(env),
                as_env(env),
                first,
                following,
                lambda call: False,
                Timeline(),
                "track",
                calls,
            )
        )
    interleave(players)
    assert rounds(load, range(4), size, depth) == [as_rounds(env.told) for env in envs]


@given(LENGTHS, st.integers(4, 12), st.sampled_from([1, 2]))
def test_episodes_of_a_list(lengths: list[int], listed: int, depth: int) -> None:
    load = workload(lengths, listed=listed)
    envs = [Clockwork(Spec(4 // depth), LIMIT) for _ in range(depth)]
    episodes = episodes_of([load.length(0, index)[0] for index in range(listed)])
    nobodies = {id(env): Nobody(env) for env in envs}
    play_episodes(
        lambda env: nobodies[id(env)],
        [as_env(env) for env in envs],
        episodes,
        lambda *call: None,
        Timeline(),
    )
    assert rounds(load, range(listed), 4 // depth, depth) == [as_rounds(env.told) for env in envs]


def as_env(env: Clockwork) -> VectorEnv:
    return env  # type: ignore[return-value]


def test_rows_and_steps() -> None:
    assert workload([2, 4], calls=6).rows == 24 and workload([2, 4], calls=6, chunk=3).steps == 72
    assert workload([2, 4], listed=4).rows == 12
    assert workload([], listed=3).rows == 3 * LIMIT, (
        "without measured episodes all reach their limit"
    )


def test_lengths_are_drawn_equally_often() -> None:
    load = workload([1, 2, 3, 4], calls=6)
    for ordinal in range(6):
        assert sorted(load.length(environment, ordinal)[0] for environment in range(4)) == [
            1,
            2,
            3,
            4,
        ]


@pytest.mark.parametrize(("workers", "attempts"), [(1, 1), (2, 2), (2, 3), (4, 8), (None, 4)])
def test_every_listed_episode_is_in_one_part(workers: int | None, attempts: int) -> None:
    load = workload([2], listed=24, attempts=attempts)
    parts = load.parts(workers)
    assert [episode for part in parts for episode in part] == list(range(24))
    assert all(len(part) % attempts == 0 for part in parts) and (
        workers is not None or len(parts) == 1
    )

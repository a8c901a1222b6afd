"""Run a policy in groups of environments: as long as asked, or over a list of episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation, StepResult, Tensors
from rlinf_vla.rollout.actor import rows_chosen


class Spans(Protocol):
    """Records the duration of named spans, such as ``telemetry.timeline.Timeline``."""

    def span(self, name: str, track: str) -> AbstractContextManager[Any]: ...


class ActorProtocol(Protocol):
    """An actor such as ``rollout.actor.Actor``, or a substitute without a policy.

    Samples and values are on the CPU; values are 0 where they are not ``wanted``.
    """

    def prepare(self, obs: Observation) -> Inputs: ...
    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample: ...
    def value(self, obs: Observation, wanted: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Call:
    """One policy call in a group, made at ``observation``, and its outcome.

    ``step`` int64 ``[B]``: control steps executed before the call. ``cut`` bool ``[B]``: the
    episode was cut after the call; ``bootstrap_value`` then estimates the return of what would
    follow. Observations are where the simulator made them, ``inputs`` on the policy's device; all
    else is on the CPU.
    """

    episodes: Episodes
    step: Tensor
    observation: Observation
    inputs: Inputs
    sample: ActionSample
    result: StepResult
    cut: Tensor
    bootstrap_value: Tensor


def rollout_generator(
    actor: ActorProtocol,
    env: VectorEnv,
    first: Episodes,
    next_episodes: Callable[[Tensor], tuple[Episodes, Tensor]],
    on_call: Callable[[Call], bool],
    spans: Spans,
    track: str,
    calls: int | None = None,
    values_ends: bool = False,
) -> Generator[None, None, None]:
    """Make ``calls`` policy calls in a group, or continue until ``on_call`` returns true.

    Yields while the simulator works. ``next_episodes(done)`` returns the next episodes, and where
    in ``done`` (bool ``[B]``) one begins; other environments rest. With ``calls``, the critic
    values the observations at which a time limit or the end of the rollout cuts an episode, and
    with ``values_ends`` those after a termination, which then count as cut.
    """
    episodes = first
    step = torch.zeros(len(first), dtype=torch.int64)
    count = 0
    last = False
    rest = step.bool()
    with spans.span("reset", track):
        env.reset_async(episodes)
        yield
        observation = env.reset_wait()
    while not last:
        with spans.span("act", "policy"):
            inputs = actor.prepare(observation)
            sample = actor.act(inputs, episodes, step)
        with spans.span("simulate", track):
            env.step_async(sample.actions, skip_ended=bool(rest.any()))
            yield
            result = env.step_wait().outcome_to(CPU)
        count += 1
        last = count == calls
        done = result.done
        terminated = (result.terminated & result.valid).any(dim=1)
        final = torch.zeros_like(done) if values_ends else terminated  # nothing follows
        cut = ~final if last else done & ~final
        bootstrap_value = torch.zeros_like(sample.value)
        if calls is not None and cut.any():
            with spans.span("value", "policy"):
                bootstrap_value = actor.value(result.observation, cut)
        last |= on_call(
            Call(episodes, step, observation, inputs, sample, result, cut, bootstrap_value)
        )
        step = torch.where(done, 0, step + result.valid.sum(dim=1))
        seen = observation
        observation = result.observation
        if done.any() and not last:
            following, begin = next_episodes(done)
            rest = rest | (done & ~begin)
            if begin.any():
                episodes = Episodes.where(begin, following, episodes)
                with spans.span("reset", track):
                    env.reset_async(episodes, begin)
                    yield
                    observation = env.reset_wait()
        if rest.any():  # policies may refuse what is seen after an episode's end
            observation = rows_chosen(rest, seen, observation)


def interleave(players: Sequence[Generator[None, None, None]]) -> None:
    """Advance the generators in turn until all end: one computes while others simulate."""
    active = list(players)
    while active:
        for player in list(active):
            try:
                next(player)
            except StopIteration:
                active.remove(player)


def play_episodes(
    actor_of: Callable[[VectorEnv], ActorProtocol],
    groups: Sequence[VectorEnv],
    episodes: Episodes,
    on_call: Callable[[VectorEnv, Call, Tensor], None],
    spans: Spans,
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Play each of ``episodes`` once, on the next free environment, and report every policy call.

    ``actor_of(env)`` acts in ``env``; ``on_call(env, call, index)`` gets its calls. ``index`` int64
    ``[B]``: list position of each environment's episode, or -1 for rows to be ignored, when the
    list is exhausted: then an environment rests.
    """
    waiting = deque(range(len(episodes)))
    ended = 0
    players = []

    def taken(count: int) -> Tensor:
        """Return the next positions, and -1 (which indexes the last episode) when none is left."""
        return torch.tensor(
            [waiting.popleft() if waiting else -1 for _ in range(count)], dtype=torch.int64
        )

    for number, env in enumerate(groups):
        index = taken(env.spec.num_envs)

        def report(call: Call, env: VectorEnv = env, index: Tensor = index) -> bool:
            nonlocal ended
            on_call(env, call, index)
            done = call.result.done
            ended += int((done & (index >= 0)).sum())
            progress(ended / len(episodes))
            index[done] = -1
            return not waiting and bool((index < 0).all())

        def following(done: Tensor, index: Tensor = index) -> tuple[Episodes, Tensor]:
            index[done] = taken(int(done.sum()))
            return episodes[index], done & (index >= 0)

        players.append(
            rollout_generator(
                actor_of(env), env, episodes[index], following, report, spans, f"simulator {number}"
            )
        )
    interleave(players)


class EpisodeRows:
    """Collect rows of tensors for each of ``count`` episodes, which are played in any order."""

    def __init__(self, count: int) -> None:
        self._rows: list[list[Tensors]] = [[] for _ in range(count)]

    def add(self, index: Tensor, values: Tensors, where: Tensor | None = None) -> None:
        """Copy a row of ``values`` ``[B, ...]`` to the CPU for each episode in ``index``.

        ``index``: see play_episodes. ``where`` bool ``[B]``: the rows to add; None: all.
        """
        values = moved(values, CPU)
        for slot, number in enumerate(index.tolist()):
            if number >= 0 and (where is None or where[slot]):
                self._rows[number].append(
                    {name: value[slot].clone() for name, value in values.items()}
                )

    def take(self, number: int) -> Tensors:
        """Return an episode's rows, ``[L, ...]``, and forget them."""
        rows = self._rows[number]
        self._rows[number] = []
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def all(self) -> list[Tensors]:
        """Return the rows of all episodes that have some, in their order, and forget them."""
        return [self.take(number) for number, rows in enumerate(self._rows) if rows]

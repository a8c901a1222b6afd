"""A policy in an environment group, as a generator that pauses whenever the simulator works: groups interleave, and its wait is hidden."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_vla.protocols import VectorEnv
from rlinf_vla.types import ActionSample, Episodes, Inputs, Observation, StepResult


class Spans(Protocol):
    """Where time goes; ``telemetry.timeline.Timeline`` is one."""

    def span(self, name: str, track: str) -> AbstractContextManager[Any]: ...


class Prepares(Protocol):
    """A policy, as far as playing needs one."""

    def prepare(self, obs: Observation) -> Inputs: ...


class Acts(Protocol):
    """``rollout.actor.Actor``, or who acts in its place."""

    @property
    def policy(self) -> Prepares: ...

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample: ...
    def value(self, inputs: Inputs) -> Tensor: ...


@dataclass(frozen=True)
class Call:
    """One policy call in a group, at ``observation``, and what came of it. ``step`` int64 ``[B]``: control steps executed before it.

    ``cut`` bool ``[B]``: the episode was cut off after this call, where ``bootstrap_value`` estimates what would have followed.
    """

    episodes: Episodes
    step: Tensor
    observation: Observation
    inputs: Inputs
    sample: ActionSample
    result: StepResult
    cut: Tensor
    bootstrap_value: Tensor


def play(
    actor: Acts,
    env: VectorEnv,
    first: Episodes,
    next_episodes: Callable[[Tensor], Episodes],
    on_call: Callable[[Call], bool],
    spans: Spans,
    track: str,
    calls: int | None = None,
) -> Generator[None, None, None]:
    """Play ``calls`` policy calls, or until ``on_call`` returns true. Pauses (yields) while the simulator works.

    ``next_episodes(done)`` names the episodes that follow for the environments in ``done`` (bool ``[B]``); other rows are ignored.
    With ``calls``, the critic values the observations at which episodes are cut, by a time limit or by the end.
    """
    episodes, step, count, last = first, torch.zeros(len(first), dtype=torch.int64), 0, False
    with spans.span("reset", track):
        env.reset_async(episodes)
        yield
        observation = env.reset_wait()
    while not last:
        with spans.span("act", "policy"):
            inputs = actor.policy.prepare(observation)
            sample = actor.act(inputs, episodes, step)
        with spans.span("step", track):
            env.step_async(sample.actions)
            yield
            result = env.step_wait()
        count += 1
        last = count == calls
        done, terminated = result.done, (result.terminated & result.valid).any(dim=1)
        cut = ~terminated if last else done & ~terminated
        bootstrap_value = torch.zeros_like(sample.value)
        if calls is not None and cut.any():
            with spans.span("value", "policy"):
                values = actor.value(actor.policy.prepare(result.observation))
            bootstrap_value = torch.where(cut, values, bootstrap_value)
        last |= on_call(Call(episodes, step, observation, inputs, sample, result, cut, bootstrap_value))
        step = torch.where(done.cpu(), 0, step + result.valid.sum(dim=1).cpu())
        observation = result.observation
        if done.any() and not last:
            episodes = Episodes.where(done.cpu(), next_episodes(done.cpu()), episodes)
            with spans.span("reset", track):
                env.reset_async(episodes, done)
                yield
                observation = env.reset_wait()


def interleave(players: Sequence[Generator[None, None, None]]) -> None:
    """Advance the groups in turn until all have ended: while one waits for its simulator, another one computes."""
    active = list(players)
    while active:
        for player in list(active):
            try:
                next(player)
            except StopIteration:
                active.remove(player)

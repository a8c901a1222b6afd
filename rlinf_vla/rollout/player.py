"""A policy in an environment group, as a generator that pauses whenever the simulator works: groups interleave, and its wait is hidden."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.types import ActionSample, Episodes, Inputs, StepResult


class Spans(Protocol):
    """Where time goes; ``telemetry.timeline.Timeline`` is one."""

    def span(self, name: str, track: str) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class Call:
    """One policy call in a group and what came of it. ``step`` int64 ``[B]``: control steps executed in the episode before it.

    ``cut`` bool ``[B]``: the episode was cut off after this call, where ``bootstrap_value`` estimates what would have followed.
    """

    episodes: Episodes
    step: Tensor
    inputs: Inputs
    sample: ActionSample
    result: StepResult
    cut: Tensor
    bootstrap_value: Tensor


@dataclass(frozen=True)
class Settings:
    """temperature: 0 is greedy. batch_size: environments per policy call, so that every plan makes calls of one shape."""

    run_seed: int
    temperature: float
    batch_size: int


def play(
    policy: Policy,
    env: VectorEnv,
    settings: Settings,
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
            inputs = policy.prepare(observation)
            sample = _act(policy, inputs, settings, episodes, step)
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
                values = _value(policy, policy.prepare(result.observation), settings.batch_size)
            bootstrap_value = torch.where(cut, values, bootstrap_value)
        last |= on_call(Call(episodes, step, inputs, sample, result, cut, bootstrap_value))
        step = torch.where(done.cpu(), 0, step + result.valid.sum(dim=1).cpu())
        observation = result.observation
        if done.any() and not last:
            following = next_episodes(done.cpu())
            episodes = Episodes(
                torch.where(done.cpu(), following.task_id, episodes.task_id), torch.where(done.cpu(), following.seed, episodes.seed)
            )
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


@torch.no_grad()
def _act(policy: Policy, inputs: Inputs, settings: Settings, episodes: Episodes, step: Tensor) -> ActionSample:
    samples = []
    for rows in _blocks(len(step), settings.batch_size):
        block = {name: value[rows] for name, value in inputs.items()}
        device = next(iter(block.values())).device
        counters = (episodes.task_id[rows].to(device), episodes.seed[rows].to(device), step[rows].to(device))
        noise = CounterNoise(settings.run_seed, *counters) if settings.temperature > 0 else None
        samples.append(policy.act(policy.encode(block), noise, settings.temperature))
    if len(samples) == 1:
        return samples[0]
    return ActionSample(
        torch.cat([sample.actions for sample in samples]),
        {name: torch.cat([sample.latent[name] for sample in samples]) for name in samples[0].latent},
        torch.cat([sample.log_prob for sample in samples]),
        torch.cat([sample.value for sample in samples]),
    )


@torch.no_grad()
def _value(policy: Policy, inputs: Inputs, batch_size: int) -> Tensor:
    size = len(next(iter(inputs.values())))
    blocks = [{name: value[rows] for name, value in inputs.items()} for rows in _blocks(size, batch_size)]
    return torch.cat([policy.value(policy.encode(block)) for block in blocks])


def _blocks(size: int, batch_size: int) -> list[slice]:
    return [slice(start, min(start + batch_size, size)) for start in range(0, size, batch_size)]

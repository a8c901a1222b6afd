"""Success on a fixed list of episodes: the same seeds for every checkpoint, so that any two are paired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlinf_vla.protocols import VectorEnv
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import EVALUATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.player import Call, Spans, interleave, play
from rlinf_vla.types import Episodes


@dataclass
class EpisodeResult:
    task: str
    seed: int
    instruction: str = ""
    success: bool = False
    steps: int = 0
    """Control steps until the end."""
    episode_return: float = 0.0
    """Undiscounted sum of rewards."""
    frames: list[Tensor] = field(default_factory=list)
    """uint8 ``[H, W, 3]`` after every policy call, for the episodes that were filmed."""


def sweep(
    actor: Actor,
    groups: Sequence[VectorEnv],
    episodes: int,
    spans: Spans,
    filmed: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[EpisodeResult]:
    """Play the first ``episodes`` evaluation episodes and film the first ``filmed`` of them; results in the order of the list."""
    queue = _Queue(numbered_episodes(EVALUATION_SEEDS, 0, episodes, len(groups[0].spec.tasks)))
    results: list[EpisodeResult] = []

    def finished(result: EpisodeResult) -> None:
        results.append(result)
        progress(len(results) / episodes)

    players = []
    for index, env in enumerate(groups):
        runner = _Runner(env, queue, filmed, finished)
        players.append(play(actor, env, runner.episodes, runner.next, runner.on_call, spans, f"simulator {index}"))
    interleave(players)
    return sorted(results, key=lambda result: result.seed)


class _Queue:
    """The episodes still to be played; past the end the last one again, marked as not wanted."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes, self._next = episodes, 0

    @property
    def empty(self) -> bool:
        return self._next >= len(self._episodes)

    def take(self, count: int) -> tuple[Episodes, list[bool]]:
        index = torch.arange(self._next, self._next + count)
        self._next += count
        return self._episodes[index.clamp(max=len(self._episodes) - 1)], (index < len(self._episodes)).tolist()


class _Runner:
    """Book-keeping of one environment group: which of its slots still play a wanted episode, and how it goes."""

    def __init__(self, env: VectorEnv, queue: _Queue, filmed: int, finished: Callable[[EpisodeResult], None]) -> None:
        self._env, self._queue, self._finished = env, queue, finished
        self._filmed = EVALUATION_SEEDS.start + filmed
        self.episodes, wanted = queue.take(env.spec.num_envs)
        self._running = [self._begin(slot) if wanted[slot] else None for slot in range(env.spec.num_envs)]

    def _begin(self, slot: int) -> EpisodeResult:
        return EpisodeResult(self._env.spec.tasks[int(self.episodes.task_id[slot])], int(self.episodes.seed[slot]))

    def on_call(self, call: Call) -> bool:
        result, done = call.result, call.result.done.tolist()
        steps, rewards, success = result.valid.sum(1).tolist(), result.reward.sum(1).tolist(), result.success.any(1).tolist()
        for slot, running in enumerate(self._running):
            if running is None:
                continue
            running.steps += steps[slot]
            running.episode_return += rewards[slot]
            running.success |= success[slot]
            running.instruction = result.observation.instruction[slot]
            if running.seed < self._filmed:
                running.frames.append(self._env.render(slot))
            if done[slot]:
                self._finished(running)
                self._running[slot] = None
        return not any(self._running) and self._queue.empty

    def next(self, done: Tensor) -> Episodes:
        taken, wanted = self._queue.take(int(done.sum()))
        for place, slot in enumerate(done.nonzero().flatten().tolist()):
            self.episodes.task_id[slot], self.episodes.seed[slot] = taken.task_id[place], taken.seed[place]
            self._running[slot] = self._begin(slot) if wanted[place] else None
        return self.episodes

"""Play a list of episodes, each once, on the next free environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.player import ActorProtocol, Call, Spans, interleave, rollout_generator


def play_episodes(
    actor_of: Callable[[VectorEnv], ActorProtocol],
    groups: Sequence[VectorEnv],
    episodes: Episodes,
    on_call: Callable[[VectorEnv, Call, Tensor], None],
    spans: Spans,
) -> None:
    """Play each of ``episodes`` once, and report every policy call.

    ``actor_of(env)`` acts in ``env``; ``on_call(env, call, index)`` gets its calls. ``index`` int64
    ``[B]``: list position of each environment's episode, or -1 for rows to be ignored, when the
    list is exhausted.
    """
    queue = _Queue(len(episodes))
    players = []
    for number, env in enumerate(groups):
        index = queue.take(env.spec.num_envs)

        def report(call: Call, env: VectorEnv = env, index: Tensor = index) -> bool:
            on_call(env, call, index)
            index[call.result.done.cpu()] = -1
            return queue.empty and bool((index < 0).all())

        def following(done: Tensor, index: Tensor = index) -> Episodes:
            index[done] = queue.take(int(done.sum()))
            return episodes[index]

        players.append(rollout_generator(actor_of(env), env, episodes[index], following, report, spans, f"simulator {number}"))
    interleave(players)


class _Queue:
    """The numbers 0 ... count - 1 once each, then -1 forever (which indexes the last episode)."""

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0

    @property
    def empty(self) -> bool:
        return self._next >= self._count

    def take(self, count: int) -> Tensor:
        index = torch.arange(self._next, self._next + count)
        self._next += count
        return torch.where(index < self._count, index, -1)

"""A list of episodes, each played once from its beginning to its end, on whatever environment is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_vla.protocols import VectorEnv
from rlinf_vla.rollout.player import Acts, Call, Spans, interleave, play
from rlinf_vla.types import Episodes


def play_listed(
    actor_of: Callable[[VectorEnv], Acts],
    groups: Sequence[VectorEnv],
    episodes: Episodes,
    on_call: Callable[[VectorEnv, Call, Tensor], None],
    spans: Spans,
) -> None:
    """``actor_of(env)`` acts in it, and ``on_call(env, call, index)`` sees every call.

    ``index`` int64 ``[B]``: the place in the list of what each environment plays, or -1 where the list had nothing left and the call
    is to be ignored.
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

        players.append(play(actor_of(env), env, episodes[index], following, report, spans, f"simulator {number}"))
    interleave(players)


class _Queue:
    """The numbers 0 ... count - 1 once each, then -1 for ever (which, as an index, is the last episode again)."""

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0

    @property
    def empty(self) -> bool:
        return self._next >= self._count

    def take(self, count: int) -> Tensor:
        index = torch.arange(self._next, self._next + count)
        self._next += count
        return torch.where(index < self._count, index, -1)

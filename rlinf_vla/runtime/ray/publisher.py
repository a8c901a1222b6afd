"""Publish versions of the trained weights to the rollout workers of a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlinf_vla.runtime.machines import broadcasts
from rlinf_vla.runtime.ray.broadcast import TIMEOUT_S, Held, Order, Received
from rlinf_vla.runtime.ray.pool import WEIGHTS, Pool
from rlinf_vla.runtime.workers.rollout import Member, Weights
from rlinf_vla.runtime.workers.shards import Packed


class _Sent(NamedTuple):
    """A broadcast that was started: what each receiver will answer."""

    receivers: dict[Member, Any]
    limit_s: float
    """Seconds after which it has failed."""


class Publisher:
    """Puts each version into the object store, and broadcasts it if ``cluster.weights`` says so.

    A broadcast is not waited for, and it never fails a run: a worker that did not get a version
    fetches it from the store. So the way of the weights does not change the result.
    """

    def __init__(self, pool: Pool, trainers: Any, split: bool = False, staleness: int = 0) -> None:
        """``pool``: rollout workers. ``trainers``: a ``Trainers``. ``split``: the workers hold the
        policy's head only. ``staleness``: number of earlier versions that they may still load."""
        self._pool = pool
        self._trainers = trainers
        self._split = split
        self._staleness = staleness
        self._generation = 0
        self._group: tuple[Member, ...] = ()
        """Receivers of the present generation; none after a failure."""
        self._sent: _Sent | None = None
        self._source: Any = None
        """The trainer's answer to the newest broadcast."""
        self._late: dict[Member, Any] = {}
        """Receiver that did not answer in time -> its answer, if it comes after all."""

    def publish(
        self, version: int, earlier: Packed | None = None
    ) -> tuple[Weights, dict[str, float]]:
        """Publish the trainer's weights, or ``earlier`` ones; return them and metrics.

        ``weights/broadcast_s``, ``overlap``, ``received`` and ``missed`` are of the broadcast
        before. Raises TrainerLost.
        """
        started = time.perf_counter()
        metrics = self._finished()
        members = self._members() if earlier is None else {}
        arguments = (earlier, version if members else None, self._split)
        ((held, everything, head), *_) = self._trainers.call("weights", *arguments, returns=3)
        if members:
            self._broadcast(version, held, members)
        weights = Weights(
            version, everything, head if self._split else everything, frozenset(members)
        )
        return weights, metrics | {
            "weights/bytes": float(held.nbytes),
            "weights/publish_s": time.perf_counter() - started,
        }

    def _members(self) -> dict[Member, Any]:
        """Return the workers to broadcast to, with their actors.

        Two ranks of NCCL cannot share a GPU, so none is on the trainer's.
        """
        import ray

        if not broadcasts(self._pool.cluster) or (
            self._source is not None and not ray.wait([self._source], timeout=0)[0]
        ):
            return {}
        source = self._trainers.worker_info
        members = {}
        for place, info in sorted(self._pool.introduced.items()):
            shared = info.gpus and (info.node, info.gpus) == (source.node, source.gpus)
            member = (info.node, info.pid)
            if not shared and (member not in self._late or _answer(self._late[member]) is not None):
                members[member] = self._pool.actors[place]
        return members

    def _broadcast(self, version: int, held: Held, members: dict[Member, Any]) -> None:
        if self._group != tuple(members):
            self._generation = self._generation + 1
            self._group = tuple(members)
        order = Order(held.address, self._generation, len(members) + 1, version)
        what = order, held.layout, version - self._staleness
        receivers = {
            member: actor.receive.options(concurrency_group=WEIGHTS).remote(rank, *what)
            for rank, (member, actor) in enumerate(members.items(), 1)
        }
        self._source = (
            self._trainers.actors[0].send.options(concurrency_group=WEIGHTS).remote(order)
        )
        self._sent = _Sent(receivers, order.limit_s(held.layout))

    def _finished(self) -> dict[str, float]:
        """Wait for the broadcast before, if it still runs; return its metrics."""
        import ray

        if self._sent is None:
            return {}
        (receivers, limit_s) = self._sent
        self._sent = None
        ray.wait([self._source], timeout=limit_s)
        ray.wait(list(receivers.values()), num_returns=len(receivers), timeout=2 * TIMEOUT_S)
        answers: dict[Member, Received | None] = {
            member: _answer(ref) for member, ref in receivers.items()
        }
        self._late = {
            member: ref for member, ref in (self._late | receivers).items() if _answer(ref) is None
        }
        arrived = [answer for answer in answers.values() if answer is not None and answer.arrived]
        if len(arrived) < len(receivers) or not _answer(self._source):
            self._group = ()
        return _metrics(arrived, len(receivers))


def _metrics(arrived: Sequence[Received], receivers: int) -> dict[str, float]:
    seconds = sum(result.seconds for result in arrived)
    return {
        "weights/broadcast_s": max((result.seconds for result in arrived), default=0.0),
        "weights/received": float(len(arrived)),
        "weights/missed": float(receivers - len(arrived)),
        "weights/overlap": sum(result.overlapped for result in arrived) / seconds
        if seconds
        else 0.0,
    }


def _answer(ref: Any) -> Any:
    """Return what a worker answered; None if it has not, or failed."""
    import ray
    from ray import exceptions

    try:
        return ray.get(ref, timeout=0)
    except exceptions.RayError:
        return None

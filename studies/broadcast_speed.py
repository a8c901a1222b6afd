"""Time a version of weights from a trainer to the rollout workers of this machine, on both ways.

    python studies/broadcast_speed.py

Prints medians of four versions, for some sizes and numbers of workers. On the CPU, a broadcast is
gloo over loopback, and the object store is shared memory (docs/cluster.md). Takes two minutes.
"""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import Any

import ray
import torch

from rlinf_vla.runtime.ray.broadcast import Held, Inbox, Order, Outbox, Received
from rlinf_vla.runtime.workers.base import node_address
from rlinf_vla.runtime.workers.shards import Packed

SIZES = ((1, 2), (16, 2), (128, 2), (128, 4))
"""(megabytes, workers)"""
VERSIONS = 5
"""The first forms the group and does not count."""


class Source:
    def __init__(self, megabytes: int) -> None:
        torch.set_num_threads(1)
        self.weights = {"weights": torch.randn(megabytes * 250_000)}
        self.outbox = Outbox("cpu", node_address())

    def pack(self) -> tuple[None, Packed]:
        return None, Packed.of(self.weights)

    def hold(self, version: int) -> Held:
        layout = self.outbox.hold(version, self.weights)
        return Held(layout=layout, address=self.outbox.address())

    def send(self, order: Order) -> bool:
        return self.outbox.send(order)


class Worker:
    def __init__(self, megabytes: int) -> None:
        torch.set_num_threads(1)
        self.weights = torch.zeros(megabytes * 250_000)
        self.inbox = Inbox("cpu", node_address())

    def receive(self, *arguments: Any) -> Received:
        return self.inbox.receive(*arguments)

    def load(self, version: int) -> None:
        arrived = self.inbox.take(version)
        assert arrived is not None
        self.weights.copy_(arrived["weights"])

    def fetch(self, stored: list[Any]) -> None:
        self.weights.copy_(ray.get(stored[0]).tensors()["weights"])


def main() -> None:
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    remote: Any = ray.remote
    for megabytes, count in SIZES:
        source = remote(num_cpus=1)(Source).remote(megabytes)
        workers = [remote(num_cpus=1)(Worker).remote(megabytes) for _ in range(count)]
        by_store, by_broadcast = [], []
        for version in range(VERSIONS):
            began = time.perf_counter()
            done, stored = source.pack.options(num_returns=2).remote()
            ray.get(done)
            ray.get([worker.fetch.remote([stored]) for worker in workers])
            by_store.append(time.perf_counter() - began)
            began = time.perf_counter()
            held = ray.get(source.hold.remote(version))
            order = Order(held.address, 1, count + 1, version)
            received = [
                worker.receive.remote(rank, order, held.layout, version)
                for rank, worker in enumerate(workers, 1)
            ]
            source.send.remote(order)
            assert all(result.arrived for result in ray.get(received))
            ray.get([worker.load.remote(version) for worker in workers])
            by_broadcast.append(time.perf_counter() - began)
        seconds = [median(times[1:]) for times in (by_store, by_broadcast)]
        print(
            f"{megabytes} MB to {count} workers: object store {seconds[0]:.3f} s, broadcast {seconds[1]:.3f} s",
            flush=True,
        )
        for actor in (source, *workers):
            ray.kill(actor)


if __name__ == "__main__":
    main()

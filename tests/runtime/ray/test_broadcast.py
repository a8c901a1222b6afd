"""A process group of a source and two receivers over gloo, without Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.runtime.ray.broadcast import (
    Inbox,
    Membership,
    Order,
    Outbox,
    Received,
    WeightsBuffer,
    layout_of,
)
from rlinf_vla.runtime.workers.shards import Packed
from tests.training.processes import forked

HOST = "127.0.0.1"
ENDS_S = 60.0
"""A test that waits this long has failed."""
WEIGHTS = {
    "adapter": torch.arange(40.0).reshape(5, 8),
    "head": torch.arange(30, dtype=torch.bfloat16).reshape(2, 3, 5),
    "scale": torch.tensor(0.5),
    "bias": torch.arange(7, dtype=torch.bfloat16),
    "steps": torch.arange(3),
    "none": torch.empty(0, 4),
}


@dataclass
class Receiver:
    process: Any
    pipe: Connection

    def start(self, rank: int, order: Order, layout: Any, oldest: int = 0) -> None:
        self.pipe.send((rank, order, layout, oldest))

    def answer(self) -> tuple[Received, dict[str, Tensor] | None]:
        assert self.pipe.poll(ENDS_S), "it hangs"
        received, taken = self.pipe.recv()
        return received, taken and taken.tensors()


def receive_until_told(pipe: Connection) -> None:
    torch.set_num_threads(1)
    inbox = Inbox("cpu", HOST)
    while (what := pipe.recv()) is not None:
        received = inbox.receive(*what)
        taken = inbox.take(what[1].version)
        pipe.send((received, taken and Packed.of(taken)))


@contextmanager
def receivers(count: int) -> Iterator[list[Receiver]]:
    context = multiprocessing.get_context("fork")
    found = []
    for _ in range(count):
        mine, its = context.Pipe()
        process = forked(receive_until_told, its)
        its.close()
        found.append(Receiver(process, mine))
    try:
        yield found
    finally:
        for each in found:
            each.process.kill()
            each.process.join()
            each.process.close()
            each.pipe.close()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return layout_of(found) == layout_of(expected) and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def order_of(
    outbox: Outbox, version: int, size: int = 3, generation: int = 1, timeout_s: float = ENDS_S
) -> Order:
    return Order(outbox.address(), generation, size, version, timeout_s)


def test_a_buffer_holds_several_dtypes_in_buckets() -> None:
    buffer = WeightsBuffer(layout_of(WEIGHTS), "cpu", bucket=64)
    buffer.fill(WEIGHTS)
    assert [(each.dtype, each.numel()) for each in buffer.buckets] == [
        *[(torch.float32, 16), (torch.float32, 16), (torch.float32, 9)],
        *[(torch.bfloat16, 32), (torch.bfloat16, 5), (torch.int64, 3)],
    ]
    assert same(buffer.tensors, WEIGHTS)
    assert WeightsBuffer({}, "cpu").buckets == []


def test_all_receivers_get_the_same_bytes_while_the_sources_weights_change() -> None:
    with receivers(2) as both:
        outbox = Outbox("cpu", HOST)
        for version in range(3):  # the second and third in the group of the first
            weights = {name: value + version for name, value in WEIGHTS.items()}
            layout = outbox.hold(version, weights)
            for value in weights.values():
                value.zero_()
            for rank, each in enumerate(both, 1):
                each.start(rank, order_of(outbox, version), layout)
            assert outbox.send(order_of(outbox, version))
            for each in both:
                received, taken = each.answer()
                assert (
                    received.arrived
                    and taken is not None
                    and same(taken, {name: value + version for name, value in WEIGHTS.items()})
                )


def test_only_the_version_that_is_held_is_sent() -> None:
    outbox = Outbox("cpu", HOST)
    outbox.hold(4, WEIGHTS)
    assert not outbox.send(order_of(outbox, 3))


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_a_member_lost_while_it_receives(how: signal.Signals) -> None:
    """The others return after the timeout; the next generation works without it."""
    count = 1 << 22  # more than the kernel takes for a process that does not read
    large = {"weights": torch.arange(float(count)), "steps": torch.arange(count)}
    with receivers(3) as (lost, first, third):
        outbox = Outbox("cpu", HOST)
        layout = layout_of(large)
        order = order_of(outbox, 0, size=4, timeout_s=10.0)  # it is also the time to meet
        for rank, each in enumerate((lost, first, third), 1):
            each.start(rank, order, layout)
        buffer = WeightsBuffer(layout, "cpu")
        buffer.fill(large)

        def buckets() -> Iterator[Tensor]:
            yield first_bucket
            os.kill(lost.process.pid, how)
            yield second_bucket

        first_bucket, second_bucket = buffer.buckets
        buffer.buckets = buckets()  # type: ignore[assignment]
        with pytest.raises(RuntimeError):
            Membership("cpu", HOST).broadcast(order, 0, buffer)
        for received, taken in (answers := [first.answer(), third.answer()]):
            assert received.arrived == (taken is not None) and (taken is None or same(taken, large))
        assert not all(received.arrived for received, _ in answers), (
            "the lost one was to pass it on"
        )

        outbox.hold(1, large)
        for rank, each in enumerate((first, third), 1):
            each.start(rank, order_of(outbox, 1, generation=2), layout)
        assert outbox.send(order_of(outbox, 1, generation=2))
        for each in (first, third):
            received, taken = each.answer()
            assert received.arrived and taken is not None and same(taken, large)


def test_a_member_that_never_comes() -> None:
    with receivers(1) as (only,):
        outbox = Outbox("cpu", HOST)
        layout = outbox.hold(0, WEIGHTS)
        order = order_of(outbox, 0, timeout_s=1.0)
        only.start(1, order, layout)
        assert not outbox.send(order)
        received, taken = only.answer()
        assert not received.arrived and taken is None


def test_an_inbox_waits_for_a_version_that_is_arriving() -> None:
    """From the order on; without one, it gives up after a while."""
    inbox, outbox = Inbox("cpu", HOST), Outbox("cpu", HOST)
    assert inbox.take(0, patience_s=0.01) is None
    layout = outbox.hold(0, WEIGHTS)
    order = order_of(outbox, 0, size=2)
    taken: list[Any] = []
    threads = [
        threading.Thread(target=lambda: taken.append(inbox.take(0, ENDS_S))),
        threading.Thread(target=inbox.receive, args=(1, order, layout, 0)),
    ]
    for thread in threads:
        thread.start()
    assert outbox.send(order)
    for thread in threads:
        thread.join(ENDS_S)
    assert torch.equal(taken[0]["adapter"], WEIGHTS["adapter"])
    assert inbox.take(0, ENDS_S) is None, "it is handed over once, and nobody waits for it again"


def test_versions_that_are_needed_no_more_are_dropped() -> None:
    inbox, outbox = Inbox("cpu", HOST), Outbox("cpu", HOST)
    for version, oldest in ((0, 0), (1, 0), (2, 1)):
        layout = outbox.hold(version, WEIGHTS)
        order = order_of(outbox, version, size=2)
        thread = threading.Thread(target=outbox.send, args=(order,))
        thread.start()
        assert inbox.receive(1, order, layout, oldest).arrived
        thread.join(ENDS_S)
    assert inbox.take(0, ENDS_S) is None
    assert inbox.take(1, ENDS_S) is not None and inbox.take(2, ENDS_S) is not None


def test_the_time_in_which_a_worker_worked_is_overlap() -> None:
    inbox, outbox = Inbox("cpu", HOST), Outbox("cpu", HOST)
    layout = outbox.hold(0, WEIGHTS)
    order = order_of(outbox, 0, size=2)
    found: list[Received] = []
    thread = threading.Thread(target=lambda: found.append(inbox.receive(1, order, layout, 0)))
    with inbox.busy.working():
        thread.start()
        outbox.send(order)
        thread.join(ENDS_S)
    assert found[0].seconds > 0 and found[0].overlapped == pytest.approx(found[0].seconds)
    before = inbox.busy.seconds(time.perf_counter())
    assert before > 0 and inbox.busy.seconds(time.perf_counter()) == before


class Streams:
    """Stands for those of CUDA: says which one is current, and which have ended their work."""

    def __init__(self) -> None:
        self.current: list[Any] = [None]
        self.waited: list[Any] = []

    def made(self) -> Any:
        return Stream(self)

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


class Stream:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def synchronize(self) -> None:
        self._streams.waited.append(self)


def test_what_a_gpu_receives_is_allocated_in_the_stream_that_fills_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams()
    allocated: list[Any] = []
    filled: list[Any] = []

    class Buffer(WeightsBuffer):
        def __init__(self, layout: Any, device: str) -> None:
            super().__init__(layout, "meta")
            if device == "cuda":
                allocated.append(streams.current[-1])

    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setattr(torch.cuda, "Stream", streams.made)
    monkeypatch.setattr(torch.cuda, "stream", streams.within)
    monkeypatch.setattr("rlinf_vla.runtime.ray.broadcast.WeightsBuffer", Buffer)
    monkeypatch.setattr(Membership, "broadcast", lambda *_: filled.append(streams.current[-1]))
    inbox = Inbox("cuda", HOST)
    order = Order((HOST, 1), generation=1, size=2, version=3)
    assert inbox.receive(1, order, layout_of(WEIGHTS), oldest=0).arrived
    assert allocated == filled == streams.waited and allocated[0] is not None
    taken = inbox.take(3)
    assert taken is not None and taken.keys() == WEIGHTS.keys()

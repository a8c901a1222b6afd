"""When requests are joined, refused and dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vla.core.types import Episodes, Observation
from rlinf_vla.features.serving.batcher import Batcher, Busy
from rlinf_vla.features.serving.observations import Request
from rlinf_vla.features.serving.service import Answer, Outcome


def request(number: int, rows: int = 1, alone: bool = False) -> Request:
    zeros = torch.zeros(rows, dtype=torch.int64)
    episodes = Episodes(zeros, zeros + number, zeros)
    return Request(
        Observation({}, torch.zeros(rows, 0), [""] * rows), episodes, zeros, 0.0, 0, alone=alone
    )


class Policy:
    """Answers with the number of each request; waits in a call while ``gate`` is closed."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.gate.set()

    def __call__(self, requests: Sequence[Request]) -> list[Outcome]:
        numbers = [int(each.episodes.seed[0]) for each in requests]
        self.calls.append(numbers)
        self.begun.set()
        assert self.gate.wait(60)
        if 666 in numbers:
            raise RuntimeError("the service is broken")
        return [
            ValueError(f"odd {number}")
            if number % 2
            else Answer(np.full((1, 1), number, np.float32), 0.0)
            for number in numbers
        ]


class Bench:
    def __init__(
        self, clients: int = 8, most_rows: int = 4, max_wait: float = 0.05, max_queue: int = 6
    ) -> None:
        self.policy = Policy()
        self.thread = ThreadPoolExecutor(1)
        self.batcher = Batcher(
            self.policy, self.thread, most_rows, max_wait, max_queue, lambda: clients
        )

    async def __aenter__(self) -> Bench:
        self.calls = asyncio.create_task(self.batcher.run())
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.policy.gate.set()
        self.calls.cancel()
        await asyncio.wait([self.calls])
        self.thread.shutdown()

    async def ask(self, *requests: Request) -> list[Any]:
        return await asyncio.gather(*map(self.batcher.ask, requests), return_exceptions=True)

    async def block(self) -> asyncio.Task[Answer]:
        """Begin a call that does not end before the gate opens."""
        self.policy.gate.clear()
        first = asyncio.create_task(self.batcher.ask(request(0, alone=True)))
        while not self.policy.begun.is_set():
            await asyncio.sleep(0.001)
        return first


def test_requests_are_joined_up_to_the_most_rows() -> None:
    async def body() -> None:
        async with Bench() as bench:
            found = await bench.ask(*(request(2 * number) for number in range(6)))
            assert [int(each.actions[0, 0]) for each in found] == [0, 2, 4, 6, 8, 10]
            assert bench.policy.calls == [[0, 2, 4, 6], [8, 10]]

    asyncio.run(body())


def test_a_single_client_never_waits() -> None:
    async def body() -> None:
        async with Bench(clients=1, max_wait=1e6) as bench:
            await bench.ask(request(0))
            assert bench.policy.calls == [[0]]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_the_wait_for_other_clients_ends() -> None:
    async def body() -> None:
        async with Bench(clients=2, max_wait=0.01) as bench:
            await bench.ask(request(0))
            assert bench.policy.calls == [[0]]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_others_that_come_in_time_join() -> None:
    async def body() -> None:
        async with Bench(clients=2, max_wait=1e6) as bench:
            first = asyncio.create_task(bench.batcher.ask(request(0)))
            await asyncio.sleep(0.01)
            await bench.ask(request(2))
            await first
            assert bench.policy.calls == [[0, 2]]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_request_that_is_alone_is_not_joined() -> None:
    async def body() -> None:
        async with Bench() as bench:
            await bench.ask(request(0), request(2, alone=True), request(4), request(6, rows=3))
            assert bench.policy.calls == [[0, 4], [2], [6]]

    asyncio.run(body())


def test_an_error_reaches_its_client_alone() -> None:
    async def body() -> None:
        async with Bench() as bench:
            good, bad = await bench.ask(request(0), request(1))
            assert isinstance(good, Answer) and str(bad) == "odd 1"
            (broken,) = await bench.ask(request(666))
            assert str(broken) == "the service is broken"
            assert isinstance((await bench.ask(request(2)))[0], Answer), "the next call is made"

    asyncio.run(body())


def test_a_full_queue_refuses() -> None:
    async def body() -> None:
        async with Bench(max_queue=2) as bench:
            first = await bench.block()
            waiting = [asyncio.create_task(bench.batcher.ask(request(number))) for number in (2, 4)]
            await asyncio.sleep(0)
            with pytest.raises(Busy, match="2 requests"):
                await bench.batcher.ask(request(6))
            bench.policy.gate.set()
            await asyncio.gather(first, *waiting)
            assert bench.policy.calls == [[0], [2, 4]]

    asyncio.run(body())


def test_clients_take_turns() -> None:
    """One that asks much delays another by no more than a call of its own."""

    async def body() -> None:
        async with Bench(most_rows=1, max_queue=9) as bench:
            first = await bench.block()
            greedy = [
                asyncio.create_task(bench.batcher.ask(request(number), "greedy"))
                for number in (2, 4, 6, 8)
            ]
            await asyncio.sleep(0)
            modest = [
                asyncio.create_task(bench.batcher.ask(request(number), "modest"))
                for number in (10, 12)
            ]
            await asyncio.sleep(0)
            bench.policy.gate.set()
            await asyncio.gather(first, *greedy, *modest)
            assert bench.policy.calls == [[0], [2], [10], [4], [12], [6], [8]]

    asyncio.run(body())


def test_of_clients_the_one_that_was_not_served_for_longer_is_next() -> None:
    async def body() -> None:
        async with Bench(most_rows=1) as bench:
            await bench.batcher.ask(request(2), "greedy")
            first = await bench.block()
            both = [
                asyncio.create_task(bench.batcher.ask(request(number), client))
                for number, client in ((4, "greedy"), (6, "modest"))
            ]
            await asyncio.sleep(0)
            bench.policy.gate.set()
            await asyncio.gather(first, *both)
            assert bench.policy.calls == [[2], [0], [6], [4]]

    asyncio.run(body())


def test_a_full_queue_refuses_those_of_whom_most_wait() -> None:
    async def body() -> None:
        async with Bench(max_queue=3) as bench:
            first = await bench.block()
            greedy = [
                asyncio.create_task(bench.batcher.ask(request(number), "greedy"))
                for number in (2, 4, 6)
            ]
            await asyncio.sleep(0)
            modest = asyncio.create_task(bench.batcher.ask(request(8), "modest"))
            await asyncio.sleep(0)
            with pytest.raises(Busy, match="3 requests"):
                await greedy[2]
            for client in ("greedy", "modest"):  # one of each waits, and one more
                with pytest.raises(Busy, match="3 requests"):
                    await bench.batcher.ask(request(10), client)
            bench.policy.gate.set()
            await asyncio.gather(first, modest, *greedy[:2])
            assert bench.policy.calls == [[0], [2, 8, 4]]

    asyncio.run(body())


def test_a_client_that_left_is_dropped_from_the_queue() -> None:
    async def body() -> None:
        async with Bench() as bench:
            first = await bench.block()
            left, stays = (
                asyncio.create_task(bench.batcher.ask(request(number))) for number in (2, 4)
            )
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.sleep(0)
            assert len(bench.batcher) == 1
            bench.policy.gate.set()
            await asyncio.gather(first, stays)
            assert bench.policy.calls == [[0], [4]]

    asyncio.run(body())


def test_a_client_that_leaves_during_its_call_harms_nobody() -> None:
    async def body() -> None:
        async with Bench() as bench:
            first = await bench.block()
            first.cancel()
            await asyncio.sleep(0)
            bench.policy.gate.set()
            assert isinstance((await bench.ask(request(2)))[0], Answer)

    asyncio.run(body())

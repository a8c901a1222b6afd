"""Discrete events: tasks that wait for others and then share what they run on, as cores, a GPU or a network link are shared."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_TOLERANCE = 1e-12


class Task(NamedTuple):
    """``work`` in seconds of one unit of ``resource`` (a core, a GPU, a link), of which it uses ``width`` at a time where it can.

    resource: "" for nothing that is shared; then ``work`` is the time that it takes.
    after: numbers of the tasks that it waits for, all smaller than its own.
    """

    name: str
    track: str
    resource: str
    work: float
    width: float = 1.0
    after: tuple[int, ...] = ()
    iteration: int = 0
    items: float = 0.0
    """What it processes, for the books."""


@dataclass(frozen=True)
class Resource:
    """``capacity`` units. ``slowdown(busy)``: by what factor each unit is slower while so many of them work."""

    capacity: float = 1.0
    slowdown: Callable[[float], float] = lambda busy: 1.0


@dataclass
class Played:
    """When each task began and ended; what each resource did. cause: the task that each one waited for longest, -1 for none."""

    start: list[float]
    end: list[float]
    cause: list[int]
    busy: dict[str, float] = field(default_factory=dict)
    """Unit-seconds, so that it is never more than capacity times the end."""
    done: dict[str, float] = field(default_factory=dict)
    """Work."""


class _Shared:
    """Tasks that run on one resource; all at the same share of their widths, so that one clock of progress serves them all."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.now = self.progress = self.width = 0.0
        self.busy = self.done = 0.0
        self.running: list[tuple[float, int, float]] = []
        """Heap of (progress at its end, task, width)."""

    @property
    def speed(self) -> float:
        capacity = self.resource.capacity
        return min(1.0, capacity / self.width) / self.resource.slowdown(min(self.width, capacity))

    def advance(self, now: float) -> None:
        if self.running:
            passed = now - self.now
            self.progress += passed * self.speed
            self.busy += passed * min(self.width, self.resource.capacity)
            self.done += passed * self.speed * self.width
        self.now = now

    def begin(self, number: int, work: float, width: float) -> None:
        heapq.heappush(self.running, (self.progress + work / width, number, width))
        self.width += width

    def next_end(self) -> float:
        return self.now + max(0.0, self.running[0][0] - self.progress) / self.speed

    def finish(self) -> int:
        self.progress, number, width = heapq.heappop(self.running)
        self.width = self.width - width if self.running else 0.0
        if not self.running:
            self.progress = 0.0
        return number


def play(tasks: Sequence[Task], resources: Mapping[str, Resource]) -> Played:
    """Every task begins as soon as those that it waits for have ended."""
    waits = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for earlier in task.after:
            followers[earlier].append(number)
    shared = {name: _Shared(resource) for name, resource in resources.items()}
    played = Played([0.0] * len(tasks), [0.0] * len(tasks), [-1] * len(tasks))
    events: list[tuple[float, int, str, int]] = []  # (time, age, resource, task); one that its resource has outdated is skipped
    newest: dict[str, int] = {}
    age = 0

    def plan_next(name: str) -> None:
        nonlocal age
        age += 1
        newest[name] = age
        if shared[name].running:
            heapq.heappush(events, (shared[name].next_end(), age, name, -1))

    def begin(number: int, now: float) -> None:
        nonlocal age
        task = tasks[number]
        played.start[number] = now
        if task.resource and task.work > _TOLERANCE:
            shared[task.resource].advance(now)
            shared[task.resource].begin(number, task.work, task.width)
            plan_next(task.resource)
        else:
            age += 1
            heapq.heappush(events, (now + task.work, age, "", number))

    def end(number: int, now: float) -> None:
        played.end[number] = now
        for follower in followers[number]:
            waits[follower] -= 1
            played.cause[follower] = number  # the last to end is the last to say so
            if not waits[follower]:
                begin(follower, now)

    for number, count in enumerate(waits):
        if not count:
            begin(number, 0.0)
    while events:
        now, stamp, name, number = heapq.heappop(events)
        if name:
            if newest[name] != stamp:
                continue
            shared[name].advance(now)
            number = shared[name].finish()
            plan_next(name)
        end(number, now)
    played.busy = {name: each.busy for name, each in shared.items()}
    played.done = {name: each.done for name, each in shared.items()}
    return played

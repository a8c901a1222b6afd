"""Discrete-event simulation of tasks that wait for others and share cores, GPUs and links."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_TOLERANCE = 1e-12


class Task(NamedTuple):
    """A task that needs ``work`` seconds of one unit of ``resource`` (a core, a GPU, a link).

    resource: "" if the task shares no resource; ``work`` is then its duration.
    width: units that the task uses at once if they are free.
    after: indices of the tasks that it waits for, all smaller than its own.
    """

    name: str
    track: str
    resource: str
    work: float
    width: float = 1.0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Resource:
    """``capacity`` units. ``slowdown(busy)``: factor of slowdown while ``busy`` units work."""

    capacity: float = 1.0
    slowdown: Callable[[float], float] = lambda busy: 1.0


@dataclass
class TaskTimes:
    """Start and end of each task and use of each resource, by name.

    cause: index of the task that each task waited for longest, -1 for none.
    """

    start: list[float]
    end: list[float]
    cause: list[int]
    busy: dict[str, float] = field(default_factory=dict)
    """Unit-seconds in use, at most the capacity times the end."""


class _Shared:
    """Tasks that run on one resource.

    All run at the same share of their widths, so that one progress clock serves them all.
    """

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.now = self.progress = self.width = self.busy = 0.0
        self.running: list[tuple[float, int, float]] = []
        """Heap of (progress at the task's end, task, width)."""

    @property
    def speed(self) -> float:
        capacity = self.resource.capacity
        return min(1.0, capacity / self.width) / self.resource.slowdown(min(self.width, capacity))

    def advance(self, now: float) -> None:
        if self.running:
            passed = now - self.now
            self.progress += passed * self.speed
            self.busy += passed * min(self.width, self.resource.capacity)
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


def run_events(tasks: Sequence[Task], resources: Mapping[str, Resource]) -> TaskTimes:
    """Run each task as soon as those that it waits for have ended; return all times."""
    waits = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for earlier in task.after:
            followers[earlier].append(number)
    shared = {name: _Shared(resource) for name, resource in resources.items()}
    times = TaskTimes([0.0] * len(tasks), [0.0] * len(tasks), [-1] * len(tasks))
    events: list[
        tuple[float, int, str, int]
    ] = []  # (time, age, resource, task); a resource's outdated events are skipped
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
        times.start[number] = now
        if task.resource and task.work > _TOLERANCE:
            shared[task.resource].advance(now)
            shared[task.resource].begin(number, task.work, task.width)
            plan_next(task.resource)
        else:
            age += 1
            heapq.heappush(events, (now + task.work, age, "", number))

    def end(number: int, now: float) -> None:
        times.end[number] = now
        for follower in followers[number]:
            waits[follower] -= 1
            times.cause[follower] = number  # the last one to end overwrites the others
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
    times.busy = {name: resource.busy for name, resource in shared.items()}
    return times

"""A control loop on a virtual clock, and a short reference simulation of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlinf_vla.benchmarks.synthetic_cell import SyntheticCamera, SyntheticRobot
from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.features.realworld.control_loop import ControlLoop, Ended, Step
from rlinf_vla.features.realworld.inference import Chunk, Request
from tests.features.realworld.virtual_time import ScheduledInference, VirtualClock

MS = 1 / 1024
"""Nearly a millisecond, and exact in binary: sums of them have no rounding errors."""
HZ = 1 / (100 * MS)
"""Nearly 10 Hz: a control period of 100 MS."""

Done = tuple[str, int | None, int | None]
"""The source of a step; for the policy, the tick of its observation and the action's index in the chunk."""


@dataclass
class Cell:
    """Inferences last as long as ``delays``, in turn (milliseconds of MS); the last delay applies to all later ones."""

    delays: Sequence[float]
    chunk: int = 1
    config: ControlConfig = field(default_factory=lambda: ControlConfig(warmup=0))
    cost: float = 0.0
    hz: float = HZ

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.robot = SyntheticRobot(self.clock, self.hz, self.cost)
        self.camera = SyntheticCamera(self.clock, "base", (4, 4), self.cost)
        self.asked: list[Request] = []
        self.steps: list[Step] = []
        self.background = ScheduledInference(
            lambda request: self.infer(request), self.clock, self.duration
        )
        self.loop = ControlLoop(
            self.robot,
            [self.camera],
            self.background,
            self.chunk,
            self.config,
            self.clock,
            lambda: self.human(),
        )
        self.human: Callable[[], np.ndarray | None] = lambda: None

    def duration(self, request: Request) -> float:
        self.asked.append(request)
        return self.delays[min(len(self.asked), len(self.delays)) - 1] * MS

    def infer(self, request: Request) -> Chunk:
        """Each action encodes its origin: 0.001 times the observation, 0.001 times its index."""
        actions = np.zeros((self.chunk, 4), np.float32)
        actions[:, 0] = 0.001 * request.seen.number
        actions[:, 1] = 0.001 * np.arange(self.chunk)
        return Chunk(request, actions, {"act": 0.5})

    def run(self, ticks: int, each: Callable[[Step], str | None] = lambda step: None) -> Ended:
        def after(step: Step) -> str | None:
            self.steps.append(step)
            return each(step) or ("enough" if step.tick + 1 >= ticks else None)

        return self.loop.run("touch the cube", after)

    @property
    def done(self) -> list[Done]:
        return [
            (
                step.by,
                step.chosen and step.chosen.chunk.request.tick,
                step.chosen and step.chosen.position,
            )
            for step in self.steps
        ]

    @property
    def by(self) -> str:
        """One letter per step: policy, human, held, starting."""
        return "".join(step.by[0] for step in self.steps)


def expected(
    delays: Sequence[int],
    ticks: int,
    chunk: int,
    asynchronous: bool,
    horizon: int,
    max_age: int,
    reserve: int = 10,
) -> list[Done]:
    """``Cell.done`` if sensors and commands take no time and misses stop nothing: simulated in steps of a millisecond."""
    period = 100
    executed = 0
    asked = 0
    queued = -1000
    last_seen = -1
    running: tuple[int, int, int] | None = None  # (observed at, executed then, done at)
    waiting: tuple[int, int] | None = None
    arrived: list[tuple[int, int]] = []
    current: tuple[int, int] | None = None
    done: list[Done] = []

    def settle(now: int) -> None:
        """Inferences that end by now, and those that start then."""
        nonlocal running, waiting, asked
        while True:
            if running is None and waiting is not None:
                begin = now if not ended else max(ended[-1], waiting[0])
                running = (*waiting, begin + delays[min(asked, len(delays) - 1)])
                waiting = None
                asked += 1
            if running is None or running[2] > now:
                return
            arrived.append(running[:2])
            ended.append(running[2])
            running = None

    def take(now: int) -> bool:
        nonlocal current, last_seen
        found = False
        while arrived:
            seen, step = arrived.pop(0)
            if seen > last_seen and now - seen <= max_age and executed - step < chunk:
                current = (seen, step)
                last_seen = seen
                found = True
        return found

    def valid(now: int) -> bool:
        return current is not None and executed - current[1] < chunk and now - current[0] <= max_age

    ended: list[int] = []
    for tick in range(ticks):
        now = tick * period
        settle(now)
        take(now)
        hopeless = running is None or now - running[0] > max_age
        if waiting is not None or executed - queued >= horizon or (hopeless and not valid(now)):
            waiting = (now, executed)
            queued = executed
            if running is None:
                ended.clear()
                running = (*waiting, now + delays[min(asked, len(delays) - 1)])
                waiting = None
                asked += 1
        if not asynchronous:
            while now < tick * period + period - reserve and (running or waiting or arrived):
                settle(now)
                if take(now):
                    break
                now += 1
            else:
                settle(now)
                take(now)
        if current is not None and valid(now):
            done.append(("policy", current[0] // period, executed - current[1]))
            executed += 1
        else:
            done.append(("held" if executed or now > max_age else "starting", None, None))
    return done

"""``rlinf-vla bench control recipe=NAME``: the recipe's policy drives a made-up robot in real time, by our loop and by the usual one, which
sleeps for what is left of each period; and how long an inference may take at each rate.

Robot and cameras take a stated time, and every so many inferences stall. Nothing is simulated, and nothing moves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rlinf_vla import recipe as recipes
from rlinf_vla.atomic import write_json
from rlinf_vla.commands import session
from rlinf_vla.protocols import Policy
from rlinf_vla.recipe import Recipe
from rlinf_vla.rollout.accounting import Accounting
from rlinf_vla.rollout.background import Threaded
from rlinf_vla.rollout.chunks import Chunk, Request
from rlinf_vla.rollout.clock import MonotonicClock
from rlinf_vla.rollout.control_actor import ControlActor, require_fit
from rlinf_vla.rollout.control_config import inference_budget, timing
from rlinf_vla.rollout.control_loop import ControlLoop
from rlinf_vla.rollout.sensing import Sensors
from rlinf_vla.rollout.synthetic import INSTRUCTION
from rlinf_vla.rollout.synthetic_cell import SyntheticCamera, SyntheticRobot
from rlinf_vla.rollout.tool_target import TrackedTarget
from rlinf_vla.telemetry.control_panel import control_table
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.training import run_directory
from rlinf_vla.training.lora import acting

RATES = (10.0, 20.0, 50.0)
TURNS, SECONDS = 2, 2.0
"""Both loops run so often at each rate, in turns, for so many seconds."""
ROBOT_S, CAMERA_S = 0.0003, 0.002
"""What it takes to observe or to command the robot, and to look at one camera."""
STALL_EVERY, STALL_PERIODS = 20, 1.5
"""Every so many inferences, one takes so many control periods longer."""


@dataclass(frozen=True)
class Kept:
    """How well a loop kept its rate. steps, commands: of those due. jitter: of the time between two observations, from one period.
    behind_ms: how much later than it should the loop began its last step."""

    loop: str
    control_hz: float
    steps: float
    commands: float
    jitter_p50_ms: float
    jitter_p99_ms: float
    behind_ms: float


class Stalling:
    """An actor that stalls now and then."""

    def __init__(self, actor: ControlActor, seconds: float) -> None:
        self._actor, self._seconds, self._count = actor, seconds, 0

    def __call__(self, request: Request) -> Chunk:
        self._count += 1
        if self._count % STALL_EVERY == 0:
            time.sleep(self._seconds)
        return self._actor(request)


def run(config: DictConfig) -> None:
    recipe = recipes.read(config)
    policy = session.build_policy(recipe)
    require_fit(policy, policy.spec.images, recipe.control)
    for hz in RATES:
        timing(recipe.control, hz, policy.spec.chunk)
    console = Console(highlight=False)
    settings = session.actor_settings(recipe, 0.0)
    kept: list[Kept] = []
    budgets: list[dict[str, float]] = []
    documents: dict[str, Any] = {}
    with session.threads(recipe.cluster.rollout_threads), acting(policy, settings.rounded), console.status("starting") as status:
        actor = ControlActor(policy, settings, MonotonicClock())
        for hz in RATES:
            status.update(f"{hz:g} Hz")
            ours, plain, account = _measure(recipe, policy, actor, hz)
            kept += [ours, plain]
            documents[f"{hz:g}"] = account.document()
            budgets.append(budget(recipe, policy, hz, documents[f"{hz:g}"]))
    _show(console, recipe, kept, budgets)
    console.print(control_table(documents[f"{RATES[0]:g}"]))
    ratios = {f"{a.control_hz:g} Hz": _ratios(a, b) for a, b in zip(kept[::2], kept[1::2], strict=True)}
    for name, ratio in ratios.items():
        console.print(f"{name}: sleep loop / ours = " + ", ".join(f"{value:.1f} ({what})" for what, value in ratio.items()))
    document: dict[str, Any] = {
        "loops": [asdict(each) for each in kept],
        "sleep_over_ours": ratios,
        "budgets": budgets,
        "control": documents,
    }
    document |= {"robot_s": ROBOT_S, "camera_s": CAMERA_S, "stall_every": STALL_EVERY, "stall_periods": STALL_PERIODS}
    document |= {"model": recipe.model.name, "chunk": policy.spec.chunk, "environment": fingerprint()}
    path = run_directory.for_evaluation(config, None) / "bench_control.json"
    write_json(path, document)
    console.print(f"numbers: {session.relative(path)}")


def _measure(recipe: Recipe, policy: Policy, actor: ControlActor, hz: float) -> tuple[Kept, Kept, Accounting]:
    clock = MonotonicClock()
    background = Threaded(Stalling(actor, STALL_PERIODS / hz), clock)
    robot = SyntheticRobot(clock, hz, ROBOT_S)
    cameras = [SyntheticCamera(clock, name, size, CAMERA_S) for name, size in policy.spec.images.items()]
    counted = replace(recipe.control, max_misses=sys.maxsize)  # how many there are is what is asked
    loop = ControlLoop(robot, cameras, background, policy.spec.chunk, counted, clock)
    sensors, inline = Sensors(robot, cameras, clock), Stalling(actor, STALL_PERIODS / hz)
    loop.warm_up(INSTRUCTION)
    ticks = round(SECONDS * hz)
    ours, plain = _Times(), _Times()
    for _ in range(TURNS):
        with ours.of(robot):
            loop.run(INSTRUCTION, lambda step: "enough" if step.tick + 1 >= ticks else None)
        background.settle(clock.now() + SECONDS)
        with plain.of(robot):
            sleep_loop(robot, sensors, inline, ticks)
    background.close()
    return ours.kept("ours", hz), plain.kept("sleep", hz), loop.accounting


def sleep_loop(robot: SyntheticRobot, sensors: Sensors, infer: Stalling, ticks: int) -> None:
    """As loops that drive robots are usually written: whatever a period takes too long is forgotten, and the next begins then."""
    target, period = TrackedTarget(robot.spec), 1 / robot.spec.control_hz
    end, left = time.monotonic() + ticks * period, np.zeros((0, 7), np.float32)
    while (began := time.monotonic()) < end:
        seen = sensors.read(lambda *_: None, lambda *_: None)
        if not len(left):
            left = infer(Request(seen, INSTRUCTION, 0, 0)).actions
        robot.command(target.move(left[0], seen.state.pose), began + 2 * period)
        left = left[1:]
        time.sleep(max(0.0, period - (time.monotonic() - began)))


class _Times:
    """When a robot was observed in each run, and how often it was commanded."""

    def __init__(self) -> None:
        self.runs: list[list[float]] = []
        self.commands = 0

    @contextmanager
    def of(self, robot: SyntheticRobot) -> Iterator[None]:
        robot.observed.clear()
        robot.commands.clear()
        yield
        self.runs.append(list(robot.observed))
        self.commands += len(robot.commands)

    def kept(self, loop: str, hz: float) -> Kept:
        due = TURNS * SECONDS * hz
        jitter = 1e3 * np.abs(np.concatenate([np.diff(times) for times in self.runs]) - 1 / hz)
        p50, p99 = (float(np.quantile(jitter, share)) for share in (0.5, 0.99))
        behind = max(times[-1] - times[0] - (len(times) - 1) / hz for times in self.runs)
        return Kept(loop, hz, sum(map(len, self.runs)) / due, self.commands / due, p50, p99, 1e3 * behind)


def budget(recipe: Recipe, policy: Policy, hz: float, document: dict[str, Any]) -> dict[str, float]:
    """Milliseconds: the period, what sensors and commands take of it (p99), what that leaves for an inference, and what one took."""
    sections, goes_by = document["sections_ms"], timing(recipe.control, hz, policy.spec.chunk)
    overhead = sum(sections[name]["p99"] for name in ("lateness", "observe", "camera", "command"))
    inference = {each: sum(sections[name][each] for name in ("prepare", "encode", "act") if name in sections) for each in ("p50", "p99")}
    left = 1e3 * inference_budget(goes_by, policy.spec.chunk) - overhead
    return {"control_hz": hz, "period": 1e3 / hz, "overhead": overhead, "left": left, **inference}


def _ratios(ours: Kept, plain: Kept) -> dict[str, float]:
    """More than 1: ours is better."""
    return {
        "jitter p50": plain.jitter_p50_ms / ours.jitter_p50_ms,
        "jitter p99": plain.jitter_p99_ms / ours.jitter_p99_ms,
        "steps, ours over sleep loop's": ours.steps / plain.steps,
    }


def _show(console: Console, recipe: Recipe, kept: list[Kept], budgets: list[dict[str, float]]) -> None:
    stalls = f"every {STALL_EVERY}th inference stalls for {STALL_PERIODS:g} periods"
    columns = ("Hz", "loop", "steps / due", "commands / due", "jitter p50 ms", "p99 ms", "behind ms")
    table = Table(*columns, title=f"{recipe.model.name}: {stalls}")
    for each in kept:
        numbers = (each.jitter_p50_ms, each.jitter_p99_ms, each.behind_ms)
        table.add_row(
            f"{each.control_hz:g}", each.loop, f"{each.steps:.3f}", f"{each.commands:.3f}", *(f"{number:.2f}" for number in numbers)
        )
    console.print(table)
    table = Table("Hz", "period", "sensors, commands", "left for inference", "it took p50", "p99", "", title="Budget (ms), without stalls")
    for row in budgets:
        cells = [f"{row[name]:.1f}" for name in ("period", "overhead", "left", "p50", "p99")]
        table.add_row(f"{row['control_hz']:g}", *cells, "fits" if row["p99"] < row["left"] else "too slow")
    console.print(table)

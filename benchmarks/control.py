"""Benchmark the control loop on a synthetic robot against a loop that sleeps between steps.

``rlinf-vla bench control recipe=NAME`` drives the robot with the recipe's policy in real time, by
both loops, and reports the time budget of an inference at each rate. Robot and cameras take a fixed
time and some inferences stall. Then the policy acts from a server over slow links
(``served_control``). Nothing is simulated and nothing moves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rlinf_vla.benchmarks import harness, served_control
from rlinf_vla.benchmarks.synthetic_cell import SPACE, SyntheticCamera, SyntheticRobot
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.config.robot import inference_budget, timing
from rlinf_vla.core.devices import threads
from rlinf_vla.core.protocols import Policy
from rlinf_vla.features.planner.synthetic import INSTRUCTION
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_actor import ControlActor, require_fit
from rlinf_vla.features.realworld.control_loop import ControlLoop
from rlinf_vla.features.realworld.inference import Chunk, InferenceWorker, Request
from rlinf_vla.features.realworld.loop_statistics import LoopStatistics
from rlinf_vla.features.realworld.sensing import Sensors
from rlinf_vla.features.realworld.tool_target import tracked_target
from rlinf_vla.features.serving import command
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.telemetry.control_timing import control_table
from rlinf_vla.training.lora import acting

RATES = (10.0, 20.0, 50.0)
TURNS = 2
SECONDS = 2.0
"""Turns of each loop at each rate, and seconds per turn. The two loops alternate."""
ROBOT_S, CAMERA_S = 0.0003, 0.002
"""Seconds to observe or to command the robot, and to read one camera."""
STALL_EVERY = 20
STALL_PERIODS = 1.5
"""One in ``STALL_EVERY`` inferences takes ``STALL_PERIODS`` control periods longer."""


@dataclass(frozen=True)
class LoopTiming:
    """Timing of one loop at one rate.

    ``steps``, ``commands``: done, as a share of those due. ``jitter``: deviation of the time
    between two observations from one period. ``behind_ms``: largest delay of a turn's last step.
    """

    loop: str
    control_hz: float
    steps: float
    commands: float
    jitter_p50_ms: float
    jitter_p99_ms: float
    behind_ms: float


class Stalling:
    """Wrap an actor so that every ``STALL_EVERY``-th call takes ``seconds`` longer."""

    def __init__(self, actor: ControlActor, seconds: float) -> None:
        self._actor = actor
        self._seconds = seconds
        self._count = 0

    def __call__(self, request: Request) -> Chunk:
        self._count += 1
        if self._count % STALL_EVERY == 0:
            time.sleep(self._seconds)
        return self._actor(request)


def run(config: DictConfig) -> None:
    """Run both loops at each rate in ``RATES``, print tables and write bench_control.json."""
    recipe = recipes.read(config)
    policy = builders.build_policy(recipe)
    require_fit(policy, SPACE, policy.spec.images, recipe.control)
    for hz in RATES:
        timing(recipe.control, hz, policy.spec.chunk)
    report = harness.Report(config, "bench_control")
    console = report.console
    settings = builders.actor_settings(recipe, 0.0)
    timings: list[LoopTiming] = []
    budgets: list[dict[str, float]] = []
    documents: dict[str, Any] = {}
    with (
        threads(recipe.cluster.rollout_threads),
        acting(policy, settings.rounded),
        console.status("starting") as status,
    ):
        actor = ControlActor(policy, settings, Clock())
        for hz in RATES:
            status.update(f"{hz:g} Hz")
            ours, plain, account = _measure(recipe, policy, actor, hz)
            timings += [ours, plain]
            documents[f"{hz:g}"] = account.document()
            budgets.append(budget(recipe, policy, hz, documents[f"{hz:g}"]))
    _show(report, recipe, timings, budgets)
    console.print(control_table(documents[f"{RATES[0]:g}"]))
    ratios = {
        f"{a.control_hz:g} Hz": _ratios(a, b)
        for a, b in zip(timings[::2], timings[1::2], strict=True)
    }
    for name, ratio in ratios.items():
        console.print(
            f"{name}: sleep loop / ours = "
            + ", ".join(f"{value:.1f} ({what})" for what, value in ratio.items())
        )
    document: dict[str, Any] = {
        "loops": [asdict(loop) for loop in timings],
        "sleep_over_ours": ratios,
        "budgets": budgets,
        "control": documents,
    }
    document |= {
        "robot_s": ROBOT_S,
        "camera_s": CAMERA_S,
        "stall_every": STALL_EVERY,
        "stall_periods": STALL_PERIODS,
    }
    document |= {"model": recipe.model.name, "chunk": policy.spec.chunk}
    if absent := without_server(recipe):
        console.print(f"not measured with the policy on a server: {absent}")
    else:
        with console.status("the policy on a server"):
            document["served"] = served_control.measure(config, recipe, policy, (ROBOT_S, CAMERA_S))
        served_control.show(report, document["served"])
    report.write(document)


def without_server(recipe: Recipe) -> str | None:
    """Return why the policy cannot be served here, or None."""
    if recipe.model.name == served_control.REMOTE:
        return "model=remote is on one already"
    missing = [name for name in command.PACKAGES if find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def _measure(
    recipe: Recipe, policy: Policy, actor: ControlActor, hz: float
) -> tuple[LoopTiming, LoopTiming, LoopStatistics]:
    clock = Clock()
    background = InferenceWorker(Stalling(actor, STALL_PERIODS / hz), clock)
    robot = SyntheticRobot(clock, hz, ROBOT_S)
    cameras = [
        SyntheticCamera(clock, name, size, CAMERA_S) for name, size in policy.spec.images.items()
    ]
    counted = replace(
        recipe.control, max_misses=sys.maxsize
    )  # misses are counted here and must not stop the robot
    loop = ControlLoop(robot, cameras, background, policy.spec.chunk, counted, clock)
    sensors = Sensors(robot, cameras, clock)
    inline = Stalling(actor, STALL_PERIODS / hz)
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
    """Run the usual control loop: the next period starts after an overrun, which is not made up."""
    target = tracked_target(robot.spec)
    period = 1 / robot.spec.control_hz
    end = time.monotonic() + ticks * period
    left = np.zeros((0, 7), np.float32)
    while (began := time.monotonic()) < end:
        seen = sensors.read(lambda *_: None, lambda *_: None)
        if not len(left):
            left = infer(Request(seen, INSTRUCTION, 0, 0)).actions
        robot.command(target.move(left[0], seen.state), began + 2 * period)
        left = left[1:]
        time.sleep(max(0.0, period - (time.monotonic() - began)))


class _Times:
    """Times at which a robot was observed in each turn, and its number of commands."""

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

    def kept(self, loop: str, hz: float) -> LoopTiming:
        due = TURNS * SECONDS * hz
        jitter = 1e3 * np.abs(np.concatenate([np.diff(times) for times in self.runs]) - 1 / hz)
        p50, p99 = (float(np.quantile(jitter, share)) for share in (0.5, 0.99))
        behind = max(times[-1] - times[0] - (len(times) - 1) / hz for times in self.runs)
        return LoopTiming(
            loop, hz, sum(map(len, self.runs)) / due, self.commands / due, p50, p99, 1e3 * behind
        )


def budget(recipe: Recipe, policy: Policy, hz: float, document: dict[str, Any]) -> dict[str, float]:
    """Return the budget of an inference, in ms (``control_hz`` in Hz).

    ``overhead``: sensors and commands (p99). ``left``: time left for an inference, which took
    ``p50`` and ``p99``.
    """
    sections = document["sections_ms"]
    goes_by = timing(recipe.control, hz, policy.spec.chunk)
    overhead = sum(sections[name]["p99"] for name in ("lateness", "observe", "camera", "command"))
    inference = {
        quantile: sum(
            sections[name][quantile] for name in ("prepare", "encode", "act") if name in sections
        )
        for quantile in ("p50", "p99")
    }
    left = 1e3 * inference_budget(goes_by, policy.spec.chunk) - overhead
    return {"control_hz": hz, "period": 1e3 / hz, "overhead": overhead, "left": left, **inference}


def _ratios(ours: LoopTiming, plain: LoopTiming) -> dict[str, float]:
    """Compare the loops; above 1, ours is better."""
    return {
        "jitter p50": plain.jitter_p50_ms / ours.jitter_p50_ms,
        "jitter p99": plain.jitter_p99_ms / ours.jitter_p99_ms,
        "steps, ours over sleep loop's": ours.steps / plain.steps,
    }


def _show(
    report: harness.Report,
    recipe: Recipe,
    timings: list[LoopTiming],
    budgets: list[dict[str, float]],
) -> None:
    stalls = f"every {STALL_EVERY}th inference stalls for {STALL_PERIODS:g} periods"
    columns = (
        "Hz",
        "loop",
        "steps / due",
        "commands / due",
        "jitter p50 ms",
        "p99 ms",
        "behind ms",
    )
    rows = []
    for loop in timings:
        numbers = (loop.jitter_p50_ms, loop.jitter_p99_ms, loop.behind_ms)
        shares = (f"{loop.steps:.3f}", f"{loop.commands:.3f}")
        rows.append(
            (f"{loop.control_hz:g}", loop.loop, *shares, *(f"{number:.2f}" for number in numbers))
        )
    report.show(columns, rows, f"{recipe.model.name}: {stalls}")
    columns = (
        "Hz",
        "period",
        "sensors, commands",
        "left for inference",
        "inference p50",
        "p99",
        "",
    )
    rows = []
    for row in budgets:
        cells = [f"{row[name]:.1f}" for name in ("period", "overhead", "left", "p50", "p99")]
        rows.append(
            (f"{row['control_hz']:g}", *cells, "fits" if row["p99"] < row["left"] else "too slow")
        )
    report.show(columns, rows, "Budget (ms) without stalls")

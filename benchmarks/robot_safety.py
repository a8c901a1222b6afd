"""Stress-test the safety filter and report the use of each limit and the time per step.

``python -m rlinf_vla.benchmarks.robot_safety [--actions N] [--seed N] OUTPUT`` writes a page.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlinf_vla.benchmarks import robot_safety_trials as trials
from rlinf_vla.benchmarks.robot_safety_trials import Follower
from rlinf_vla.features.realworld.robot import ToolTarget
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.cell_file import CELLS, load
from rlinf_vla.robots.safety import SafetyFilter

TRIAL = 2000
"""Actions per trial; each trial starts from rest at home."""

TICKS = (1, 1, 1, 1, 1, 1, 2, 4)
"""Ticks for which an action is held, one drawn per action."""


class Bench:
    """Run trials in one cell and accumulate their results."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.filter = SafetyFilter(cell)
        self.used: dict[str, float] = {}
        self.faults: Counter[str] = Counter()
        self.actions = self.ticks = 0

    def trial(self, draw: np.random.Generator, actions: int) -> None:
        trial = trials.run_trial(self.cell, self.filter, self._sent(draw, actions))
        self.ticks += len(trial.commands)
        if trial.fault is not None:
            self.faults[trial.fault.split(":")[0]] += 1
        for key, value in trials.usage(self.cell, trial).items():
            self.used[key] = max(self.used.get(key, 0.0), value)

    def _sent(
        self, draw: np.random.Generator, actions: int
    ) -> Iterator[tuple[ToolTarget | None, int]]:
        for goal in itertools.islice(
            trials.goals(draw, self.cell, lambda: self.filter.admitted), actions
        ):
            self.actions += 1
            yield goal, int(draw.choice(TICKS))
        yield None, self.cell.windows.length + 1


def latency(cell: Cell, ticks: int = 20_000) -> dict[str, list[float]]:
    """Return step times in microseconds by kind of tick, with a new goal at ``control_hz``.

    Values: median, 99th percentile, and the lowest of the medians of 100 consecutive blocks.
    """
    filter_ = SafetyFilter(cell)
    follower = Follower(cell)
    draw = np.random.default_rng(0)
    filter_.start(follower.state())
    took = np.empty(ticks)
    goal: ToolTarget | None = None
    for tick in range(ticks):
        if tick % cell.ticks_per_step == 0:
            goal = trials.policy(draw, cell, filter_.admitted, np.zeros(7), 0)
        state = follower.state()
        begin = time.perf_counter()
        filtered = filter_.step(goal, state, 1 / cell.servo_hz)
        took[tick] = 1e6 * (time.perf_counter() - begin)
        follower.follow(filtered.command)
    brings = np.arange(ticks) % cell.ticks_per_step == 0
    groups = {"all": took, "with a new goal": took[brings], "between goals": took[~brings]}
    quietest = {
        name: min(np.median(block) for block in np.array_split(times, 100))
        for name, times in groups.items()
    }
    return {
        name: [*np.percentile(times, [50, 99]).tolist(), float(quietest[name])]
        for name, times in groups.items()
    }


def most_used(benches: dict[str, Bench]) -> float:
    """Highest usage of any limit of the commands; 1 is the limit.

    The limit of joint accelerations is one of a prediction.
    """
    return max(
        value
        for bench in benches.values()
        for key, value in bench.used.items()
        if key != "joint_acceleration"
    )


def page(benches: dict[str, Bench], times: dict[str, list[float]], command: str, asked: int) -> str:
    actions = sum(bench.actions for bench in benches.values())
    ticks = sum(bench.ticks for bench in benches.values())
    faults = sum((bench.faults for bench in benches.values()), Counter[str]())
    worst = most_used(benches)
    keys = list(next(iter(benches.values())).used)
    columns = " | ".join(benches)
    lines = [
        "# Safety filter stress test",
        "",
        f"`{command}` wrote this page: {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, numpy {np.__version__}.",
        "",
        f"{actions} of {asked} actions (a policy's, pushing against limits, alternating extremes, jumps of metres, corners of the "
        f"workspace, NaN, infinity, 1e300, denormals, wrong shapes) became {ticks} commands to an arm that follows exactly. "
        f"Faults: {dict(faults) or 'none'}. Every command was checked again by finite differences; "
        f"the highest usage of any limit but joint_acceleration, which is predicted, is {worst:.6f} (1 is the limit).",
        "",
        f"| highest usage of the limit | {columns} |",
        "|---|" + "---|" * len(benches),
        *(
            f"| {key} | "
            + " | ".join(f"{bench.used[key]:.4f}" for bench in benches.values())
            + " |"
            for key in keys
        ),
        "",
        "joint_margin_rad: how far the joints came into their margin; at 0.5 the arm is stopped, at 1 a joint is at its limit.",
        "",
        f"| interventions, by rule | {columns} |",
        "|---|" + "---|" * len(benches),
    ]
    rules = sorted(set().union(*(bench.filter.counts for bench in benches.values())))
    lines += [
        f"| {rule} | "
        + " | ".join(str(bench.filter.counts[rule]) for bench in benches.values())
        + " |"
        for rule in rules
    ]
    lines += [
        "",
        "| µs of a step | median | 99 % | median of the quietest hundredth |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{value:.0f}" for value in values) + " |"
        for name, values in times.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--actions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cell = load(CELLS / "franka_sim.yaml", Cell)
    benches = {"franka_sim": Bench(cell), "franka_sim, widest workspace": Bench(trials.roomy(cell))}
    draw = np.random.default_rng(options.seed)
    command = f"python -m rlinf_vla.benchmarks.robot_safety --actions {options.actions} --seed {options.seed} {options.output}"
    times = latency(cell)
    for begun in range(0, options.actions, TRIAL):
        bench = list(benches.values())[begun // TRIAL % len(benches)]
        bench.trial(draw, min(TRIAL, options.actions - begun))
        if begun // TRIAL % 10 == 1 or begun + TRIAL >= options.actions:
            options.output.write_text(
                page(benches, times, command, options.actions), encoding="utf-8"
            )  # intermediate results
            print(f"{begun + TRIAL} of {options.actions}", flush=True)
    if most_used(benches) > 1 + 1e-6:
        raise SystemExit(f"a command exceeded a limit: {options.output}")


if __name__ == "__main__":
    main()

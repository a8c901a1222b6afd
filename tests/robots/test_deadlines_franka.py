"""Inferences that take too long, in real time, by the real franky against franky-sim: misses, ages, and the arm's motion."""

from __future__ import annotations

import math
import os
import random
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from chaos_page import machine
from franka_session import Session
from trajectory import Trajectory

from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_loop import FINISHED, ControlLoop, Step
from rlinf_vla.features.realworld.inference import Chunk, InferenceWorker, Request
from rlinf_vla.robots.kinematics import FrankaKinematics
from rlinf_vla.robots.simulated.client import SimulatedCell
from rlinf_vla.robots.simulated.scene import SimulatorState

PAGE = os.environ.get("ROBOT_DEADLINES_PAGE")
"""On an idle machine, misses are exactly those injected; otherwise the tests share their cores."""
DELAYS_MS = {0: 0, 50: 0, 90: 0, 110: 1, 200: 2, 400: 4}
"""Milliseconds of a slow inference, and the control steps of 100 ms that it costs."""
USUAL_MS, JITTER_MS = 20.0, 70.0
EVERY = 10
SLOW = 20 if PAGE else 2
"""One of EVERY inferences is slow, SLOW in all."""
MAX_AGE_S, EDGE_S = 0.6, 0.025
"""Seconds between the two ends of a slope."""
HEAD = """# Late inferences in real time

`make robot-deadlines`, {today}: {where}.

The simulated Franka moves in a circle at 10 Hz, with chunks of one action, infer then execute;
franky, the arm's process, the camera and MuJoCo share its cores. An inference takes 20 ms, and
every tenth takes the stated time; in the last line each takes a random time from 0 to 70 ms. A step
whose action is not ready is held. No command may come from an observation older than {age:g} ms.
The tool's acceleration is the simulator's, from slopes over {edge:g} ms; the command's limit is
{limit:g} m/s².

| every tenth takes, ms | misses injected | counted | oldest observation, ms | lateness of a step, p99 ms | tool, maximum m/s² |
|---|---|---|---|---|---|
"""


def joints(truth: SimulatorState) -> tuple[np.ndarray, np.ndarray]:
    return truth.positions[:7], truth.joint_velocities


class Late:
    """A policy that moves the arm in a circle, with configured delays."""

    def __init__(self, slow_ms: float | None, metre: float) -> None:
        self._slow = slow_ms
        self._metre = metre
        self._count = 0
        self._draw = random.Random(0)

    def __call__(self, request: Request) -> Chunk:
        self._count += 1
        usual = USUAL_MS if self._slow is not None else self._draw.uniform(0, JITTER_MS)
        time.sleep(
            (self._slow if self._slow is not None and self._count % EVERY == 0 else usual) / 1e3
        )
        angle = math.pi * self._count / 10
        action = np.array([[0.8 * math.sin(angle), 0.8 * math.cos(angle), 0, 1]], np.float32)
        return Chunk(request, action)


@pytest.mark.nightly
@pytest.mark.simulator
@pytest.mark.timeout(600)
def test_counted_misses_are_those_that_were_injected(session: Session, cell: SimulatedCell) -> None:
    robot = session.robot
    clock = Clock()
    limits = session.robot.cell
    seen = Trajectory(cell, joints)
    lines = list[str]()
    config = ControlConfig(
        asynchronous=False, warmup=0, max_misses=1000, max_observation_age_s=MAX_AGE_S
    )
    for slow, costs in [*DELAYS_MS.items(), (None, 0)]:
        robot.home(30)
        background = InferenceWorker(Late(slow, 1 / robot.spec.space.translation_m), clock)
        steps = list[Step]()
        loop = ControlLoop(robot, [], background, 1, config, clock)
        seen.forget()

        def enough(step: Step, steps: list[Step] = steps) -> str | None:
            steps.append(step)
            return "enough" if sum(each.by == "policy" for each in steps) == EVERY * SLOW else None

        ended = loop.run("go round", enough)
        background.close()
        assert ended.kind == FINISHED, ended
        account = loop.accounting.document()
        injected = costs * SLOW
        oldest = max(each.chosen.age for each in steps if each.chosen is not None)
        most = acceleration(seen.samples, limits.arm)
        assert oldest <= MAX_AGE_S
        assert account["missed"] == injected if PAGE else account["missed"] >= injected
        assert not PAGE or most < limits.max_acceleration_m_s2
        what = f"{slow}" if slow is not None else f"0 to {JITTER_MS:g} each"
        late = account["sections_ms"]["lateness"]["p99"]
        lines.append(
            f"| {what} | {injected} | {account['missed']} | {1e3 * oldest:.0f} | {late:.1f} | {most:.2f} |\n"
        )
    seen.close()
    print("".join(lines))
    if PAGE:
        head = HEAD.format(
            today=date.today(),
            where=machine(),
            age=1e3 * MAX_AGE_S,
            edge=1e3 * EDGE_S,
            limit=limits.max_acceleration_m_s2,
        )
        Path(PAGE).write_text(head + "".join(lines))


def acceleration(
    samples: list[tuple[float, tuple[np.ndarray, np.ndarray]]], arm: FrankaKinematics
) -> float:
    """The tool's largest acceleration, in m/s²."""
    times = np.array([when for when, _ in samples])
    speeds = np.array([(arm.jacobian(at) @ rate)[:3] for _, (at, rate) in samples])
    later = np.searchsorted(times, times + EDGE_S)
    first = np.flatnonzero(later < len(times))
    last = later[first]
    slopes = np.linalg.norm(speeds[last] - speeds[first], axis=1) / (times[last] - times[first])
    return float(slopes.max())

from __future__ import annotations

import gc
import itertools
import math
import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vla.benchmarks.synthetic_cell import REST, SyntheticRobot
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.robot import ControlConfig, inference_budget, timing
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_loop import (
    CAMERA,
    FAULT,
    FINISHED,
    INVALID,
    MISSED,
    ROBOT,
    ControlLoop,
    Ended,
    Step,
)
from rlinf_vla.features.realworld.inference import Chunk, InferenceWorker
from rlinf_vla.features.realworld.robot import CameraError, Frame, RobotError
from tests.features.realworld.control import HZ, MS, Cell, expected

LENIENT = {"warmup": 0, "max_misses": 1000}


@pytest.mark.parametrize(
    ("delay", "misses"), [(0, 0), (50, 0), (90, 0), (110, 1), (200, 2), (400, 4)]
)
def test_a_slow_inference_costs_exactly_the_periods_that_it_takes(delay: int, misses: int) -> None:
    """Chunks of one action: infer, then execute; the third inference is slow."""
    cell = Cell([20, 20, delay, 20])
    assert cell.run(10).kind == FINISHED
    assert cell.by == "pp" + "h" * misses + "p" * (8 - misses)
    assert cell.loop.accounting.missed == misses


@settings(max_examples=15)
@given(
    delays=st.lists(st.integers(0, 450), min_size=1, max_size=12),
    chunk=st.integers(1, 6),
    asynchronous=st.booleans(),
    horizon=st.integers(1, 6),
    age=st.integers(110, 1200),
)
def test_random_delays_against_brute_force(
    delays: list[int], chunk: int, asynchronous: bool, horizon: int, age: int
) -> None:
    asynchronous = asynchronous and chunk > 1
    horizon = min(horizon, chunk - asynchronous)
    age = max(age, 100 * horizon + 1)
    config = ControlConfig(
        asynchronous, horizon, max_observation_age_s=age * MS, reserve_ms=10e3 * MS, **LENIENT
    )
    cell = Cell(delays, chunk, config)
    cell.run(40)
    assert cell.done == expected(delays, 40, chunk, asynchronous, horizon, age)
    assert all(step.chosen is None or step.chosen.age <= age * MS for step in cell.steps)
    assert len(cell.robot.commands) == cell.by.count("p")


def test_ticks_are_due_at_absolute_times() -> None:
    """A costly tick does not shift those that follow."""
    cell = Cell([0], cost=3 * MS)
    cell.run(50)
    whens = [when for when, _, _ in cell.robot.commands]
    assert whens == [(100 * tick + 9) * MS for tick in range(50)]
    assert [until for *_, until in cell.robot.commands] == pytest.approx(
        [(100 * tick + 150) * MS for tick in range(50)]
    )
    assert cell.loop.accounting.document()["sections_ms"]["jitter"]["max"] == 0


def test_periods_that_pass_during_a_tick_are_skipped_and_counted() -> None:
    cell = Cell([0])

    def dawdle(step: Step) -> None:
        if step.tick == 3:
            cell.clock.sleep_until(cell.clock.now() + 230 * MS)

    cell.run(10, dawdle)
    assert [step.tick for step in cell.steps] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert [step.time / MS for step in cell.steps[3:6]] == [300, 530, 600], (
        "at once, then on time again"
    )
    account = cell.loop.accounting
    assert (account.steps["skipped"], account.missed, account.steps["policy"]) == (1, 1, 9)


def test_a_step_with_too_slow_sensors_is_not_executed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell([0])
    look = cell.camera.latest

    def slow() -> Frame:
        if len(cell.steps) == 3:
            cell.clock.sleep_until(cell.clock.now() + 230 * MS)
        return look()

    monkeypatch.setattr(cell.camera, "latest", slow)
    cell.run(10)
    assert cell.by == "ppphppppp" and [step.tick for step in cell.steps[3:5]] == [3, 5]
    assert all(when < until for when, _, until in cell.robot.commands)
    assert cell.loop.accounting.missed == 2


def test_after_max_misses_the_robot_is_stopped() -> None:
    cell = Cell([0, 0, 10_000], config=ControlConfig(warmup=0, max_misses=4))
    ended = cell.run(100)
    assert ended == Ended(MISSED, "4 control steps in a row without a command")
    assert cell.by == "pphhhh" and cell.robot.state.fault == ended.detail


def test_a_policy_that_never_answers_moves_nothing() -> None:
    cell = Cell(
        [1_000_000], config=ControlConfig(warmup=0, max_misses=4, max_observation_age_s=500 * MS)
    )
    assert cell.run(100).kind == MISSED
    assert cell.by == "ssssshhhh" and not cell.robot.commands


def test_a_late_chunk_is_rejected_and_the_arm_continues_with_a_new_one() -> None:
    cell = Cell([0, 0, 700, 0], config=ControlConfig(warmup=0, max_observation_age_s=300 * MS))
    cell.run(14)
    assert cell.by == "pp" + 7 * "h" + "ppppp"
    assert cell.loop.accounting.chunks["too_old"] == 1
    assert all(step.chosen.age <= 300 * MS for step in cell.steps if step.chosen)


def test_warm_up_moves_nothing_and_is_not_counted() -> None:
    cell = Cell([9000, 3000, 20], config=ControlConfig(warmup=2))
    cell.loop.warm_up("touch the cube")
    assert not cell.robot.commands
    cell.run(10)
    document = cell.loop.accounting.document()
    assert document["warmup_ms"] == [9e6 * MS, 3e6 * MS]
    assert cell.by == "p" * 10 and document["missed"] == 0
    assert document["sections_ms"]["tick"]["max"] == pytest.approx(20e3 * MS)
    assert document["sections_ms"]["act"]["n"] == document["ages_ms"]["action"]["n"] == 10


def test_an_operator_takes_over() -> None:
    cell = Cell([20], chunk=4)
    cell.human = lambda: np.array([0, 0, 1, 1], np.float32) if 3 <= len(cell.steps) < 6 else None
    cell.run(9)
    assert cell.by == "spphhhspp" and [step.by for step in cell.steps[3:6]] == ["human"] * 3
    heights = [step.target.pose.position[2] for step in cell.steps[2:6] if step.target]
    assert heights == pytest.approx([0.3, 0.35, 0.4, 0.45])
    assert cell.loop.accounting.steps["human"] == 3 and cell.loop.accounting.missed == 0
    assert all(step.chosen is None for step in cell.steps[3:6])


TAKEOVER = np.array([-1, 0, 0, 1], np.float32)


@pytest.mark.parametrize(
    ("chunk", "config"),
    [
        (1, {"asynchronous": False}),
        (8, {"asynchronous": False}),
        (40, {"execution_horizon": 20, "max_observation_age_s": 3.0}),
        (8, {"requests_in_flight": 2}),
        (8, {"real_time_chunking": True}),
    ],
)
@pytest.mark.parametrize("delay", [20, 250])
def test_after_a_takeover_the_policy_acts_on_what_it_saw_after_it(
    chunk: int, config: dict[str, Any], delay: int
) -> None:
    """The rest of what it planned before would lead back to where the operator intervened."""
    cell = Cell([delay], chunk, ControlConfig(**(LENIENT | config)))
    cell.human = lambda: TAKEOVER if 5 <= len(cell.steps) < 8 else None
    cell.run(20)
    assert [step.human for step in cell.steps] == [5 <= number < 8 for number in range(20)]
    seen = [step.chosen.chunk.request for step in cell.steps[8:] if step.chosen]
    assert min(request.tick for request in seen) >= 8
    assert not [request for request in cell.asked if 5 <= request.tick < 8], (
        "an answer would come too late, and delay the next one"
    )
    (first,) = (request for request in cell.asked if request is seen[0])
    assert first.committed is None, (
        "no action that the arm will not execute is presented as committed"
    )


@pytest.mark.parametrize(
    ("delays", "by"), [([20, 20, 700, 10_000], "sssssssphhhh"), ([20, 20, 10_000], "ssssssshhhh")]
)
def test_the_wait_for_a_plan_after_a_takeover_is_no_miss(delays: list[float], by: str) -> None:
    """The arm stands, as before the first action; a policy that is silent for longer stops it."""
    cell = Cell(delays, 1, ControlConfig(warmup=0, max_misses=4, max_observation_age_s=850 * MS))
    cell.human = lambda: TAKEOVER if len(cell.steps) in (2, 3) else None
    assert cell.run(60).kind == MISSED
    assert cell.by == "pphh" + by and len(cell.robot.commands) == 4 + by.count("p")


def test_an_episode_does_not_act_on_observations_of_the_last_one() -> None:
    cell = Cell([150], chunk=6)
    cell.run(5)
    first = cell.camera.latest().number - 1  # images so far
    cell.run(5)
    assert cell.by == "ssppp" * 2
    assert all(
        step.chosen.chunk.request.seen.number >= first for step in cell.steps[5:] if step.chosen
    )
    assert cell.loop.accounting.seconds == pytest.approx(800 * MS)


def test_a_latched_fault_ends_the_run_and_keeps_its_name() -> None:
    cell = Cell([0])
    cell.clock.at(
        250 * MS,
        lambda: setattr(cell.robot, "state", replace(cell.robot.state, fault="joint_reflex")),
    )
    assert cell.run(100) == Ended(FAULT, "joint_reflex")
    assert len(cell.robot.commands) == 3 and cell.robot.state.fault == "joint_reflex"


def test_a_lost_camera_stops_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell([0])

    def blind() -> None:
        raise CameraError("camera base: frozen for 0.3 s")

    cell.clock.at(250 * MS, lambda: monkeypatch.setattr(cell.camera, "latest", blind))
    assert cell.run(100) == Ended(CAMERA, "camera base: frozen for 0.3 s")
    assert (
        len(cell.robot.commands) == 3 and cell.robot.state.fault == "camera base: frozen for 0.3 s"
    )


def test_a_lost_robot_is_named_even_if_it_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = Cell([0])

    def gone(*args: object) -> None:
        raise RobotError("no answer from 172.16.0.2")

    monkeypatch.setattr(cell.robot, "command", gone)
    monkeypatch.setattr(cell.robot, "stop", gone)
    assert cell.run(9) == Ended(
        ROBOT,
        "no answer from 172.16.0.2; stopping the robot failed, too: no answer from 172.16.0.2",
    )


@pytest.mark.parametrize("who", ["policy", "operator"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -20.0])
def test_an_invalid_action_is_not_executed(who: str, number: float) -> None:
    """-20 is a metre here."""
    cell = Cell([0])
    action = np.array([0, number, 0, 1], np.float32)
    if who == "operator":
        cell.human = lambda: action
    else:
        cell.infer = lambda request: Chunk(request, action[None])
    ended = cell.run(9)
    assert ended == Ended(INVALID, f"the {who} asked for [0.0, {number}, 0.0, 1.0]")
    assert not cell.robot.commands and cell.robot.state.fault == ended.detail


def test_an_action_a_little_beyond_its_range_is_clipped() -> None:
    cell = Cell([0])
    cell.infer = lambda request: Chunk(request, np.array([[3, 0, 0, 1]], np.float32))
    assert cell.run(1).kind == FINISHED
    (_, target, _), *_ = cell.robot.commands
    assert target.pose.position[0] == pytest.approx(
        REST.position[0] + cell.robot.spec.space.translation_m
    )


@pytest.mark.parametrize("where", ["policy", "session"])
def test_an_exception_stops_the_arm_and_is_raised(where: str) -> None:
    cell = Cell([0])

    def fail(*args: object) -> None:
        raise ZeroDivisionError

    if where == "policy":
        cell.infer = fail
    with pytest.raises(ZeroDivisionError):
        cell.run(9, fail if where == "session" else lambda step: None)
    assert str(cell.robot.state.fault).startswith("ZeroDivisionError")


def test_the_committed_actions_are_those_that_the_arm_executes() -> None:
    config = ControlConfig(warmup=0, real_time_chunking=True, execution_horizon=2)
    cell = Cell([150], chunk=8, config=config)
    cell.run(30)
    assert cell.asked[0].committed is None
    for request in cell.asked[1:]:
        assert request.committed is not None and request.committed.frozen == 2
        done = [step.action for step in cell.steps[request.tick :][: request.committed.frozen]]
        assert np.array_equal(
            request.committed.actions[: len(done)], np.array(done).reshape(len(done), 4)
        )
    assert cell.loop.accounting.missed == 0


@pytest.mark.parametrize(
    ("chunk", "settings", "said"),
    [
        (1, {"asynchronous": True}, "control.asynchronous=true"),
        (1, {"real_time_chunking": True}, "control.real_time_chunking=true"),
        (4, {"execution_horizon": 5}, "control.execution_horizon=5"),
        (4, {"execution_horizon": 4}, "control.execution_horizon=4"),
        (4, {"reserve_ms": 100}, "control.reserve_ms=100"),
        (4, {"asynchronous": False, "requests_in_flight": 2}, "control.requests_in_flight=2"),
        (4, {"real_time_chunking": True, "requests_in_flight": 2}, "control.requests_in_flight=2"),
        (
            8,
            {"asynchronous": False, "max_observation_age_s": 0.6},
            "control.max_observation_age_s=0.6",
        ),
    ],
)
def test_invalid_settings_are_refused(chunk: int, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        timing(ControlConfig(**settings), 10.0, chunk)


def test_the_wall_clock_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine's own clock, at 50 Hz, while its wall clock jumps back and forth by hours."""
    jumps = itertools.cycle([0.0, 1e9, -7200.0])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    clock = Clock()
    robot = SyntheticRobot(clock, 50.0)
    background = InferenceWorker(
        lambda request: Chunk(request, np.zeros((4, 4), np.float32)), clock
    )
    loop = ControlLoop(
        robot, [], background, 4, ControlConfig(max_misses=1000, max_observation_age_s=60.0), clock
    )
    loop.warm_up("hold")
    began = time.monotonic()
    assert loop.run("hold", lambda step: "enough" if step.tick >= 20 else None).kind == FINISHED
    background.close()
    assert time.monotonic() - began >= 20 / 50
    whens = [when for when, *_ in robot.commands]
    assert whens == sorted(whens) and all(
        until - when <= 1.5 / 50 for when, _, until in robot.commands
    )


@settings(max_examples=8)
@given(st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_within_the_budget_there_is_no_miss(chunk: int, horizon: int, asynchronous: bool) -> None:
    asynchronous = asynchronous and chunk > 1
    horizon = min(horizon, chunk - asynchronous)
    config = ControlConfig(
        asynchronous, horizon, max_observation_age_s=9, reserve_ms=10e3 * MS, **LENIENT
    )
    budget = inference_budget(timing(config, HZ, chunk), chunk) / MS
    within = Cell([budget], chunk, config)
    beyond = Cell([budget + 1], chunk, config)
    for cell in (within, beyond):
        cell.run(60)
    assert within.loop.accounting.missed == 0
    if (
        not asynchronous and horizon == chunk
    ):  # otherwise one may be faster than the worst case, or continue an older chunk
        assert beyond.loop.accounting.missed > 0


def test_garbage_collection_skips_earlier_objects() -> None:
    """It would take longer than a control period and block all threads meanwhile."""
    gc.unfreeze()
    Cell([20.0])
    assert gc.get_freeze_count() > 10_000 > len(gc.get_objects())


def test_delays_are_counted_in_ticks_and_not_across_episodes() -> None:
    """The last inference of an episode ends in the next one: its delay is of no use to anybody."""
    cell = Cell([150], 4, ControlConfig(warmup=0, asynchronous=True, execution_horizon=2))
    for _ in range(2):
        cell.run(9)
    found = cell.loop.accounting.document()
    assert (
        found["delay_ticks"] == {"2": sum(found["chunks"].values()) - found["chunks"]["superseded"]}
        and found["chunks"]["superseded"] >= 1
    )

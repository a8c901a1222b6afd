"""Fault injection with the real franky against franky-sim. ``ROBOT_CHAOS=3`` runs three rounds of each fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import FAULTS, IN_CI, ROUNDS, Round
from chaos_franka import STEP_S, Real
from franka_session import journal

from rlinf_vla.robots.simulated.client import SimulatedCell

pytestmark = [pytest.mark.simulator, pytest.mark.timeout(300 + 120 * ROUNDS)]


@pytest.fixture(scope="module")
def real(cell: SimulatedCell, wall_clock_off: Path) -> Iterator[Real]:
    made = Real(cell, wall_clock_off)
    yield made
    made.close()


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.nightly] * (fault not in IN_CI)) for fault in FAULTS],
)
def test_each_fault_stops_the_real_driver_in_time_and_is_latched(
    fault: str, real: Real, rounds: list[Round]
) -> None:
    before = len(journal(real.arm_folder)) if fault == "clock_step" else 0
    found = real.rounds(fault, ROUNDS or 1)
    rounds += found
    assert [each.wrong for each in found] == [None] * len(found)
    if fault == "clock_step":
        off = [line["wall_time"] - line["time"] for line in journal(real.arm_folder)[before:]]
        assert max(off) - min(off) > 0.9 * STEP_S, "the arm's process saw the clock step"

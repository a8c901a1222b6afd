"""A profile corrected by a run predicts the measured time, and may lead to another plan."""

from __future__ import annotations

import pytest

from rlinf_vla.features.planner.monitor import ROLLOUT, UPDATE, corrected, phase_seconds
from rlinf_vla.features.planner.plan import Plan
from rlinf_vla.features.planner.simulate import simulate
from tests.features.planner.made_up import problem, profile

PLAN = Plan(pipeline_depth=1, micro_batch_size=32)


@pytest.mark.parametrize(("rollout", "update"), [(1.0, 1.0), (2.0, 1.0), (0.5, 3.0)])
def test_a_corrected_profile_predicts_what_was_measured(rollout: float, update: float) -> None:
    before = simulate(problem(), PLAN)
    phases = phase_seconds(before, ROLLOUT), phase_seconds(before, UPDATE)
    assert min(phases) > 0 and sum(phases) <= before.seconds
    measured = (rollout * phases[0], update * phases[1])
    again = simulate(problem(profiles={"cpu": corrected(profile(), before, *measured)}), PLAN)
    assert phase_seconds(again, ROLLOUT) == pytest.approx(measured[0], rel=0.02)
    assert phase_seconds(again, UPDATE) == pytest.approx(measured[1], rel=0.02)


def test_unmeasured_costs_are_unchanged() -> None:
    prediction = simulate(problem(), PLAN)
    assert corrected(profile(), prediction, 0.0, 0.0).operations == profile().operations

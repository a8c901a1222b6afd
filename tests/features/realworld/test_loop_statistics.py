"""Statistics of two processes in succession."""

from __future__ import annotations

import json

from rlinf_vla.features.realworld.loop_statistics import (
    HELD,
    POLICY,
    LoopStatistics,
    control_metrics,
    merged_statistics,
)


def account(*parts: int) -> LoopStatistics:
    """Part ``n``: n steps of the policy, n held, n commands that were late by n tenths of a period."""
    found = LoopStatistics(10.0)
    for part in parts:
        found.seconds += part
        found.steps.update({POLICY: part, HELD: part})
        found.chunks["accepted"] += part
        found.interventions[f"rule_{part}"] += part
        for _ in range(part):
            found.left(part / 100)
            found.took("tick", 0.01 * part)
    return found


def test_counts_of_two_processes_are_those_of_one() -> None:
    before = json.loads(json.dumps(account(2).document()))
    later = account(3).document()
    both = account(2, 3).document()
    assert merged_statistics(before, later) == both | {"sections_ms": later["sections_ms"]}


def test_an_invalid_document_is_not_counted() -> None:
    later = account(3).document()
    assert (
        merged_statistics({}, later)
        == later
        == merged_statistics({**account(2).document(), "control_hz": 20.0}, later)
    )


def test_a_document_as_metrics() -> None:
    found = account(2, 3)
    found.age("action", 0.05)
    metrics = control_metrics(found.document())
    assert (
        metrics["control/missed"] == 5
        and metrics["control/interventions"] == 5
        and metrics["control/steps_policy"] == 5
    )
    assert metrics["control/chunks_accepted"] == 5 and metrics["control/age_action_ms_p50"] == 50
    assert (metrics["control/tick_ms_p50"], metrics["control/tick_ms_max"]) == (30, 30)

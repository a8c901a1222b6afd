"""Correct the profile behind a run's plan with the run's measured iterations."""

from __future__ import annotations

from dataclasses import replace

from rlinf_vla.planner.prediction import Prediction
from rlinf_vla.planner.profile import Profile

ROLLOUT = ("act", "head", "encode", "value", "merge", "simulate", "reset", "features")
UPDATE = ("precompute", "update", "optimise", "reference")
REPLAN_THRESHOLD = 0.9
"""A run changes its plan if another one is predicted to take less than this share of its time."""


def phase_seconds(prediction: Prediction, names: tuple[str, ...]) -> float:
    """Seconds from the start of the first of these tasks in an iteration to the end of the last."""
    spans = [span for span in prediction.spans if span.name in names]
    return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0


def corrected(profile: Profile, prediction: Prediction, rollout_s: float, update_s: float) -> Profile:
    """Scale the costs of each phase by its measured over its predicted seconds."""
    operations = dict(profile.operations)
    for names, measured in ((ROLLOUT, rollout_s), (UPDATE, update_s)):
        predicted = phase_seconds(prediction, names)
        if predicted > 0 and measured > 0:
            operations |= {name: cost.times(measured / predicted) for name, cost in profile.operations.items() if name in names}
    return replace(profile, operations=operations, note=f"{profile.note}, corrected by the run's own iterations")

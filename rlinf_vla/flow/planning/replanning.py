"""What a run's own iterations say about the profile that its plan was made from."""

from __future__ import annotations

from dataclasses import replace

from rlinf_vla.flow.planning.prediction import Prediction
from rlinf_vla.flow.planning.profile import Profile

ROLLOUT = ("act", "head", "encode", "value", "merge", "simulate", "reset", "features")
UPDATE = ("fix", "update", "optimise", "reference")
WORTH = 0.9
"""A run changes its plan where another one is predicted to take less than this share of the time."""


def phase_seconds(prediction: Prediction, names: tuple[str, ...]) -> float:
    """From the beginning of the first of these tasks in an iteration to the end of the last."""
    spans = [span for span in prediction.spans if span.name in names]
    return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0


def corrected(profile: Profile, prediction: Prediction, rollout_s: float, update_s: float) -> Profile:
    """With the costs of each phase in the proportion in which it took longer than was predicted, or less."""
    operations = dict(profile.operations)
    for names, measured in ((ROLLOUT, rollout_s), (UPDATE, update_s)):
        predicted = phase_seconds(prediction, names)
        if predicted > 0 and measured > 0:
            operations |= {name: cost.times(measured / predicted) for name, cost in profile.operations.items() if name in names}
    return replace(profile, operations=operations, note=f"{profile.note}, corrected by the run's own iterations")

"""Evaluate a reward classifier on the frames that were held out from its training."""

from __future__ import annotations

from typing import Any

import torch

from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.evaluation.statistics import wilson_interval


@torch.no_grad()
def classification_accuracy(model: torch.nn.Module, frames: Frames, rows: int) -> dict[str, Any]:
    """Return the classification accuracy on success frames and on other frames, with intervals."""
    parts = [frames[start : start + rows] for start in range(0, len(frames), rows)]
    right = (torch.cat([model(part.inputs) for part in parts]) > 0) == frames.success
    found = {}
    for name, kind in (("frames of success", frames.success), ("other frames", ~frames.success)):
        n, good = int(kind.sum()), int((right & kind).sum())
        found[name] = {"n": n, "pc": 100 * good / n, "pc_ci95": [100 * each for each in wilson_interval(good, n)]}
    return found


def accuracy_headline(document: dict[str, Any]) -> str:
    """Return e.g. ``98.0 % of 50 frames of success (95 % interval 89.5 to 99.6), 97.1 % ...``."""
    return ", ".join(
        f"{each['pc']:.1f} % of {each['n']} {name} (95 % interval {each['pc_ci95'][0]:.1f} to {each['pc_ci95'][1]:.1f})"
        for name, each in document.items()
    )

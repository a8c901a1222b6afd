"""Evaluate a reward classifier on the frames that were held out from its training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlinf_vla.evaluation.statistics import wilson_interval


def classification_accuracy(logits: Tensor, success: Tensor) -> dict[str, Any]:
    """Return the accuracy on frames of success and on other frames, with intervals.

    logits: of success, float32 ``[N]``. success: labels bool ``[N]``.
    """
    right = (logits > 0) == success
    accuracies = {}
    for name, kind in (("frames of success", success), ("other frames", ~success)):
        n = int(kind.sum())
        good = int((right & kind).sum())
        accuracies[name] = {
            "n": n,
            "pc": 100 * good / n,
            "pc_ci95": [100 * bound for bound in wilson_interval(good, n)],
        }
    return accuracies


def accuracy_headline(document: dict[str, Any]) -> str:
    """Return e.g. ``98.0 % of 50 frames of success (95 % interval 89.5 to 99.6), 97.1 % ...``."""
    return ", ".join(
        f"{accuracy['pc']:.1f} % of {accuracy['n']} {name} (95 % interval {accuracy['pc_ci95'][0]:.1f} to {accuracy['pc_ci95'][1]:.1f})"
        for name, accuracy in document.items()
    )

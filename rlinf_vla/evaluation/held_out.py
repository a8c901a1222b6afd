"""Evaluate a model that does not act on the frames that were held out from its training."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from rlinf_vla.algorithms.value import ValueTraining
from rlinf_vla.evaluation.statistics import wilson_interval


def assess(flow: Any, algorithm: Any) -> tuple[dict[str, Any], str]:
    """Return the evaluation of the model that ``algorithm`` trains in ``flow``, and a headline."""
    demonstrations = algorithm.config.demonstrations
    if isinstance(algorithm, ValueTraining):
        returns, _ = flow.returns(demonstrations, algorithm.config.failure)
        held_out = returns[algorithm.is_held_out(returns)]
        document = value_errors(flow.predictions(held_out), held_out.returns, held_out.episode)
        return document, value_headline(document)
    frames = flow.label(demonstrations)
    held_out = frames[algorithm.split(frames)[1]]
    document = classification_accuracy(flow.predictions(held_out), held_out.success)
    return document, accuracy_headline(document)


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


def value_errors(values: Tensor, returns: Tensor, episode: Tensor) -> dict[str, Any]:
    """Return how predicted ``values`` agree with ``returns``, both float32 ``[N]``.

    episode: number of each frame's episode, int64 ``[N]``.
    """
    return {
        "episodes": len(episode.unique()),
        "frames": len(values),
        "spearman": spearman(values.numpy(), returns.numpy()),
        "mean_absolute_error": float((values - returns).abs().mean()),
    }


def value_headline(document: dict[str, Any]) -> str:
    """Return e.g. ``rank correlation 0.95 with the returns of 10 held-out episodes ...``."""
    correlation = document["spearman"]
    said = "not defined" if correlation is None else f"{correlation:.2f}"
    return (
        f"rank correlation {said} with the returns of {document['episodes']} held-out episodes "
        f"({document['frames']} frames), mean error {document['mean_absolute_error']:.3f} of 1"
    )


def spearman(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks of equal values; None if all of one side
    are equal."""
    first, second = _mean_ranks(x), _mean_ranks(y)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _mean_ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = count.cumsum()
    ranks: np.ndarray[Any, Any] = (last - (count - 1) / 2)[place]
    return ranks

"""Compute the feature statistics of ``meta/stats.json`` and ``meta/episodes``, used to normalise.

They are exact, over all frames and pixels. lerobot takes quantiles from histograms per episode,
averages them per dataset, and samples the images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.data.lerobot_format import Column

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

Statistics = dict[str, Any]
"""min, max, mean, std, the quantiles (one number per dimension of a vector; ``[3, 1, 1]`` in [0, 1]
for images) and the frame count ``[1]``, as nested lists."""


def of_vectors(values: Column) -> Statistics:
    """Return the statistics of values ``[L]`` or ``[L, D]``."""
    rows = np.asarray(values, np.float64).reshape(len(values), -1)
    statistics: dict[str, NDArray[Any]] = {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": rows.mean(0),
        "std": rows.std(0),
    }
    statistics |= {name: np.quantile(rows, q, axis=0) for name, q in QUANTILES.items()}
    return {name: value.tolist() for name, value in statistics.items()} | {"count": [len(rows)]}


def histogram(images: Column) -> NDArray[np.int64]:
    """Count values of uint8 ``[L, H, W, 3]``: ``[3, 256]``. Counts of episodes can be summed."""
    return np.stack(
        [np.bincount(images[..., channel].ravel(), minlength=256) for channel in range(3)]
    )


def of_images(counts: NDArray[np.int64], frames: int) -> Statistics:
    """Return the statistics of images from their :func:`histogram` ``counts`` over ``frames``."""
    levels = np.arange(256) / 255
    pixels = counts.sum(1)
    mean = counts @ levels / pixels
    seen = [levels[row > 0] for row in counts]
    statistics = {
        "min": np.array([channel[0] for channel in seen]),
        "max": np.array([channel[-1] for channel in seen]),
        "mean": mean,
        "std": np.sqrt((counts * (levels - mean[:, None]) ** 2).sum(1) / pixels),
    }
    cumulated = counts.cumsum(1)
    statistics |= {
        name: levels[(cumulated >= q * pixels[:, None]).argmax(1)] for name, q in QUANTILES.items()
    }
    return {name: value.reshape(3, 1, 1).tolist() for name, value in statistics.items()} | {
        "count": [frames]
    }

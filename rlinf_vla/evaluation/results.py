"""Aggregate a sweep's episodes into success tables and paired differences, as JSON values and CSV.

An episode has the values COLUMNS; ``policy`` is an EvalPolicy's name.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from rlinf_vla.evaluation.statistics import Episode, grouped, paired_episodes, summary

FORMAT = "rlinf-vla evaluation 2"
COLUMNS: dict[str, Any] = {"policy": str, "suite": str, "task": str, "seed": int, "instruction": str, "success": bool}
COLUMNS |= {"steps": int, "return": float | int}
"""Names and types of an episode's values."""


def tables(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the success tables and paired differences of a sweep.

    ``policies``: name -> counts, rate and interval, in total, ``per_suite`` and, in that,
    ``per_task``. ``differences``: of each pair of policies on the episodes that both played, in
    total (``suite`` null) and per suite. Names are in order of first appearance. Raises ValueError
    without episodes.
    """
    by_policy, suites = grouped(episodes, "policy"), list(grouped(episodes, "suite"))
    policies = {name: summary(played, "suite", "task") for name, played in by_policy.items()}
    differences = [
        {"before": before, "after": after, "suite": suite} | found
        for before, after in combinations(by_policy, 2)
        for suite in [None, *(suites if len(suites) > 1 else [])]
        if (found := paired_episodes(*([e for e in by_policy[name] if suite in (None, e["suite"])] for name in (before, after))))
    ]
    return {"policies": policies, "differences": differences}


def as_csv(episodes: Sequence[Episode]) -> str:
    """Return one CSV line per episode below a header line; success is 1 or 0."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(each | {"success": int(each["success"])} for each in episodes)
    return text.getvalue()

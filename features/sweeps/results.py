"""Aggregate a sweep's episodes into success tables and paired differences, as JSON values and CSV.

An episode has the values COLUMNS; ``policy`` is an EvalPolicy's name, ``probe`` its probe or
NO_PROBE.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from rlinf_vla.config.recipe import NO_PROBE
from rlinf_vla.evaluation.statistics import Episode, column_of, grouped, paired_episodes, summary

FORMAT = "rlinf-vla evaluation 3"
COLUMNS: dict[str, Any] = {
    "policy": str,
    "probe": str,
    "suite": str,
    "task": str,
    "seed": int,
    "instruction": str,
}
COLUMNS |= {"success": bool, "steps": int, "return": float | int}
"""Names and types of an episode's values."""


def tables(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the success tables and paired differences of a sweep.

    ``policies``: name -> counts, rate and interval, in total, ``per_suite`` and, in that,
    ``per_task``; a policy with a probe is named ``POLICY with PROBE``. ``differences``: of each
    pair of policies without a probe, and of each policy without and with each probe, on the
    episodes that both played, in total (``suite`` null) and per suite. Names are in order of first
    appearance. Raises ValueError without episodes.
    """
    suites = list(grouped(episodes, "suite"))
    by_policy = {
        column_of(policy, probe): (policy, probe, probed)
        for policy, policy_episodes in grouped(episodes, "policy").items()
        for probe, probed in grouped(policy_episodes, "probe").items()
    }
    policies = {
        name: summary(policy_episodes, "suite", "task")
        for name, (*_, policy_episodes) in by_policy.items()
    }
    differences = [
        {"before": before, "after": after, "suite": suite} | pairs
        for before, after in combinations(by_policy, 2)
        if _compared(by_policy[before], by_policy[after])
        for suite in [None, *(suites if len(suites) > 1 else [])]
        if (
            pairs := paired_episodes(
                *(
                    [e for e in by_policy[name][2] if suite in (None, e["suite"])]
                    for name in (before, after)
                )
            )
        )
    ]
    return {"policies": policies, "differences": differences}


def _compared(before: tuple[str, str, Any], after: tuple[str, str, Any]) -> bool:
    """Whether two (policy, probe, ...) differ in one of both, and the first has no probe."""
    return before[1] == NO_PROBE and (after[1] == NO_PROBE or before[0] == after[0])


def as_csv(episodes: Sequence[Episode]) -> str:
    """Return one CSV line per episode below a header line; success is 1 or 0."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(episode | {"success": int(episode["success"])} for episode in episodes)
    return text.getvalue()

"""Success rates that papers report, to be laid beside ours: ``rlinf-vla compare --published``.

A method of ours that has the name of a paper's column is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.features.sweeps.aggregate import Outcomes, success


@dataclass(frozen=True)
class Published:
    """A table of a paper.

    ``rows``: name -> the tasks, or suites of LIBERO, over which it is the mean. ``columns``: method
    -> percent per row. ``note``: what a reader must know before comparing.
    """

    title: str
    source: str
    rows: Mapping[str, Sequence[str]]
    columns: Mapping[str, Sequence[float]]
    note: str
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Rows of the same kinds of tasks in this package, compared where no task of ``rows`` is."""


LIBERO_TASKS = {"libero_90": 90}
"""Tasks of a suite of LIBERO; the others have 10."""


@cache
def tables() -> dict[str, Published]:
    """Return the papers' tables by name."""
    import yaml

    document = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return {name: Published(**table) for name, table in document["tables"].items()}


def beside_published(name: str, outcomes: Mapping[str, Outcomes]) -> dict[str, Any]:
    """Return the paper's rows that some ``outcomes`` (by method) have, and ours beside them.

    Keys: title, source, note, missing (rows that are not there), rows: row -> paper (method ->
    percent), ours (method -> pc_success and pc_success_ci95, hierarchical) and, for methods of the
    same name, verdict: "agrees" if the paper's rate lies in our interval, else "above" or "below";
    or how many of the row's tasks ours has, if not all.
    Raises UserError for an unknown name, or if no row is there.
    """
    if name not in tables():
        raise UserError(f"--published {name} is not known: choose from {', '.join(tables())}")
    paper = tables()[name]
    table: dict[str, Any] = {
        "title": paper.title,
        "source": paper.source,
        "note": paper.note,
        "missing": [],
        "rows": {},
    }
    tasks = {task for outcome in outcomes.values() for task in outcome.tasks}
    named = any(
        _is_in(task, part) for parts in paper.rows.values() for part in parts for task in tasks
    )
    rows = paper.rows if named or not paper.kinds else paper.kinds
    if rows is paper.kinds:
        table["note"] += (
            "; ours is PutOnPlate25: the same kinds of shift, not the same scenes, robot or network"
        )
    for number, (row, paper_parts) in enumerate(rows.items()):
        ours: dict[str, Any] = {}
        lacking: dict[str, str] = {}
        total = sum(
            LIBERO_TASKS.get(part, 10) if part.startswith("libero_") else 1 for part in paper_parts
        )
        for method, outcome in outcomes.items():
            parts = [[task for task in outcome.tasks if _is_in(task, part)] for part in paper_parts]
            if all(parts):
                ours[method] = success(outcome.of([task for part in parts for task in part]))
                if (count := sum(map(len, parts))) < total:
                    lacking[method] = f"{count} of {total} tasks"
        if not ours:
            table["missing"].append(row)
            continue
        rates = {method: values[number] for method, values in paper.columns.items()}
        verdicts = {
            method: _verdict(rates[method], rate["pc_success_ci95"])
            for method, rate in ours.items()
            if method in rates
        }
        table["rows"][row] = {"paper": rates, "ours": ours, "verdict": verdicts | lacking}
    if not table["rows"]:
        paper_parts = ", ".join(part for parts in paper.rows.values() for part in parts)
        raise UserError(
            f"--published {name}: no row of {paper.title} is in the results: it is about {paper_parts}"
        )
    return table


def _is_in(task: str, part: str) -> bool:
    """``task``: "suite: task", or "task"; ``part``: a suite or a task."""
    suite, _, name = task.rpartition(": ")
    return part in (suite, name)


def _verdict(paper: float, ours: Sequence[float]) -> str:
    low, high = ours
    return "agrees" if low <= paper <= high else "above" if low > paper else "below"

"""Present the timing of a control loop on the console and in the report.

``document`` always has the contents of control.json.
"""

from __future__ import annotations

from typing import Any

from rich.table import Column, Table

from rlinf_vla.telemetry import charts
from rlinf_vla.telemetry.console import duration

SECTIONS = {
    "lateness": "start of the tick after its due time",
    "observe": "robot state",
    "camera": "newest images",
    "prepare": "policy: tokens, pixels",
    "encode": "policy: backbone",
    "act": "policy: action head",
    "safety": "robot: limits",
    "command": "command sent",
    "tick": "from due time to end",
    "jitter": "of the time between two commands",
}
"""Sections of a control step, in order; sections not listed here are shown after them."""
QUANTILES = ("p50", "p99", "p99.9", "max")
_CHART = ((8.4, 2.4), (3.5, 2.4))
"""Sizes of the chart in inches, for wide screens and for phones."""


def control_table(document: dict[str, Any]) -> Table:
    columns = (
        Column(name, justify="right")
        for name in ("n", *(f"{quantile} ms" for quantile in QUANTILES))
    )
    table = Table("", *columns, title=summary(document), title_justify="left", show_edge=False)
    for cells in rows(document):
        table.add_row(*cells)
    return table


def summary(document: dict[str, Any]) -> str:
    """One line with rate, duration, missed deadlines, steps, rejected chunks and interventions."""
    steps, chunks = document["steps"], document["chunks"]
    parts = [
        f"{document['control_hz']:g} Hz for {duration(document['seconds'])}",
        f"{document['missed']} deadlines missed",
    ]
    parts += [f"{count} steps {name}" for name, count in steps.items() if count]
    parts += [
        f"{count} chunks {name.replace('_', ' ')}"
        for name, count in chunks.items()
        if count and name != "accepted"
    ]
    parts += [f"{count} × {rule}" for rule, count in document["interventions"].items()]
    return ", ".join(parts)


def rows(document: dict[str, Any]) -> list[list[str]]:
    """Return a row per section and age: name, number of samples, QUANTILES in milliseconds."""
    sections, ages = document["sections_ms"], document["ages_ms"]
    names = [name for name in SECTIONS if name in sections] + [
        name for name in sections if name not in SECTIONS
    ]
    blocks = [
        (f"{name}: {SECTIONS[name]}" if name in SECTIONS else name, sections[name])
        for name in names
    ]
    blocks += [
        (f"age of {'the observation behind an action' if name == 'action' else name}", block)
        for name, block in ages.items()
    ]
    return [
        [name, str(block["n"]), *(f"{block[quantile]:.2f}" for quantile in QUANTILES)]
        for name, block in blocks
    ]


def section(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a page shows of the control loop; empty where a run controlled no robot."""
    if not document:
        return {}
    counts = document["left_per_tenth"]
    period = 1e3 / document["control_hz"]
    edges = [index * period / 10 for index in range(len(counts))]
    return {
        "summary": summary(document),
        "rows": [(name, *quantiles) for name, _, *quantiles in rows(document)],
        "period_ms": period,
        "charts": [
            charts.histogram(edges, counts, period, "milliseconds after the tick was due", size)
            for size in _CHART
        ],
    }

"""Present control-loop timing on the console, in TensorBoard and in the report.

``document`` always has the contents of control.json.
"""

from __future__ import annotations

from html import escape
from typing import Any

from rich.table import Table

from rlinf_vla.telemetry import charts
from rlinf_vla.telemetry.console import duration
from rlinf_vla.telemetry.page import panel, section

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

_WIDE, _NARROW = (8.4, 2.4), (3.5, 2.4)


def control_table(document: dict[str, Any]) -> Table:
    table = Table(title=summary(document), title_justify="left", show_edge=False)
    table.add_column("")
    for name in ("n", *QUANTILES):
        table.add_column(name if name == "n" else f"{name} ms", justify="right")
    for name, cells in _rows(document):
        table.add_row(name, *cells)
    return table


def summary(document: dict[str, Any]) -> str:
    """One line with rate, duration, missed deadlines, steps, rejected chunks and interventions."""
    steps, chunks = document["steps"], document["chunks"]
    parts = [f"{document['control_hz']:g} Hz for {duration(document['seconds'])}", f"{document['missed']} deadlines missed"]
    parts += [f"{count} steps {name}" for name, count in steps.items() if count]
    parts += [f"{count} chunks {name.replace('_', ' ')}" for name, count in chunks.items() if count and name != "accepted"]
    parts += [f"{count} × {rule}" for rule, count in document["interventions"].items()]
    return ", ".join(parts)


def control_scalars(document: dict[str, Any]) -> dict[str, float]:
    """Return the document as metrics named ``control/...``; times are in milliseconds."""
    found: dict[str, float] = {"control/missed": document["missed"], "control/interventions": sum(document["interventions"].values())}
    found |= {f"control/steps_{name}": count for name, count in document["steps"].items()}
    found |= {f"control/chunks_{name}": count for name, count in document["chunks"].items()}
    for kind, blocks in (("", document["sections_ms"]), ("age_", document["ages_ms"])):
        found |= {f"control/{kind}{name}_ms_{each}": block[each] for name, block in blocks.items() for each in QUANTILES}
    return found


def control_panel(document: dict[str, Any]) -> str:
    """Return the section of the report, empty where the run controlled no robot."""
    if not document:
        return ""
    heads = "".join(f"<th>{each} ms</th>" for each in QUANTILES)
    rows = ""
    for name, (_, *cells) in _rows(document):
        rows += f"<tr><th scope=row>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
    table = f"<div class=scroll><table><thead><tr><th></th>{heads}</tr></thead>{rows}</table></div>"
    counts = document["left_per_tenth"]
    period = 1e3 / document["control_hz"]
    edges = [place * period / 10 for place in range(len(counts))]
    drawn = [charts.histogram(edges, counts, period, "milliseconds after the tick was due", size) for size in (_WIDE, _NARROW)]
    figure = panel("When commands left", f"the next tick is due at {period:g} ms; the last bar counts all later commands", *drawn)
    return section("Control loop", f'<div class="panels">{figure}</div>{table}', f"{summary(document)}.")


def _rows(document: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and cells: n, then QUANTILES."""
    sections, ages = document["sections_ms"], document["ages_ms"]
    names = [name for name in SECTIONS if name in sections] + [name for name in sections if name not in SECTIONS]
    found = [(f"{name}: {SECTIONS[name]}" if name in SECTIONS else name, sections[name]) for name in names]
    found += [(f"age of {'the observation behind an action' if name == 'action' else name}", block) for name, block in ages.items()]
    return [(name, [str(block["n"]), *(f"{block[each]:.2f}" for each in QUANTILES)]) for name, block in found]

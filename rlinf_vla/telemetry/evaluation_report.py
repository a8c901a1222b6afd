"""Present a sweep: tables on the console, and ``report.html`` with videos and provenance.

``document`` always has the contents of result.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from rlinf_vla.telemetry.page import machine_line, read_videos, write_page


class Film(NamedTuple):
    policy: str
    suite: str
    task: str
    path: Path


def print_tables(document: dict[str, Any]) -> None:
    """Print success rates and paired differences."""
    console = Console(highlight=False)
    console.print(success_table(document))
    if document["differences"]:
        console.print(differences_table(document))
    if lost := _lost(document):
        console.print(f"lost: {lost}")


def write_report(directory: Path, document: dict[str, Any], films: Sequence[Film]) -> Path:
    """Write ``directory/report.html`` atomically; return its path."""
    groups, left_out, unreadable = read_videos(
        [[(film.path, film.policy, film.task)] for film in _in_turns(films)]
    )
    videos = [video for group in groups for video in group]
    return write_page(
        directory / "report.html",
        "evaluation.html",
        **content(document),
        videos=videos,
        left_out=left_out + len(unreadable),
    )


def content(document: dict[str, Any]) -> dict[str, Any]:
    """Return what every page about the sweep shows, but for videos."""
    counts = {block["n_episodes"] for block in document["policies"].values()}
    episodes = " or ".join(f"{count:,}" for count in sorted(counts))
    tasks = sum(len(part["tasks"]) for part in document["suites"])
    lost = _lost(document)
    details = [("Machine and software", document["environment"])]
    for part in document["suites"]:
        details.append(
            (
                f"Simulator of {part['suite']}: {_few(part['tasks'])}",
                {key: part[key] for key in part if key != "tasks"},
            )
        )
    details += [(f"Policy {name}", policy) for name, policy in document["provenance"].items()]
    return {
        "kind": "Evaluation",
        "name": document["name"],
        "header": [
            f"{len(document['provenance'])} policies on {tasks} tasks, {episodes} episodes each",
            machine_line(document["environment"]),
            f"Lost: {lost}" if lost else "",
        ],
        "policies": list(document["policies"]),
        "rows": rows(document),
        "differences": _difference_rows(document),
        "details": [*details, ("Recipe", document["recipe"])],
    }


def rows(document: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any] | None]]]:
    """Return table rows (suite, task, one block per policy).

    Each task has a row, then each suite of several tasks (task is empty), then, where there are
    several suites, the total (suite and task are empty).
    """
    policies = list(document["policies"].values())
    suites: dict[str, list[str]] = {}
    for policy in policies:
        for suite, block in policy["per_suite"].items():
            suite_tasks = suites.setdefault(suite, [])
            suite_tasks += [task for task in block["per_task"] if task not in suite_tasks]
    table: list[tuple[str, str, list[dict[str, Any] | None]]] = []
    for suite, tasks in suites.items():
        of_suite = [policy["per_suite"].get(suite) for policy in policies]
        table += [
            (suite, task, [block and block["per_task"].get(task) for block in of_suite])
            for task in tasks
        ]
        if len(tasks) > 1:
            table.append((suite, "", of_suite))
    return [*table, ("", "", policies)] if len(suites) > 1 else table


def success_table(document: dict[str, Any]) -> Table:
    policies = (Column(name, justify="right", overflow="fold") for name in document["policies"])
    table = Table(
        "suite",
        "task",
        *policies,
        title="success, with its 95 % interval (Wilson)",
        title_justify="left",
        show_edge=False,
    )
    for suite, task, blocks in rows(document):
        cells = [suite or "all", task or "all tasks", *map(_cell, blocks)]
        table.add_row(*cells, style=None if task else "bold", end_section=not task)
    return table


def differences_table(document: dict[str, Any]) -> Table:
    columns = (
        "policies",
        "suite",
        "pairs",
        "gained",
        "lost",
        "difference (95 %, Newcombe)",
        "p (McNemar)",
        "better, at any time",
    )
    table = Table(
        *(Column(name, overflow="fold") for name in columns),
        title="paired differences, on the same episodes",
        title_justify="left",
        show_edge=False,
    )
    for cells in _difference_rows(document):
        table.add_row(*cells)
    return table


def _cell(block: dict[str, Any] | None) -> str:
    """Format a block as ``46/50  92.0 % (81 to 97)``."""
    if block is None:
        return "–"
    low, high = block["pc_success_ci95"]
    return f"{block['n_success']}/{block['n_episodes']}  {block['pc_success']:.1f} % ({low:.0f} to {high:.0f})"


def _difference_rows(document: dict[str, Any]) -> list[list[str]]:
    """Return policies, suite, pairs, gained, lost, percentage points (95 % interval), p, and the
    decision that holds at any time."""
    table = []
    for difference in document["differences"]:
        low, high = difference["pc_difference_ci95"]
        points = f"{difference['pc_difference']:+.1f} ({low:+.1f} to {high:+.1f})"
        counts = [str(difference[name]) for name in ("n_pairs", "n_gained", "n_lost")]
        results = [points, _p_value(difference["p_value"]), _decision(difference)]
        table.append(
            [
                f"{difference['before']} → {difference['after']}",
                difference["suite"] or "all",
                *counts,
                *results,
            ]
        )
    return table


def _decision(difference: dict[str, Any]) -> str:
    """Format the anytime-valid comparison as ``start after 23 rounds, p = 0.012``."""
    comparison = difference["anytime"]
    verdict = (
        "undecided"
        if comparison["better"] is None
        else f"{difference[comparison['better']]} after {comparison['decided_after']} rounds"
    )
    p = _p_value(comparison["p_value"])
    return f"{verdict}, p {p if p.startswith('<') else f'= {p}'}"


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _lost(document: dict[str, Any]) -> str:
    return ", ".join(f"{count} {what}" for what, count in document["lost"].items() if count)


def _in_turns(films: Sequence[Film]) -> list[Film]:
    """Order films: one per policy and task before any second one."""
    groups: dict[tuple[str, str, str], list[Film]] = {}
    for film in films:
        groups.setdefault(film[:3], []).append(film)
    return [film for turn in zip_longest(*groups.values()) for film in turn if film is not None]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""Print a sweep's success rates and paired differences on the console."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_tables(document: dict[str, Any]) -> None:
    """Print success rates and paired differences; ``document`` has the contents of result.json."""
    console = Console(highlight=False)
    console.print(success_table(document))
    if document["differences"]:
        console.print(differences_table(document))
    lost = [f"{count} {what}" for what, count in document["lost"].items() if count]
    if lost:
        console.print(f"lost and replaced: {', '.join(lost)}")


def rows(document: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any] | None]]]:
    """Return table rows (suite, task, one block per policy).

    Each task has a row, then each suite of several tasks (task is empty), then, where there are
    several suites, the total (suite and task are empty).
    """
    policies = list(document["policies"].values())
    suites: dict[str, list[str]] = {}
    for policy in policies:
        for suite, block in policy["per_suite"].items():
            known = suites.setdefault(suite, [])
            known += [task for task in block["per_task"] if task not in known]
    found: list[tuple[str, str, list[dict[str, Any] | None]]] = []
    for suite, tasks in suites.items():
        of_suite = [policy["per_suite"].get(suite) for policy in policies]
        found += [(suite, task, [block and block["per_task"].get(task) for block in of_suite]) for task in tasks]
        if len(tasks) > 1:
            found.append((suite, "", of_suite))
    return [*found, ("", "", policies)] if len(suites) > 1 else found


def success_table(document: dict[str, Any]) -> Table:
    table = Table(title="success, with its 95 % interval (Wilson)", title_justify="left", show_edge=False)
    table.add_column("suite")
    table.add_column("task")
    for name in document["policies"]:
        table.add_column(name, justify="right")
    for suite, task, blocks in rows(document):
        cells = [suite or "all", task or "all tasks", *(cell(block) for block in blocks)]
        table.add_row(*cells, style=None if task else "bold", end_section=not task)
    return table


def differences_table(document: dict[str, Any]) -> Table:
    table = Table(title="paired differences, on the same episodes", title_justify="left", show_edge=False)
    for column in ("policies", "suite", "pairs", "gained", "lost", "difference (95 %, Newcombe)", "p (McNemar)"):
        table.add_column(column)
    for each in document["differences"]:
        who, suite = f"{each['before']} → {each['after']}", each["suite"] or "all"
        table.add_row(who, suite, str(each["n_pairs"]), str(each["n_gained"]), str(each["n_lost"]), difference(each), p_value(each))
    return table


def cell(block: dict[str, Any] | None) -> str:
    """Format a block as ``46/50  92.0 % (81 to 97)``."""
    if block is None:
        return "–"
    low, high = block["pc_success_ci95"]
    return f"{block['n_success']}/{block['n_episodes']}  {block['pc_success']:.1f} % ({low:.0f} to {high:.0f})"


def difference(block: dict[str, Any]) -> str:
    low, high = block["pc_difference_ci95"]
    return f"{block['pc_difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def p_value(block: dict[str, Any]) -> str:
    return "< 0.001" if block["p_value"] < 0.001 else f"{block['p_value']:.3f}"

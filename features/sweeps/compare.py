"""Compare methods on recorded evaluations: the episodes of one or several training runs of each.

What is recorded is a sweep's result.json, or evaluation/NAME.json of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from rlinf_vla.config.arguments import Parser
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import MODES
from rlinf_vla.core.io import read_document, write_json
from rlinf_vla.evaluation.statistics import (
    Episode,
    anytime_comparison,
    column_of,
    grouped,
    paired_episodes,
    task_of,
)
from rlinf_vla.features.sweeps import aggregate
from rlinf_vla.features.sweeps.aggregate import Outcomes
from rlinf_vla.features.sweeps.published import beside_published
from rlinf_vla.features.sweeps.results import FORMAT
from rlinf_vla.telemetry.tables import JSON, print_json

THRESHOLDS = np.linspace(0, 1, 21)
"""Success rates at which a performance profile is stated."""
FIGURES = (".svg", ".png", ".pdf")
WANTED = "give result.json of a sweep, or evaluation/NAME.json of a run"
RATE = "{pc_success:.1f} % ({pc_success_ci95[0]:.1f} to {pc_success_ci95[1]:.1f})"
GAIN = "{pc_difference:+.1f} points ({pc_difference_ci95[0]:+.1f} to {pc_difference_ci95[1]:+.1f})"
EXAMPLE = "rlinf-vla compare ppo=a/evaluation/after.json:greedy,b/evaluation/after.json:greedy sft=c/result.json:start"


def run(arguments: Sequence[str]) -> int:
    """Print tables, or all values with ``--json``; write all values to ``--output`` and a figure to
    ``--figure``.

    Raises UserError for files it cannot use.
    """
    methods, output, figure, published, as_json = _read_arguments(arguments)
    runs = {
        name: [episodes_at(location) for location in locations]
        for name, locations in methods.items()
    }
    document = comparison(runs)
    if published is not None:
        document["published"] = beside_published(
            published, {name: Outcomes(episodes) for name, episodes in runs.items()}
        )
    try:
        if output is not None:
            write_json(output, document)
        if figure is not None:
            from rlinf_vla.features.sweeps.comparison_figure import write_figure

            figure.parent.mkdir(parents=True, exist_ok=True)
            write_figure(document["methods"], figure)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--output {output}, --figure {figure}: cannot be written ({error})"
        ) from None
    if as_json:
        print_json(document)
    else:
        print_comparison(document)
    for path, what in ((output, "all values, profiles and times to success"), (figure, "figure")):
        if path is not None:
            print(f"{what}: {path}", file=sys.stderr if as_json else sys.stdout)
    return 0


def comparison(runs: dict[str, list[list[Episode]]]) -> dict[str, Any]:
    """Return all statistics of ``runs``: method -> episodes of each of its training runs.

    ``methods``: name -> n_runs, n_tasks, n_episodes, the mean success rate over runs and tasks with
    its hierarchical interval, the same of each task (``per_task``), the interquartile mean and the
    performance profile with intervals (null with one run), time to success.
    ``differences``: of each pair, the hierarchical difference, in all and per task; with one run
    each also the comparison of the episodes that both played (``paired``) or, if they share none of
    some task, the sequential one of all (``unpaired``), and how many episodes that at any time
    leaves out (``n_left_out``). Methods that played different tasks have no difference.
    Raises UserError if tasks of a method's runs differ, or if a run played an episode twice.
    """
    runs = _same_names(runs)
    outcomes = dict[str, Outcomes]()
    for name, episodes in runs.items():
        try:
            outcomes[name] = Outcomes(episodes)
        except ValueError as error:
            raise UserError(
                f"{name} cannot be summarised ({error}): its runs must have played the same tasks, every seed once"
            ) from None
    limit = max(
        episode["steps"] for episodes in runs.values() for run in episodes for episode in run
    )
    return {
        "methods": {
            name: _summary(outcome, [e for run in runs[name] for e in run], limit)
            for name, outcome in outcomes.items()
        },
        "differences": [
            _difference(runs, outcomes, *pair)
            for pair in combinations(runs, 2)
            if outcomes[pair[0]].tasks == outcomes[pair[1]].tasks
        ],
    }


def _same_names(runs: dict[str, list[list[Episode]]]) -> dict[str, list[list[Episode]]]:
    """Return ``runs`` without suites if some episodes have none and tasks are named distinctly."""
    all_episodes = [episode for episodes in runs.values() for run in episodes for episode in run]
    named = {task_of(episode): episode["task"] for episode in all_episodes if "suite" in episode}
    if all("suite" in episode for episode in all_episodes) or len(set(named.values())) < len(named):
        return runs
    return {
        name: [
            [{k: v for k, v in episode.items() if k != "suite"} for episode in run]
            for run in method_runs
        ]
        for name, method_runs in runs.items()
    }


def _summary(outcomes: Outcomes, episodes: list[Episode], limit: int) -> dict[str, Any]:
    count, tasks = outcomes.scores.shape
    middle = aggregate.interquartile_mean(outcomes.scores)
    profile = aggregate.performance_profile(outcomes.scores, THRESHOLDS)
    middle_band = profile_band = None
    if count > 1:
        middle_band = [100 * end for end in aggregate.interquartile_interval(outcomes)]
        profile_band = (100 * np.transpose(aggregate.profile_interval(profile, count))).tolist()
    return {
        "n_runs": count,
        "n_tasks": tasks,
        "n_episodes": int(outcomes.played.sum()),
        **aggregate.success(outcomes),
        "per_task": {task: aggregate.success(outcomes.of([task])) for task in outcomes.tasks},
        "pc_interquartile_mean": 100 * float(middle),
        "pc_interquartile_mean_ci95": middle_band,
        "profile": {
            "pc_threshold": (100 * THRESHOLDS).tolist(),
            "pc_above": (100 * profile).tolist(),
            "pc_above_ci95": profile_band,
        },
        "time_to_success": aggregate.time_to_success(episodes, max(1, limit)),
    }


def _gain(before: Outcomes, after: Outcomes) -> dict[str, Any]:
    difference, interval = aggregate.hierarchical_difference(before, after)
    return {
        "pc_difference": 100 * difference,
        "pc_difference_ci95": [100 * end for end in interval],
    }


def _difference(
    runs: dict[str, list[list[Episode]]], outcomes: dict[str, Outcomes], before: str, after: str
) -> dict[str, Any]:
    pair = outcomes[before], outcomes[after]
    difference: dict[str, Any] = {"before": before, "after": after} | _gain(*pair)
    difference["per_task"] = {
        task: _gain(*(outcome.of([task]) for outcome in pair)) for task in pair[0].tasks
    }
    if len(runs[before]) == len(runs[after]) == 1:
        first, second = runs[before][0], runs[after][0]
        if all(set(a) & set(b) for a, b in zip(*(outcome.seeds for outcome in pair), strict=True)):
            difference["paired"] = paired_episodes(first, second)
        else:
            difference["unpaired"] = anytime_comparison(first, second)
        rounds = _at_any_time(difference)["n_rounds"]
        difference["n_left_out"] = (
            len(first) + len(second) - 2 * rounds * len(difference["per_task"])
        )
    return difference


def _at_any_time(difference: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison at any time; empty with several runs."""
    return difference.get("unpaired") or difference.get("paired", {}).get("anytime", {})


def print_comparison(document: dict[str, Any]) -> None:
    """Print the tables of what ``comparison`` returned."""
    console = Console(highlight=False, markup=False)
    heads = (
        "runs",
        "tasks",
        "episodes",
        "success (95 %)",
        "interquartile mean (95 %)",
        "half solved within",
    )
    table = Table("method", *(Column(head, justify="right") for head in heads), show_edge=False)
    for name, method in document["methods"].items():
        middle = method["pc_interquartile_mean"]
        band = method["pc_interquartile_mean_ci95"]
        times = method["time_to_success"]
        half = next(
            (step for step, pc in zip(times["steps"], times["pc_solved"], strict=True) if pc >= 50),
            None,
        )
        cells = [str(method[key]) for key in ("n_runs", "n_tasks", "n_episodes")]
        cells.append(RATE.format(**method))
        cells.append(
            f"{middle:.1f} %"
            + (f" ({band[0]:.1f} to {band[1]:.1f})" if band else " (one run: no interval)")
        )
        table.add_row(name, *cells, "never" if half is None else f"{half} steps")
    console.print(table)
    for difference in document["differences"]:
        line = GAIN.format(**difference)
        if "paired" in difference:
            line += "; on the same {n_pairs} episodes {n_gained} gained, {n_lost} lost, McNemar p = {p_value:.3g}".format(
                **difference["paired"]
            )
        if decision := _at_any_time(difference):
            verdict = (
                "neither is shown to be better"
                if decision["better"] is None
                else f"{difference[decision['better']]} is better"
            )
            where = (
                ""
                if decision["decided_after"] is None
                else f", known after {decision['decided_after']} rounds"
            )
            line += f"; at any time: {verdict}{where}, p = {decision['p_value']:.3g}"
            if difference["n_left_out"]:
                line += f" ({difference['n_left_out']} episodes left out: a round is one of each task and method)"
        console.print(f"{difference['before']} → {difference['after']} (95 %): {line}")
    methods = document["methods"]
    compared = {
        (difference["before"], difference["after"]) for difference in document["differences"]
    }
    for before, after in combinations(methods, 2):
        if (before, after) not in compared:
            console.print(f"{before} → {after}: not compared, they played different tasks")
    gains = [
        difference
        for difference in document["differences"]
        if difference["before"] == next(iter(methods))
    ]
    table = Table(
        "task (95 %)",
        *methods,
        *(f"{gain['before']} → {gain['after']}" for gain in gains),
        show_edge=False,
    )
    for task in next(iter(methods.values()))["per_task"]:
        rates = (
            RATE.format(**method["per_task"][task]) if task in method["per_task"] else ""
            for method in methods.values()
        )
        table.add_row(task, *rates, *(GAIN.format(**gain["per_task"][task]) for gain in gains))
    if table.row_count > 1:
        console.print(table)
    if "published" in document:
        _print_published(console, document["published"])


def _print_published(console: Console, published: dict[str, Any]) -> None:
    papers, ours = (
        list(dict.fromkeys(name for row in published["rows"].values() for name in row[part]))
        for part in ("paper", "ours")
    )
    table = Table(
        "published",
        *(f"{name}, paper" for name in papers),
        *(f"{name}, here" for name in ours),
        show_edge=False,
    )
    for name, row in published["rows"].items():
        rates = (
            RATE.format(**row["ours"][method]) if method in row["ours"] else "" for method in ours
        )
        verdicts = (
            f": {row['verdict'][method]}" if method in row["verdict"] else "" for method in ours
        )
        table.add_row(
            name,
            *(f"{row['paper'][method]:.1f} %" for method in papers),
            *map("".join, zip(rates, verdicts, strict=True)),
        )
    console.print(table)
    missing = (
        f"; not in these results: {', '.join(published['missing'])}" if published["missing"] else ""
    )
    console.print(f"{published['title']} ({published['source']}); {published['note']}{missing}")


def episodes_at(location: str) -> list[Episode]:
    """Return the episodes of a column, ``FILE[:COLUMN]``. Raises UserError."""
    file, _, column = (
        (location, "", "") if Path(location).expanduser().is_file() else location.rpartition(":")
    )
    path = Path(file or column).expanduser()
    column = column if file else ""
    document = read_document(path, WANTED)
    columns = _columns(document) if isinstance(document, dict) else {}
    if not columns:
        raise UserError(f"{path} holds no episodes: {WANTED}")
    if column not in columns and (column or len(columns) > 1):
        raise UserError(
            f"{location} names no column of {path}: write FILE:COLUMN with one of {', '.join(columns)}"
        )
    episodes = columns[column or next(iter(columns))]
    for number, episode in enumerate(episodes):
        kinds = {"task": str, "seed": int, "success": bool, "steps": int}
        if not isinstance(episode, dict) or not all(
            isinstance(episode.get(key), kind) for key, kind in kinds.items()
        ):
            raise UserError(f"{path} is damaged (episode {number}): take another copy of it")
    return episodes


def _columns(document: dict[str, Any]) -> dict[str, list[Episode]]:
    """Return the episodes of each policy and probe of a sweep, or of each mode of an evaluation."""
    if document.get("format") == FORMAT and isinstance(document.get("episodes"), list):
        rows = [episode for episode in document["episodes"] if isinstance(episode, dict)]
        return grouped(
            [
                row | {"column": column_of(str(row.get("policy")), str(row.get("probe")))}
                for row in rows
            ],
            "column",
        )
    modes = {
        mode: document[mode].get("episodes")
        for mode in MODES
        if isinstance(document.get(mode), dict)
    }
    return {
        mode: episodes
        for mode, episodes in modes.items()
        if isinstance(episodes, list) and episodes
    }


def _read_arguments(
    arguments: Sequence[str],
) -> tuple[dict[str, list[str]], Path | None, Path | None, str | None, bool]:
    parser = Parser("compare", EXAMPLE)
    parser.add_argument("methods", nargs="+", metavar="NAME=FILE[:COLUMN][,FILE...]")
    parser.add_argument("--output", metavar="FILE.json")
    parser.add_argument("--figure", metavar="FILE.svg")
    parser.add_argument("--published", metavar="NAME")
    parser.add_argument(JSON, action="store_true")
    options = parser.parse_args(arguments)
    methods: dict[str, list[str]] = {}
    for argument in options.methods:
        name, _, files = argument.partition("=")
        if not name or not all(files.split(",")):
            parser.error(f"{argument} is not NAME=FILE")
        if name in methods:
            parser.error(f"{name} is given twice: separate the files of a method by commas")
        if len({Path(file).expanduser().absolute() for file in files.split(",")}) < len(
            files.split(",")
        ):
            parser.error(f"{argument} names a run twice: a run counts once")
        methods[name] = files.split(",")
    output, figure = (
        Path(file).expanduser() if file else None for file in (options.output, options.figure)
    )
    if figure is not None and figure.suffix not in FIGURES:
        parser.error(f"--figure {figure} must end in {', '.join(FIGURES)}")
    return methods, output, figure, options.published, options.json

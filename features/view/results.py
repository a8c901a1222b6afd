"""Read a run or a sweep for its page, finished or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlinf_vla.core.io import read_json
from rlinf_vla.evaluation.statistics import column_of, compare
from rlinf_vla.features.sweeps.results import tables
from rlinf_vla.runtime.run_directory import BLOCKS, RECIPE, RESULT, recipe_values
from rlinf_vla.telemetry import charts, evaluation_report, report
from rlinf_vla.telemetry.page import title_of
from rlinf_vla.telemetry.run_files import MOMENTS, Run, check_inside

SUCCESS = "rollout/success_once"


def run(found: Run, directory: Path) -> dict[str, Any]:
    """Return what ``run.html`` shows. Damaged files are named in its list of problems."""
    of = int(found.recipe.get("iterations") or 0)
    last = found.metrics[-1]["step"] if found.metrics else 0
    content = report.content(found) | {"kind": "Training run" if of else "Evaluation"}
    content["header"] = [
        str(directory),
        f"iteration {last:,} of {of:,}" if of else "",
        *content["header"],
    ]
    names = sorted(
        {name for row in found.metrics for name in row}
        - {"step", "time", SUCCESS}
        - report.CURVES.keys()
    )
    curves = [
        _success(found),
        *(_curve(found, *item) for item in report.CURVES.items()),
        *(_curve(found, name, name) for name in names),
    ]
    columns = sorted({moment for files in found.videos.values() for moment in files}, key=_order)
    films = {
        episode: {moment: _film(directory, path) for moment, path in files.items()}
        for episode, files in sorted(
            found.videos.items(), key=lambda item: (-len(item[1]), item[0])
        )
    }
    drawn = [curve for curve in curves if curve["lines"] or curve["dots"]]
    data = {
        "x": "iteration",
        "curves": drawn,
        "main": len(drawn) - len(names),
        "films": {"columns": columns, "rows": films},
    }
    return content | {"evaluations": _evaluations(found), "data": data}


def what_can_be_shown(found: Run, show: Callable[[Run], str]) -> str:
    """Return the page of all parts of a run with which ``show`` succeeds; its list of problems
    names the others."""
    fields = (
        "recipe",
        "environment",
        "metrics",
        "comparison",
        "control",
        "iteration",
        "timeline",
        "predicted",
        "videos",
    )
    parts: list[tuple[str, str, Any]] = [
        (f"evaluation/{moment}.json", "evaluations", {moment: document})
        for moment, document in found.evaluations.items()
    ]
    parts += [(name, name, getattr(found, name)) for name in fields]
    partial_run = Run(found.name, problems=found.problems)
    for name, field, value in parts:
        more = replace(
            partial_run,
            **{field: partial_run.evaluations | value if field == "evaluations" else value},
        )
        try:
            show(more)
            partial_run = more
        except Exception as error:  # of a value that is not what its name says
            partial_run.problems.append(
                f"{name} cannot be shown ({type(error).__name__}: {str(error)[:200]})"
            )
    return show(partial_run)


def _order(moment: str) -> tuple[int, str]:
    """Put evaluations in the order of training."""
    return {"before": 0, "start": 0, "after": 2}.get(moment, 1), moment


def _evaluations(run: Run) -> list[dict[str, Any]]:
    """Return the blocks of each evaluation by mode, and its difference to the one before."""
    rows = []
    first = run.evaluations.get(MOMENTS[0], {})
    for moment in sorted(run.evaluations, key=_order):
        document = run.evaluations[moment]
        gains = {}
        if first and document is not first:
            with suppress(
                KeyError, TypeError, ValueError
            ):  # of a damaged file: its rates are shown
                gains = compare(first, document)
        rows += [
            {"moment": moment, "mode": mode, "block": block, "gain": gains.get(mode)}
            for mode, block in document.items()
        ]
    return rows


def _success(run: Run) -> dict[str, Any]:
    steps, rates = run.series(SUCCESS)
    curve = _drawn(
        "Success",
        steps,
        {"rollouts": rates, "mean of 5": charts.trailing_mean(rates).tolist()} if rates else {},
    )
    return curve | {
        "dots": [list(point) for point in report.evaluation_points(run)],
        "range": [0, 1],
    }


def _curve(run: Run, name: str, title: str) -> dict[str, Any]:
    steps, values = run.series(name)
    return _drawn(title, steps, {name: values} if steps else {})


def _drawn(title: str, x: list[int], lines: dict[str, list[float]]) -> dict[str, Any]:
    thin = {name: charts.thin(x, values) for name, values in lines.items()}
    steps = next(iter(thin.values()))[0].tolist() if thin else []
    return {
        "title": title,
        "x": steps,
        "lines": {name: _finite(values.tolist()) for name, (_, values) in thin.items()},
        "dots": [],
    }


def _finite(values: list[float]) -> list[float | None]:
    """Replace NaN, which JSON lacks."""
    return [value if value == value else None for value in values]


def _film(directory: Path, path: Path) -> dict[str, str]:
    return {
        "source": f"videos/{path.name}",
        "title": _title(directory, path, path.stat().st_mtime_ns),
    }


@lru_cache(4096)
def _title(directory: Path, path: Path, written: int) -> str:
    try:
        check_inside(directory, path)
        return title_of(path)
    except Exception as error:  # a partial film must not prevent the rest of the page
        return f"{path.name} cannot be read ({error})"


def sweep(directory: Path, show: Callable[[dict[str, Any]], str]) -> str:
    """Return the page of result.json or, if it cannot be shown, of the blocks played so far."""
    blocks = _blocks(directory)
    problems = []
    path = directory / RESULT
    data = {"data": {"curves": [], "films": _films(directory, blocks)}}
    if path.exists():
        try:
            check_inside(directory, path)
            content = evaluation_report.content(read_json(path))
            content["header"] = [str(directory), *content["header"]]
            return show(content | data)
        except Exception as error:  # of a value that is not what its name says
            problems = [f"{RESULT} cannot be read ({type(error).__name__}: {str(error)[:200]})"]
    episodes = [episode for block in blocks for episode in block["episodes"]]
    content = evaluation_report.content(_partial(directory, episodes))
    content["header"] = [
        str(directory),
        f"{len(episodes):,} episodes so far: the sweep is not finished",
        *problems,
    ]
    return show(content | data)


def _blocks(directory: Path) -> list[dict[str, Any]]:
    """Return the blocks that can be read, in the order in which the sweep lists them."""
    blocks = []
    for path in sorted((directory / BLOCKS).glob("*.json")):
        with suppress(Exception):  # a block that is damaged or still being written
            check_inside(directory, path)
            document = read_json(path)
            tables(document["episodes"])
            first = document["episodes"][0]
            block = document["block"]
            indices = tuple(int(block[key]) for key in ("policy", "suite", "task"))
            names = (
                column_of(first["policy"], first["probe"]),
                str(first["suite"]),
                str(first["task"]),
            )
            blocks.append({"places": indices, "names": names, "episodes": document["episodes"]})
    return blocks


def _partial(directory: Path, episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the document of an unfinished sweep: what is known without its end."""
    recipe: dict[str, Any] = {}
    with suppress(Exception):
        check_inside(directory, directory / RECIPE)
        recipe = recipe_values(directory / RECIPE)
    suites: dict[str, list[str]] = {}
    for episode in episodes:
        if episode["task"] not in (tasks := suites.setdefault(episode["suite"], [])):
            tasks.append(episode["task"])
    head = {
        "name": recipe.get("name", directory.resolve().name),
        "recipe": recipe,
        "environment": {},
        "lost": {},
    }
    head["provenance"] = {episode["policy"]: {} for episode in episodes}
    head["suites"] = [{"suite": suite, "tasks": tasks} for suite, tasks in suites.items()]
    return head | (tables(episodes) if episodes else {"policies": {}, "differences": []})


def _films(directory: Path, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the films of each episode by policy, under the names that blocks give to places."""
    columns = {block["places"][0]: block["names"][0] for block in blocks}
    tasks = {block["places"][1:]: ": ".join(block["names"][1:]) for block in blocks}
    rows: dict[str, dict[str, Any]] = {}
    used: dict[str, None] = {}
    for path in sorted((directory / "videos").glob("*.mp4")):
        try:
            policy, suite, task, seed = map(int, path.stem.split("_"))
        except ValueError:
            continue
        column = columns.get(policy, f"policy {policy}")
        rows.setdefault(
            f"{tasks.get((suite, task), f'suite {suite}, task {task}')}, seed {seed}", {}
        )[column] = _film(directory, path)
        used[column] = None
    return {
        "columns": list(used),
        "rows": dict(sorted(rows.items(), key=lambda item: (-len(item[1]), item[0]))),
    }

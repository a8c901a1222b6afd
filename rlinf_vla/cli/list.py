"""List the installed recipes, presets, models, environments, tasks, rewards and robots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files

from rich.console import Console
from rich.table import Table

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins


def run(arguments: Sequence[str]) -> None:
    """Print the lists that ``arguments`` names, or all. Raises UserError for an unknown list."""
    tables = {
        "recipes": _recipes,
        "presets": _presets,
        "models": _models,
        "envs": _envs,
        "tasks": _tasks,
        "rewards": _rewards,
        "robots": _robots,
    }
    for word in arguments or list(tables):
        if word not in tables:
            raise UserError(f"list {word}: no such list{plugins.nearest(word, list(tables))} (lists: {', '.join(tables)})")
        Console(highlight=False).print(tables[word]())


def recipe_names(group: str = "recipe") -> dict[str, str]:
    """Return name -> first comment line of its YAML file. ``group``: recipe or preset."""
    folder = files("rlinf_vla.recipes") / group
    texts = {path.name.removesuffix(".yaml"): path.read_text() for path in folder.iterdir() if path.name.endswith(".yaml")}
    return {name: _first_sentence(texts[name]) for name in sorted(texts)}


def _first_sentence(text: str) -> str:
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""


def _recipes() -> Table:
    return _table("recipes", ("recipe=", "what it does"), recipe_names().items())


def _presets() -> Table:
    return _table("presets", ("preset=", "published settings of"), recipe_names("preset").items())


def _models() -> Table:
    return _table("models", ("model=", "LoRA targets"), ((name, ", ".join(model.lora_targets)) for name, model in plugins.models().items()))


def _envs() -> Table:
    return _table("environments", ("env=", "tasks"), ((name, str(len(env.tasks()))) for name, env in plugins.envs().items()))


def _rewards() -> Table:
    pages = {name: sys.modules[type(reward).__module__].__doc__ or "" for name, reward in plugins.rewards().items()}
    rows = ((name, page.split("\n")[0].replace("``", "")) for name, page in pages.items())
    return _table("rewards", ("reward=", "what it is"), rows)


def _robots() -> Table:
    rows = ((name, (robot.Config.__doc__ or "").split("\n")[0]) for name, robot in plugins.robots().items())
    return _table("robots", ("robot=", "what it is"), rows)


def _tasks() -> Table:
    rows = []
    for name, env in plugins.envs().items():
        for task in env.tasks():
            state = "ready" if task.available else "needs files"
            rows.append((name, task.name, task.instruction, "yes" if task.has_expert else "", state, task.note))
    return _table("tasks", ("env=", "env.task=", "instruction", "expert", "state", "note"), rows)


def _table(title: str, columns: Sequence[str], rows: object) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:  # type: ignore[attr-defined]
        table.add_row(*row)
    return table

"""List the installed recipes, presets, models, environments, tasks, rewards and robots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.telemetry.tables import JSON, print_json, print_table

Rows = Iterable[Sequence[str]]


def run(arguments: Sequence[str]) -> None:
    """Print the lists that ``arguments`` names, or all. Raises UserError for an unknown list.

    With ``--json``, one object: name of each list -> its rows, each an object by column.
    """
    words = [word for word in arguments if word != JSON] or list(LISTS)
    for word in words:
        if word not in LISTS:
            raise UserError(
                f"list {word}: no such list{plugins.nearest(word, list(LISTS))} (lists: {', '.join(LISTS)})"
            )
    if JSON in arguments:
        print_json(
            {
                word: [dict(zip(LISTS[word][0], row, strict=True)) for row in LISTS[word][1]()]
                for word in words
            }
        )
        return
    for word in words:
        columns, rows = LISTS[word]
        print_table(columns, rows(), title={"envs": "environments"}.get(word, word))


def recipe_names(group: str = "recipe") -> dict[str, str]:
    """Return name -> first comment line of its YAML file. ``group``: recipe or preset."""
    folder = files("rlinf_vla.recipes") / group
    texts = {
        path.name.removesuffix(".yaml"): path.read_text()
        for path in folder.iterdir()
        if path.name.endswith(".yaml")
    }
    return {name: _first_comment(texts[name]) for name in sorted(texts)}


def _first_comment(text: str) -> str:
    comments = [
        line[1:].strip()
        for line in text.splitlines()
        if line.startswith("#") and "@package" not in line
    ]
    return comments[0] if comments else ""


def _models() -> Rows:
    models, options = plugins.models(), plugins.model_options()
    for name in models:
        yield name, ", ".join((options if name in options else models)[name].lora_targets)


def _tasks() -> Rows:
    for name, env in plugins.envs().items():
        for task in env.tasks():
            state = "ready" if task.available else "needs files"
            yield (
                name,
                task.name,
                task.instruction,
                "yes" if task.has_expert else "",
                state,
                task.note,
            )


def _rewards() -> Rows:
    for name, reward in plugins.rewards().items():
        page = sys.modules[type(reward).__module__].__doc__ or ""
        yield name, page.split("\n")[0].replace("``", "")


LISTS: dict[str, tuple[tuple[str, ...], Callable[[], Rows]]] = {
    "recipes": (("recipe=", "what it does"), lambda: recipe_names().items()),
    "presets": (("preset=", "published settings of"), lambda: recipe_names("preset").items()),
    "models": (("model=", "LoRA targets"), _models),
    "envs": (
        ("env=", "tasks"),
        lambda: ((name, str(len(env.tasks()))) for name, env in plugins.envs().items()),
    ),
    "tasks": (("env=", "env.task=", "instruction", "expert", "state", "note"), _tasks),
    "rewards": (("reward=", "what it is"), _rewards),
    "robots": (
        ("robot=", "what it is"),
        lambda: (
            (name, (robot.Config.__doc__ or "").split("\n")[0])
            for name, robot in plugins.robots().items()
        ),
    ),
}
"""Name of a list -> its columns and rows."""

"""Write the reference of all recipe keys from the schemas: a page for each node.

Type, range and default of a key come from its dataclass, its meaning from the docstring of the
attribute or from the lines ``key: text`` in the docstring of the class. The recipes and presets
that set a key are read from ``recipes/``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import omegaconf
import yaml

from rlinf_vla.config.ranges import OUTSIDE, unwrapped
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.runtime.recipes import NODES, Configs

FOLDER = "reference/configuration"
RECIPES = Path(__file__).parents[1] / "recipes"
SETTERS = ("recipe", "preset", "scale", "with", "algorithm", "cluster", "task")
"""Folders of ``recipes/`` whose files set keys."""
REQUIRED = "required"
MOST = 12
"""Files listed for a key."""
TITLES = {
    "algorithm": "Algorithms: `algorithm.*`",
    "env": "Environments: `env.*`",
    "model": "Models: `model.options.*`",
    "reward": "Rewards: `reward.options.*`",
    "robot": "Robots: `robot.*`",
}
NAMES = r"(?:\w+, )*\w+: "
ENTRY = re.compile(rf"^({NAMES})(.*(?:\n(?!{NAMES}|\s*$).*)*)", re.MULTILINE)
"""A line ``key: text`` or ``key, key: text`` of a class's docstring, with the lines that follow."""


@dataclass(frozen=True)
class Key:
    """A key of a recipe. ``path``: full name; ``choice``: the plug-in that has it, or empty."""

    path: str
    values: str
    default: str
    meaning: str
    choice: str = ""
    node: bool = False
    outside: bool = False


def keys_of(schema: type, prefix: str = "", choice: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass and of the nodes in it."""
    hints = get_type_hints(schema, include_extras=True)
    for field in fields(schema):
        path = f"{prefix}{field.name}"
        outside = dict(field.metadata) == OUTSIDE
        inner = (
            field.default_factory
            if isinstance(field.default_factory, type) and is_dataclass(field.default_factory)
            else None
        )
        if inner:
            description = meaning(schema, field.name) or summary(inner)
            yield Key(path, "a node", "", description, choice, node=True)
            yield from keys_of(inner, f"{path}.", choice)
            continue
        chosen = field.name == "name" and choice != "" and "." not in path.removeprefix(prefix)
        description = (
            f"Set by `{prefix.partition('.')[0]}={choice}`, which chooses these keys."
            if chosen
            else meaning(schema, field.name)
        )
        yield Key(
            path, values(hints[field.name]), default(field), description, choice, outside=outside
        )


def values(hint: Any) -> str:
    """Return the type and range of a key in words."""
    plain, rules, optional = unwrapped(hint)
    arguments = get_args(plain)
    if get_origin(plain) is list:
        text = f"a list; each element: {values(arguments[0])}"
    elif get_origin(plain) is dict:
        text = f"a map from names to {values(arguments[1])}"
    elif is_dataclass(plain):
        text = "nodes with the keys below"
    elif plain is bool:
        text = "true or false"
    elif rules:
        text = ""
    else:
        text = {int: "a whole number", float: "a number", str: "text"}.get(plain, "any")
    for rule in rules:
        description = (
            str(rule).replace("a number", "a whole number", 1) if plain is int else str(rule)
        )
        text = f"{text} ({description})" if text else description
    return f"{text}, or null" if optional else text


def default(each: Field[Any]) -> str:
    """Return the default as YAML; REQUIRED if there is none."""
    value = each.default_factory() if callable(each.default_factory) else each.default
    if value is MISSING or value == omegaconf.MISSING:
        return REQUIRED
    return shown(value)


def shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    text = (
        yaml.safe_dump(value, default_flow_style=True, width=10**6)
        .strip()
        .removesuffix("...")
        .strip()
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


def meaning(schema: type, name: str) -> str:
    """Return what the docstrings say of a field of ``schema`` or, if nothing, of a base class."""
    owners = [owner for owner in schema.__mro__ if is_dataclass(owner)]
    attributes = (documented(owner).get(name) for owner in owners)
    return next(
        (text for text in (*attributes, *(entries(owner).get(name) for owner in owners)) if text),
        "",
    )


def summary(schema: type) -> str:
    """Return the first sentence of a class's docstring, if it has one of its own."""
    text = inspect.cleandoc(schema.__dict__.get("__doc__") or "")
    return (
        ""
        if text.startswith(f"{schema.__name__}(")
        else " ".join(text.partition("\n\n")[0].split())
    )


@functools.cache
def documented(schema: type) -> dict[str, str]:
    """Return name -> docstring of the attributes that a class declares."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0].body  # type: ignore[attr-defined]
    docstrings = {}
    for at, node in enumerate(body[:-1]):
        text = body[at + 1]
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            docstrings[ast.unparse(node.target)] = tidy(inspect.cleandoc(str(text.value.value)))
    return docstrings | {
        name: text for name, text in entries(schema).items() if name not in docstrings
    }


@functools.cache
def entries(schema: type) -> dict[str, str]:
    """Return name -> text of the lines ``name: text`` in a class's docstring."""
    text = inspect.cleandoc(schema.__dict__.get("__doc__") or "")
    return {
        name: tidy(match[2])
        for match in ENTRY.finditer(text)
        for name in match[1].removesuffix(": ").split(", ")
    }


def tidy(text: str) -> str:
    """Return Markdown: a line per paragraph, single back quotes, links to pages of ``docs/``."""
    paragraphs = "\n\n".join(
        " ".join(part.split()) for part in text.replace("``", "`").split("\n\n")
    )
    parts = re.split(r"(`[^`]*`)", paragraphs)
    plain = (
        re.sub(r"docs/([\w/]+)\.md", r"[\1](../../\1.md)", part.replace("<", "&lt;"))
        for part in parts[::2]
    )
    parts[::2] = [*plain]
    return "".join(parts)


def all_keys() -> dict[str, list[Key]]:
    """Return page name -> keys: the parts of every recipe, then those of the plug-ins."""
    pages: dict[str, list[Key]] = {"recipe": []}
    for key in keys_of(Recipe):
        top = key.path.partition(".")[0]
        page = (
            top
            if "." in key.path
            or (
                key.node and top in {node_key.path for node_key in keys_of(Recipe) if node_key.node}
            )
            else "recipe"
        )
        pages.setdefault(page, []).append(key)
    for kind, node in NODES.items():
        for choice, schema in Configs(kind).items():
            if is_dataclass(schema) and isinstance(schema, type):
                pages.setdefault(kind, []).extend(keys_of(schema, f"{node}.", choice))
    return {name: [referred(key, keys) for key in keys] for name, keys in pages.items()}


def referred(key: Key, others: list[Key]) -> Key:
    """Return the key with the meaning that it has for another plug-in, if it says ``as for``."""
    if not (named := re.fullmatch(r"as for `(\w+)`\.", key.meaning)):
        return key
    other = next(
        candidate
        for candidate in others
        if candidate.choice == named[1] and candidate.path == key.path
    )
    return referred(replace(key, meaning=other.meaning), others)


@functools.cache
def setters() -> dict[str, list[tuple[str, str, frozenset[str]]]]:
    """Return key -> (file's name for a reader, value, the file's choices) of files that set it."""
    sources: dict[str, list[tuple[str, str, frozenset[str]]]] = {}
    for folder in SETTERS:
        for path in sorted((RECIPES / folder).rglob("*.yaml")):
            text = path.read_text()
            prefix = "" if "@package _global_" in text.partition("\n")[0] else f"{folder}."
            name = f"{folder}={path.relative_to(RECIPES / folder).with_suffix('')}"
            chosen = frozenset(choices(path))
            for key, value in flattened(yaml.safe_load(text) or {}, prefix):
                sources.setdefault(key, []).append((name, value, chosen))
    return sources


def choices(path: Path) -> Iterator[str]:
    """Yield ``env=NAME``, ``model=NAME`` ... for what a file of ``recipes/`` chooses or fits."""
    folder, *parts = path.relative_to(RECIPES).with_suffix("").parts
    node = yaml.safe_load(path.read_text()) or {}
    if folder in ("scale", "with"):
        yield from choices(RECIPES / "recipe" / f"{parts[0]}.yaml")
    if folder == "with":
        yield f"model={parts[1]}"
    if folder == "preset":
        fits = node.get("preset", {})
        yield from (f"model={name}" for name in fits.get("models", []))
        yield from (f"algorithm={fits[kind]}" for kind in ("algorithm",) if kind in fits)
    for entry in node.get("defaults", []):
        if isinstance(entry, dict):
            yield from (f"{group.rpartition('/')[2]}={name}" for group, name in entry.items())
        elif (
            named := RECIPES
            / f"{entry.strip('/') if entry.startswith('/') else f'{folder}/{entry}'}.yaml"
        ).exists():
            yield from choices(named)
        else:  # a plug-in, whose settings the file changes
            yield f"{folder}={entry}"


def applies(key: Key, chosen: frozenset[str]) -> bool:
    """Return whether a file with these choices sets the key of this plug-in."""
    kind = key.path.partition(".")[0]
    own = {choice for choice in chosen if choice.startswith(f"{kind}=")}
    return not key.choice or not own or f"{kind}={key.choice}" in own


def flattened(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in node.items():
        if name == "defaults":
            continue
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        yield f"{prefix}{name}", shown(value)


def page(title: str, keys: list[Key]) -> str:
    """Return a page: a heading per plug-in, and below it one per key."""
    lines = [f"# {title}", ""]
    choice = ""
    for key in keys:
        if key.choice != choice:
            choice = key.choice
            lines += [f"## {choice}", ""]
        level = "###" if choice else "##"
        anchor = f"{choice}.{key.path}" if choice else key.path
        lines += [f"{level} `{key.path}` {{ #{anchor} }}", ""]
        initial = key.default if key.default == REQUIRED else f"`{key.default}`"
        facts = [f"Value: {key.values}.", f"Default: {initial}."]
        if key.outside:
            facts.append("Taken only from the command line ([why](../../trust.md)).")
        lines += [
            *([] if key.node else ["<small>" + " ".join(facts) + "</small>", ""]),
            key.meaning,
            "",
        ]
        if not key.node and (
            sources := [source for source in setters().get(key.path, []) if applies(key, source[2])]
        ):
            lines += [
                f"Set by {', '.join(f'`{name}` (`{value}`)' for name, value, _ in sources[:MOST])}{', ...' * (len(sources) > MOST)}",
                "",
            ]
    return "\n".join(lines)


@functools.cache
def pages() -> dict[str, str]:
    """Return file name -> Markdown of each page."""
    titles = {name: TITLES.get(name, f"`{name}.*`") for name in all_keys()} | {
        "recipe": "Top level"
    }
    documents = {f"{name}.md": page(titles[name], keys) for name, keys in all_keys().items()}
    rows = [f"| [{name}]({name}.md) | {len(keys)} |" for name, keys in all_keys().items()]
    index = "# Configuration\n\nEvery key of a recipe, from the schemas of this version. "
    index += "`rlinf-vla train recipe=NAME --cfg job` prints the keys of one recipe with their values.\n\n| node | keys |\n|---|---|\n"
    return {"index.md": index + "\n".join(rows) + "\n", **documents}

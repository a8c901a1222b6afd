"""Show a composed recipe and where each value comes from: ``rlinf-vla config recipe=NAME``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from rlinf_vla.cli.compose import CONFIG_MODULE, FOLDER, composed, primary, with_folder
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.suggestions import suggest_keys
from rlinf_vla.runtime.recipes import refuse_unknown_keys
from rlinf_vla.telemetry.tables import JSON, print_json, print_table

VERB = "train"
"""The verb for which a recipe is composed."""
DEFAULT = "default"
FILE = "file"
SAVED = "saved recipe"
COMMAND_LINE = "command line"
PACKAGED = f"pkg://{CONFIG_MODULE}"


@dataclass(frozen=True)
class Source:
    """Where a value comes from.

    ``kind``: DEFAULT, FILE, SAVED or COMMAND_LINE. ``name``: as it is shown: a choice such as
    ``algorithm=ppo`` of which it is the default, a file, a run, or the override.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return (
            f"default of {self.name}"
            if self.kind == DEFAULT and self.name
            else self.name or self.kind
        )


@dataclass(frozen=True)
class Value:
    """The value of a key, with interpolations resolved, and its source."""

    key: str
    value: Any
    source: Source


def run(arguments: Sequence[str]) -> None:
    """Print the keys that ``arguments`` names, or all. Raises UserError."""
    words = with_folder([word for word in arguments if word != JSON])
    if option := next((word for word in words if word.startswith("-")), None):
        raise UserError(f"config {option}: no such option (options: {JSON}, {FOLDER} DIR)")
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    filters = [word for word in words if word not in overrides]
    rows = chosen(values(overrides), filters)
    if JSON in arguments:
        print_json([asdict(row) | {"source": asdict(row.source)} for row in rows])
    else:
        print_table(
            ("key", "value", "from"), [(row.key, told(row.value), row.source) for row in rows]
        )


def values(overrides: Sequence[str]) -> list[Value]:
    """Return every key of the composed recipe, in the schema's order. Raises UserError."""
    with composed(VERB, overrides) as (config, choices):
        refuse_unknown_keys(config)
        if OmegaConf.is_missing(config, "name"):
            raise UserError(
                "config needs a recipe: rlinf-vla config recipe=NAME (`rlinf-vla list recipes` names them), or run=DIR"
            )
        origin: dict[str, Source] = {}
        for source, contents in _parts(choices, overrides):
            for key in contents:
                origin[key] = source
        return [
            Value(key, value_of(parent, name), _source(key, origin))
            for key, parent, name in leaves(config)
        ]


def _source(key: str, origin: dict[str, Source]) -> Source:
    """Return the source of a key, or of the node that holds it if the node was set as a whole."""
    while key not in origin and "." in key:
        key = key.rpartition(".")[0]
    return origin.get(key, Source(DEFAULT, ""))


def _parts(choices: Sequence[str], arguments: Sequence[str]) -> Iterator[tuple[Source, list[str]]]:
    """Yield what the recipe was merged from, in the order of the merge: a source, and its keys."""
    loader: Any = GlobalHydra.instance().config_loader()
    name = primary(VERB)
    listed = loader.compute_defaults_list(name, list(choices), RunMode.RUN)
    # Hydra has no public way to load one entry as it does itself; tests pin these two methods
    _, repository = loader._parse_overrides_and_create_caching_repo(name, list(choices))
    for default in listed.defaults:
        if (default.package or "").startswith("hydra"):
            continue
        loaded = loader._load_single_config(default, repository)
        yield _named(default.config_path, loaded.path, arguments), keys_in(loaded.config)
    for override in listed.config_overrides:
        node = OmegaConf.create()
        if not override.is_delete():
            OmegaConf.update(node, override.key_or_group, override.value(), force_add=True)
        yield Source(COMMAND_LINE, f"{COMMAND_LINE}: {override.input_line}"), keys_in(node)


def _named(path: str, location: str, arguments: Sequence[str]) -> Source:
    if path.startswith("run/"):
        return Source(
            SAVED,
            next(argument for argument in arguments if argument.startswith(("run=", "plan="))),
        )
    folder, _, name = path.rpartition("/")
    if location.startswith("structured://"):
        return Source(DEFAULT, "" if name == "schema" else f"{folder}={name}")
    file = f"{path.removesuffix('.yaml')}.yaml"
    return Source(
        FILE,
        f"recipes/{file}"
        if location == PACKAGED
        else str(Path(location.removeprefix("file://")) / file),
    )


def keys_in(node: DictConfig) -> list[str]:
    """Return the keys of the leaves that have a value."""
    return [key for key, parent, name in leaves(node) if not OmegaConf.is_missing(parent, name)]


def leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig, str]]:
    """Yield key, parent node and name of each leaf; lists and empty nodes are leaves."""
    for name in map(str, node):
        child = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        if (
            isinstance(child, DictConfig)
            and not child._is_none()
            and not child._is_interpolation()
            and len(child)
        ):
            yield from leaves(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node, name


def value_of(parent: DictConfig, name: str) -> Any:
    """Return a value as JSON; "???" if it is missing; the text of a failing interpolation."""
    if OmegaConf.is_missing(parent, name):
        return MISSING
    try:
        value = parent[name]
    except InterpolationResolutionError:
        return str(parent._get_node(name))
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def chosen(found: Sequence[Value], filters: Sequence[str]) -> list[Value]:
    """Return the values of the keys, nodes or names of either in ``filters``; all without any.

    Raises UserError for one that this recipe does not have.
    """
    matches: set[str] = set()
    keys = [value.key for value in found]
    for word in filters:
        matched = [key for key in keys if f"{key}.".startswith(f"{word}.")] or [
            key for key in keys if f".{word}." in f".{key}."
        ]
        if not matched:
            meant = suggest_keys(word, keys)
            hint = (
                f"; did you mean {' or '.join(meant)}?"
                if meant
                else " (without a KEY, config shows all)"
            )
            raise UserError(f"config {word}: this recipe has no such key{hint}")
        matches.update(matched)
    return [value for value in found if not filters or value.key in matches]


def told(value: Any) -> str:
    """Return a value as it would be written on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(map(told, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {told(item)}" for name, item in value.items()) + "}"
    return str(value)

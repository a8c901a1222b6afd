"""Register the schemas with Hydra, and read a composed recipe into dataclasses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache, cached_property, partial
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from rlinf_vla.config.checks import NO_MODEL, check
from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.config.recipe import (
    EXPERT,
    NO_ALGORITHM,
    START,
    LoraOptions,
    ModelConfig,
    NoAlgorithmConfig,
    Recipe,
    RewardConfig,
)
from rlinf_vla.config.robot import ROBOT, RobotEnvConfig
from rlinf_vla.core import plugins

ASSET, HUB = "asset://", "hf://"


NODES = {
    "algorithm": "algorithm",
    "env": "env",
    "robot": "robot",
    "reward": "reward.options",
    "model": "model.options",
}
"""Kind of plug-in -> the node that the dataclass of the chosen one defines."""


def register() -> None:
    """Register the schemas with Hydra, one choice per plug-in."""
    OmegaConf.register_new_resolver("episodes", _control_steps, replace=True)
    OmegaConf.register_new_resolver("model_or", _evaluated, replace=True)
    _store(None, "schema", Recipe)
    _store("cluster", "schema", ClusterConfig)
    for group in ("algorithm", "env", "robot"):
        _store_lazily(group, Configs(group).__getitem__)
    _store_lazily("reward", lambda name: RewardConfig(name=name, options=Configs("reward")[name]()))
    _store_lazily("model", _model)


def _model(name: str) -> ModelConfig:
    without = name == NO_MODEL or not plugins.models()[name].learns
    return ModelConfig(name, NO_MODEL if without else MISSING, options=Configs("model")[name]())


def _store(group: str | None, name: str, node: Any) -> None:
    """Store a node unless it is unchanged: parsing it is half the cost of composing a recipe."""
    if _STORED.get((group, name)) != node:
        ConfigStore.instance().store(group=group, name=name, node=node)
        _STORED[group, name] = node


_STORED: dict[tuple[str | None, str], Any] = {}


class _LazyNode(ConfigNode):
    """A node that is made when Hydra first reads it, so that only chosen plug-ins are imported."""

    def __init__(self, name: str, group: str, make: Callable[[str], Any]) -> None:
        self.name = f"{name}.yaml"
        self.group = group
        self.package = None
        self.provider = None
        self._make = partial(make, name)

    @cached_property
    def node(self) -> Any:  # type: ignore[override]
        return OmegaConf.structured(self._make())


def _store_lazily(group: str, make: Callable[[str], Any]) -> None:
    """Store ``make(name)`` for each choice of the group."""
    nodes = {f"{name}.yaml": _LazyNode(name, group, make) for name in Configs(group)}
    ConfigStore.instance().repo.setdefault(group, {}).update(nodes)


class Configs(Mapping[str, Any]):
    """The config dataclass of each choice of ``group=NAME``, imported when it is read."""

    def __init__(self, group: str) -> None:
        self._installed = getattr(plugins, f"{group}s")()
        self._others = _OTHERS.get(group, {})

    def __getitem__(self, name: str) -> Any:
        return self._others[name] if name in self._others else self._installed[name].Config

    def __iter__(self) -> Iterator[str]:
        return iter([*self._installed, *self._others])

    def __len__(self) -> int:
        return len(self._installed) + len(self._others)


_OTHERS: dict[str, dict[str, type]] = {
    "env": {ROBOT: RobotEnvConfig},
    "algorithm": {NO_ALGORITHM: NoAlgorithmConfig},
    "model": {NO_MODEL: NoneType},
}
"""Choices that are not plug-ins."""


def _control_steps(episodes: int, *, _root_: DictConfig) -> int:
    """Resolve ``${episodes:N}``: the control steps of N episodes at ``env.episode_limit``."""
    if (limit := _root_.env.episode_limit) is None:
        raise ValueError(
            "counts whole episodes, so env.episode_limit must be a number of control steps, not null"
        )
    return int(episodes * limit)


def _evaluated(*scripted: str, _root_: DictConfig) -> list[str]:
    """Resolve ``${model_or:NAMES}``: the given checkpoint, or else model, or else ``scripted``."""
    if _root_.checkpoint is not None:
        return [_root_.checkpoint]
    return list(scripted) if _root_.model.name == NO_MODEL else [START]


def keys() -> list[str]:
    """Return every key that any recipe can have, sorted."""
    schemas = [
        (f"{node}.", schema)
        for kind, node in NODES.items()
        for schema in Configs(kind).values()
        if is_dataclass(schema)
    ]
    return sorted(_keys_below([("", Recipe), *schemas]))


def _keys_below(nodes: Sequence[tuple[str, Any]]) -> set[str]:
    """Return the keys of ``nodes``, which are (prefix of the node's keys, its dataclass)."""
    return {prefix + key for prefix, schema in nodes for key in _keys_of_schema(schema)}


@cache
def _keys_of_schema(schema: Any) -> list[str]:
    return _keys(OmegaConf.structured(schema))


def unknown_key_hint(key: str) -> str:
    """Return the end of the message "KEY is not a key": the closest keys, or how to find them."""
    known_keys = keys()
    if key in known_keys:
        return " of the chosen env, model or algorithm: give recipe=NAME, which chooses all three"
    from rlinf_vla.config.suggestions import suggest_keys

    suggestions = suggest_keys(key, known_keys)
    return (
        f"; did you mean {' or '.join(suggestions)}?"
        if suggestions
        else " (--cfg job shows all keys)"
    )


def _keys(node: DictConfig) -> list[str]:
    names: list[str] = []
    for name in map(str, node):
        child = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        names.append(name)
        if (
            isinstance(child, DictConfig) and get_origin(child._metadata.ref_type) is not dict
        ):  # whose keys are the user's to choose
            names += [f"{name}.{key}" for key in _keys(child)]
    return names


def read_node(config: DictConfig, name: str) -> Any:
    """Read and check one node of a configuration without environment or algorithm.

    Raises UserError.
    """
    refuse_unknown_keys(config)
    node = OmegaConf.to_object(config[name])
    check_values(node, f"{name}.")
    return node


def refuse_unknown_keys(config: DictConfig) -> None:
    """Raise UserError for the first key that no schema has."""
    unknown = sorted(set(_keys(config)) - _keys_of(config))  # Hydra's +KEY=VALUE adds any
    if unknown:
        raise UserError(f"{unknown[0]} is not a key{unknown_key_hint(unknown[0])}")


def _keys_of(config: DictConfig) -> set[str]:
    """Return the keys that a recipe with this configuration's choices has."""
    nodes: list[tuple[str, Any]] = [("", Recipe)]
    for name in NODES.values():
        node = OmegaConf.select(config, name)
        if isinstance(node, DictConfig) and is_dataclass(schema := OmegaConf.get_type(node)):
            nodes.append((f"{name}.", schema))
    return _keys_below(nodes)


def read(config: DictConfig) -> Recipe:
    """Convert the composed configuration to dataclasses and check all of it. Raises UserError."""
    refuse_unknown_keys(config)
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            hint = (
                " (choose one with recipe=NAME; `rlinf-vla list recipes` names them)"
                if "name" in missing
                else ""
            )
            raise UserError(f"{missing[0]} has no value{hint or f': give {missing[0]}=...'}")
        recipe = OmegaConf.to_object(config)
    except InterpolationResolutionError as error:
        raise UserError(
            f"{error.full_key}: {str(error).splitlines()[0].rpartition(': ')[2]}"
        ) from None
    assert isinstance(recipe, Recipe)
    check_values(recipe)
    _check_choices(recipe)
    check(recipe)
    return recipe


def _check_choices(recipe: Recipe) -> None:
    """Raise UserError unless each node has the name and keys that ``GROUP=NAME`` chose."""
    model, reward = recipe.model, recipe.reward
    for group in ("algorithm", "env", "robot"):
        node = getattr(recipe, group)
        if group != "robot" or node is not None:
            _check_choice(group, node, getattr(node, "name", None))
    _check_choice("model", model.options, model.name)
    if reward.name is not None:
        _check_choice("reward", reward.options, reward.name)
    elif not (reward.options is None or is_dataclass(reward.options)):
        raise UserError(
            f"reward.options={reward.options} belongs to no reward: choose one with reward=NAME"
        )


def _check_choice(group: str, node: Any, name: Any) -> None:
    schemas = Configs(group)
    if name not in schemas:
        raise UserError(
            f"{group}.name={name} is not known{plugins.nearest(str(name), list(schemas))}: choose with {group}=NAME"
        )
    if not isinstance(node, schemas[name]):
        raise UserError(
            f"{group}.name={name} does not go with the other keys of {group}: choose with {group}={name}, which sets them too"
        )


def located(lora: LoraOptions, weights: bool = True) -> LoraOptions:
    """Return ``model.lora`` with its adapter as a directory of this machine, as ``asset_path``."""
    return (
        lora
        if lora.adapter is None
        else replace(lora, adapter=str(asset_path(lora.adapter, weights)))
    )


def teacher_of(recipe: Recipe) -> str | None:
    """Return the location of the policy that teaches (``algorithm.teacher``); None: none does."""
    location = getattr(recipe.algorithm, "teacher", EXPERT)
    return None if location == EXPERT else location


def hub_locations(recipe: Recipe) -> list[str]:
    """Return what the workers of a run download from the Hub, as ``hf://ORG/NAME``."""
    named = (recipe.model.checkpoint, recipe.model.lora.adapter, teacher_of(recipe))
    return [location for location in named if location is not None and location.startswith(HUB)]


def asset_path(location: str, weights: bool = True) -> Path:
    """Resolve a path, ``asset://NAME`` inside the package, or ``hf://ORG/NAME[@REVISION]``.

    The last one is downloaded if it is not in the cache (:mod:`.hub`), without its weights if
    ``weights`` is false. Raises UserError.
    """
    if location.startswith(HUB):
        from rlinf_vla.runtime.hub import DATA, DESCRIPTION, download

        return download(location, DATA if weights else DESCRIPTION)
    if not location.startswith(ASSET):
        path = Path(location).expanduser()
        if not path.parent.exists():
            from rlinf_vla.runtime.hub import REPOSITORY

            if re.fullmatch(REPOSITORY, location):
                raise UserError(
                    f"{location}: no such directory; if it is a repository of the Hub, write {HUB}{location}"
                )
        return path
    path = Path(str(files("rlinf_vla.assets"))) / location[len(ASSET) :]
    if not path.exists():
        asset_names = [child.name for child in path.parent.glob("[a-z]*") if child.is_dir()]
        raise UserError(
            f"{location} is not in the package{plugins.nearest(path.name, asset_names)}"
        )
    return path

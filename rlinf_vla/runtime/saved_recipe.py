"""Read recipes that were saved with results; resolve ``run=DIR`` and ``plan=FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import ModelConfig, Recipe, RewardConfig
from rlinf_vla.core import plugins
from rlinf_vla.runtime.recipes import Configs, read
from rlinf_vla.runtime.run_directory import RECIPE, is_sweep, recipe_values, saved_recipe, split


def to_plain(config: DictConfig) -> dict[str, Any]:
    """Return the configuration as JSON values with every interpolation resolved."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return values


def read_saved(directory: Path) -> DictConfig:
    """Return a run directory's ``recipe.yaml`` as input for ``recipe.read``. Raises UserError."""
    return from_saved(saved_recipe(directory), str(directory / RECIPE))


def with_overrides(
    values: dict[str, Any], settings: Sequence[str], used: Sequence[str], where: str
) -> Recipe:
    """Return the recipe of a file from an untrusted source, with the command line's ``KEY=VALUE``.

    Keys marked ``ranges.OUTSIDE`` below the nodes ``used`` (such as ``env.``) come only from the
    command line ``settings``, which may set no other key. Raises UserError.
    """
    config = from_saved(values, where)
    keys = [setting.partition("=")[0] for setting in settings]
    _forget(config, keys)
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist(list(settings)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{' '.join(settings)}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    recipe = read(merged)
    marked = [entry for entry in outside(recipe) if entry[0].startswith(tuple(used))]
    for key in keys:
        if key not in [name for name, *_ in marked]:
            names = ", ".join(name for name, *_ in marked) or "nothing"
            raise UserError(
                f"{key} cannot be set: the recipe of {where} is used unchanged, the command line may set {names}"
            )
    _refuse_unsaid(recipe, used, keys, where)
    return recipe


def outside(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield key, value, and whether it is the default, of each OUTSIDE field, nested ones too."""
    for field in fields(config):
        key = prefix + field.name
        value = getattr(config, field.name)
        if field.metadata.get("outside"):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield key, value, value == default
        elif is_dataclass(value):
            yield from outside(value, f"{key}.")


def _forget(config: DictConfig, keys: Sequence[str]) -> None:
    """Clear the file's dictionaries that the command line sets, which would otherwise be merged."""
    for key, value, _ in outside(OmegaConf.to_object(config)):
        if key in keys and isinstance(value, dict):
            OmegaConf.update(config, key, {}, merge=False)


def _refuse_unsaid(recipe: Recipe, used: Sequence[str], keys: Sequence[str], where: str) -> None:
    """Raise UserError if the file sets a key below ``used`` that only the command line may set."""
    for key, value, is_default in outside(recipe):
        if key.startswith(tuple(used)) and not is_default and key not in keys:
            asked = "but a file must not choose programs, imports, paths or machines"
            again = f"+{key}={{...}}" if isinstance(value, dict) else f"{key}=..."
            raise UserError(
                f"{where} sets {key}={value}, {asked}: if you trust it, give {again} on the command line, too"
            )


def choose_run(location: str, verb: str, settings: Sequence[str]) -> str:
    """Register the recipe of ``run=LOCATION`` with Hydra; return the override that chooses it.

    It replaces everything that ``recipe=NAME`` chooses. Raises UserError.
    """
    return _chosen(recipe_of_run(location, verb, settings))


def choose_plan(location: str, settings: Sequence[str]) -> str:
    """Do the same for ``plan=LOCATION``, a recipe that `rlinf-vla plan` wrote. Raises UserError."""
    path = Path(location).expanduser()
    if not path.is_file():
        raise UserError(
            f"plan={location}: no such file (`rlinf-vla plan recipe=NAME output=FILE` writes one)"
        )
    config = from_saved(recipe_values(path), location)
    keys = _said(settings)
    _forget(config, keys)
    _refuse_unsaid(OmegaConf.to_object(config), _used(keys), keys, location)  # type: ignore[arg-type]
    return _chosen(config)


def _chosen(config: DictConfig) -> str:
    ConfigStore.instance().store(group="run", name="saved", node=config, package="_global_")
    return "run=saved"


def _said(settings: Sequence[str]) -> list[str]:
    return [setting.partition("=")[0].lstrip("+") for setting in settings]


def _used(keys: Sequence[str]) -> list[str]:
    """Return the nodes of a saved recipe that the command line does not choose again."""
    return [
        f"{node}."
        for node in ("env", "robot", "reward", "model", "algorithm", "rollout", "cluster", "serve")
        if node not in keys
    ]


def recipe_of_run(location: str, verb: str, settings: Sequence[str]) -> DictConfig:
    """Return a run's saved recipe: ``train`` resumes the run, other verbs use its checkpoint.

    ``location``: the run directory or its name in runs/, or the checkpoint to use. ``settings``:
    the other ``KEY=VALUE`` of the command line; only they may name a program, a module or a
    machine. Raises UserError.
    """
    directory, checkpoint = split(Path(location))
    if not (checkpoint or directory).is_dir():
        from rlinf_vla.runtime.run_names import named

        directory = named(location).absolute()
        checkpoint = None
        print(f"run={location}: {Path(*directory.parts[-3:])}", file=sys.stderr)
    config = read_saved(directory)
    config.output = None
    keys = _said(settings)
    _forget(config, keys)
    _refuse_unsaid(OmegaConf.to_object(config), _used(keys), keys, str(directory / RECIPE))  # type: ignore[arg-type]
    there = str(directory)
    if verb == "train":
        config.run_dir, config.resume = (None, str(checkpoint)) if checkpoint else (there, "auto")
    elif is_sweep(directory):
        if verb == "export":
            raise UserError(
                f"run={location} is an evaluation sweep, which has no checkpoint: give the run that was evaluated"
            )
        config.run_dir = there if verb == "eval" else None
        config.resume = "never"
    else:
        config.run_dir = None
        config.resume = "never"
        config.checkpoint = str(checkpoint or there)
    return config


def from_saved(values: dict[str, Any], where: str) -> DictConfig:
    """Return a saved recipe as input for ``recipe.read``; ``where`` names its file in errors.

    Raises UserError unless it is a recipe of this version and the installed plug-ins.
    """
    if _interpolates(values):
        raise UserError(
            f"{where} holds no recipe of this version of rlinf-vla (it has an interpolation, which would be resolved here)"
        )
    try:
        schema = OmegaConf.structured(Recipe)
        for group in ("env", "robot", "algorithm"):
            if group != "robot" or values.get("robot") is not None:
                schema[group] = OmegaConf.structured(
                    plugins.choose(group, values[group]["name"], Configs(group))
                )
        schema.model = ModelConfig(
            values["model"]["name"],
            options=_options(values["model"], NO_MODEL, "model", plugins.models()),
        )
        schema.reward = RewardConfig(
            options=_options(values["reward"], None, "reward", plugins.rewards())
        )
        config = OmegaConf.merge(schema, OmegaConf.create(values))
    except OmegaConfBaseException as error:
        reason = ": ".join(filter(None, (error.full_key, str(error.msg).splitlines()[0])))
        raise UserError(
            f"{where} holds no recipe of this version of rlinf-vla ({reason})"
        ) from None
    except (KeyError, TypeError) as error:
        reason = (
            f"{error} is missing"
            if isinstance(error, KeyError)
            else "a plug-in's key is not a node with a name"
        )
        raise UserError(
            f"{where} holds no recipe of this version of rlinf-vla ({reason})"
        ) from None
    assert isinstance(config, DictConfig)
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise UserError(
            f"{where} holds no recipe of this version of rlinf-vla ({missing[0]} has no value)"
        )
    return config


def _interpolates(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_interpolates(child) for item in node.items() for child in item)
    return (
        any(map(_interpolates, node))
        if isinstance(node, list)
        else isinstance(node, str) and "${" in node
    )


def _options(
    node: dict[str, Any], absent: str | None, kind: str, candidates: Mapping[str, Any]
) -> Any:
    return (
        None if node["name"] == absent else plugins.choose(kind, node["name"], candidates).Config()
    )

"""A recipe as it is kept beside its results, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlinf_vla import plugins
from rlinf_vla.recipe import ALGORITHMS, ModelConfig, Recipe, RewardConfig, env_configs, read
from rlinf_vla.recipe.checks import NO_MODEL
from rlinf_vla.trust import outside
from rlinf_vla.types import UserError


def as_kept(config: DictConfig) -> dict[str, Any]:
    """JSON values, every interpolation resolved."""
    kept: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return kept


def read_kept(directory: Path) -> DictConfig:
    """What a run directory's ``recipe.yaml`` says, as ``recipe.read`` takes it."""
    path = directory / "recipe.yaml"
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return restored(as_kept(loaded), str(path))


def with_said(kept: dict[str, Any], settings: Sequence[str], used: Sequence[str], where: str) -> Recipe:
    """A recipe of a file that somebody else may have made, with what the command line says instead (``KEY=VALUE``).

    What is marked ``trust.OUTSIDE`` in the nodes ``used`` is taken from the command line alone, and nothing else is. Raises UserError.
    """
    config, said = restored(kept, where), [setting.partition("=")[0] for setting in settings]
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist(list(settings)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{' '.join(settings)}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    recipe = read(merged)
    marked = [each for each in outside(recipe) if each[0].startswith(tuple(f"{node}." for node in used))]
    for key in said:
        if key not in [name for name, *_ in marked]:
            known = ", ".join(name for name, *_ in marked) or "nothing"
            raise UserError(f"{key} cannot be set: the recipe of {where} is played as it is, and the command line may say {known}")
    for key, value, is_default in marked:
        if key not in said and not is_default:
            asked = "which runs no program and uses no place because a file names it"
            raise UserError(f"{where} wants {key}={value}, {asked}: if you trust it, give {key}=... on the command line")
    return recipe


def restored(kept: dict[str, Any], where: str) -> DictConfig:
    """What ``recipe.read`` takes. Raises UserError where it is no recipe of this version and these plug-ins; ``where`` it was kept."""
    if _interpolates(kept):
        raise UserError(f"{where} holds no recipe of this version of rlinf-vla (it has an interpolation, which would be resolved here)")
    try:
        schema = OmegaConf.structured(Recipe)
        schema.env = OmegaConf.structured(plugins.choose("env", kept["env"]["name"], env_configs()))
        if kept.get("robot") is not None:
            schema.robot = OmegaConf.structured(plugins.choose("robot", kept["robot"]["name"], plugins.robots()).Config)
        schema.algorithm = OmegaConf.structured(plugins.choose("algorithm", kept["algorithm"]["name"], ALGORITHMS))
        schema.model = ModelConfig(kept["model"]["name"], options=_options(kept["model"], NO_MODEL, "model", plugins.models()))
        schema.reward = RewardConfig(options=_options(kept["reward"], None, "reward", plugins.rewards()))
        config = OmegaConf.merge(schema, OmegaConf.create(kept))
    except (OmegaConfBaseException, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{where} holds no recipe of this version of rlinf-vla ({reason})") from None
    assert isinstance(config, DictConfig)
    return config


def _interpolates(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_interpolates(child) for item in node.items() for child in item)
    return any(map(_interpolates, node)) if isinstance(node, list) else isinstance(node, str) and "${" in node


def _options(node: dict[str, Any], absent: str | None, kind: str, known: dict[str, Any]) -> Any:
    return None if node["name"] == absent else plugins.choose(kind, node["name"], known).Config()

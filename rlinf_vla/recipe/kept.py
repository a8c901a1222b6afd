"""A recipe as it is kept beside its results, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vla import plugins
from rlinf_vla.recipe import ALGORITHMS, ModelConfig, Recipe, RewardConfig, env_configs
from rlinf_vla.recipe.checks import NO_MODEL
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


def restored(kept: dict[str, Any], where: str) -> DictConfig:
    """What ``recipe.read`` takes. Raises UserError where it is no recipe of this version and these plug-ins; ``where`` it was kept."""
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


def _options(node: dict[str, Any], absent: str | None, kind: str, known: dict[str, Any]) -> Any:
    return None if node["name"] == absent else plugins.choose(kind, node["name"], known).Config()

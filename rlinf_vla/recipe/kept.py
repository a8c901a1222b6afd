"""A recipe as it is kept beside its results, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vla import plugins
from rlinf_vla.recipe import ALGORITHMS, ModelConfig, Recipe, RewardConfig, env_configs
from rlinf_vla.recipe.checks import NO_MODEL
from rlinf_vla.training.run_directory import RECIPE, is_sweep, kept, split
from rlinf_vla.types import UserError


def as_kept(config: DictConfig) -> dict[str, Any]:
    """JSON values, every interpolation resolved."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return values


def read_kept(directory: Path) -> DictConfig:
    """What a run directory's ``recipe.yaml`` says, as ``recipe.read`` takes it. Raises UserError."""
    return restored(kept(directory), str(directory / RECIPE))


def choose_run(location: str, verb: str) -> str:
    """``run=LOCATION`` as a choice that Hydra knows: the run's recipe, in place of all that ``recipe=NAME`` chooses. Raises UserError."""
    ConfigStore.instance().store(group="run", name="kept", node=of_run(location, verb), package="_global_")
    return "run=kept"


def of_run(location: str, verb: str) -> DictConfig:
    """The recipe that a run keeps, set so that ``verb`` takes this run: ``train`` continues it, every other verb finds its checkpoint.

    ``location``: the run directory, or one of its checkpoints, which is then the one to take. Raises UserError.
    """
    directory, checkpoint = split(Path(location))
    if not (checkpoint or directory).is_dir():
        raise UserError(f"run={location}: no such directory")
    config = read_kept(directory)
    there = str(directory)
    if verb == "train":
        config.run_dir, config.resume = (None, str(checkpoint)) if checkpoint else (there, "auto")
    elif is_sweep(directory):
        config.run_dir = there
    else:
        config.run_dir, config.resume, config.checkpoint = None, "never", str(checkpoint or there)
    return config


def restored(values: dict[str, Any], where: str) -> DictConfig:
    """What ``recipe.read`` takes. Raises UserError where it is no recipe of this version and these plug-ins; ``where`` it was kept."""
    try:
        schema = OmegaConf.structured(Recipe)
        schema.env = OmegaConf.structured(plugins.choose("env", values["env"]["name"], env_configs()))
        if values.get("robot") is not None:
            schema.robot = OmegaConf.structured(plugins.choose("robot", values["robot"]["name"], plugins.robots()).Config)
        schema.algorithm = OmegaConf.structured(plugins.choose("algorithm", values["algorithm"]["name"], ALGORITHMS))
        schema.model = ModelConfig(values["model"]["name"], options=_options(values["model"], NO_MODEL, "model", plugins.models()))
        schema.reward = RewardConfig(options=_options(values["reward"], None, "reward", plugins.rewards()))
        config = OmegaConf.merge(schema, OmegaConf.create(values))
    except OmegaConfBaseException as error:
        reason = ": ".join(filter(None, (error.full_key, str(error.msg).splitlines()[0])))
        raise UserError(f"{where} holds no recipe of this version of rlinf-vla ({reason})") from None
    except (KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else "a plug-in's key is not a node with a name"
        raise UserError(f"{where} holds no recipe of this version of rlinf-vla ({reason})") from None
    assert isinstance(config, DictConfig)
    return config


def _options(node: dict[str, Any], absent: str | None, kind: str, known: dict[str, Any]) -> Any:
    return None if node["name"] == absent else plugins.choose(kind, node["name"], known).Config()

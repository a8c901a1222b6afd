"""A recipe as it is kept beside its results, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlinf_vla import plugins
from rlinf_vla.recipe import ALGORITHMS, ModelConfig, Recipe, RewardConfig, env_configs, read
from rlinf_vla.recipe.checks import NO_MODEL
from rlinf_vla.training.run_directory import RECIPE, is_sweep, kept, split
from rlinf_vla.trust import outside
from rlinf_vla.types import UserError


def as_kept(config: DictConfig) -> dict[str, Any]:
    """JSON values, every interpolation resolved."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return values


def read_kept(directory: Path) -> DictConfig:
    """What a run directory's ``recipe.yaml`` says, as ``recipe.read`` takes it. Raises UserError."""
    return restored(kept(directory), str(directory / RECIPE))


def with_said(values: dict[str, Any], settings: Sequence[str], used: Sequence[str], where: str) -> Recipe:
    """A recipe of a file that somebody else may have made, with what the command line says instead (``KEY=VALUE``).

    What is marked ``trust.OUTSIDE`` below the nodes ``used`` (``env.``) is taken from the command line alone, and nothing else is.
    Raises UserError.
    """
    config, said = restored(values, where), [setting.partition("=")[0] for setting in settings]
    _forget(config, said)
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist(list(settings)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{' '.join(settings)}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    recipe = read(merged)
    marked = [each for each in outside(recipe) if each[0].startswith(tuple(used))]
    for key in said:
        if key not in [name for name, *_ in marked]:
            known = ", ".join(name for name, *_ in marked) or "nothing"
            raise UserError(f"{key} cannot be set: the recipe of {where} is played as it is, and the command line may say {known}")
    _refuse_unsaid(recipe, used, said, where)
    return recipe


def _forget(config: DictConfig, said: Sequence[str]) -> None:
    """Of a dictionary that the command line says, nothing of the file's remains: the two would be merged."""
    for key, value, _ in outside(OmegaConf.to_object(config)):
        if key in said and isinstance(value, dict):
            OmegaConf.update(config, key, {}, merge=False)


def _refuse_unsaid(recipe: Recipe, used: Sequence[str], said: Sequence[str], where: str) -> None:
    """``used``: beginnings of keys. Raises UserError where the file names what only the command line may."""
    for key, value, is_default in outside(recipe):
        if key.startswith(tuple(used)) and not is_default and key not in said:
            asked = "and no file decides which program runs, what is imported or which place is used"
            again = f"+{key}={{...}}" if isinstance(value, dict) else f"{key}=..."
            raise UserError(f"{where} says {key}={value}, {asked}: if you trust it, give {again} on the command line, too")


def choose_run(location: str, verb: str, settings: Sequence[str]) -> str:
    """``run=LOCATION`` as a choice that Hydra knows: the run's recipe, in place of all that ``recipe=NAME`` chooses. Raises UserError."""
    ConfigStore.instance().store(group="run", name="kept", node=of_run(location, verb, settings), package="_global_")
    return "run=kept"


def of_run(location: str, verb: str, settings: Sequence[str]) -> DictConfig:
    """The recipe that a run keeps, set so that ``verb`` takes this run: ``train`` continues it, every other verb finds its checkpoint.

    ``location``: the run directory, or one of its checkpoints, which is then the one to take. ``settings``: what the command line says
    beside it (``KEY=VALUE``), which alone may name a program, a module or a machine. Raises UserError.
    """
    directory, checkpoint = split(Path(location))
    if not (checkpoint or directory).is_dir():
        raise UserError(f"run={location}: no such directory")
    config = read_kept(directory)
    config.output = None
    said = [setting.partition("=")[0].lstrip("+") for setting in settings]
    used = [f"{node}." for node in ("env", "robot", "reward", "model", "algorithm", "cluster") if node not in said]
    _forget(config, said)
    _refuse_unsaid(OmegaConf.to_object(config), used, said, str(directory / RECIPE))  # type: ignore[arg-type]
    there = str(directory)
    if verb == "train":
        config.run_dir, config.resume = (None, str(checkpoint)) if checkpoint else (there, "auto")
    elif is_sweep(directory):
        if verb == "export":
            raise UserError(f"run={location} is an evaluation sweep, which has no checkpoint: give the run that was evaluated")
        config.run_dir, config.resume = there if verb == "eval" else None, "never"
    else:
        config.run_dir, config.resume, config.checkpoint = None, "never", str(checkpoint or there)
    return config


def restored(values: dict[str, Any], where: str) -> DictConfig:
    """What ``recipe.read`` takes. Raises UserError where it is no recipe of this version and these plug-ins; ``where`` it was kept."""
    if _interpolates(values):
        raise UserError(f"{where} holds no recipe of this version of rlinf-vla (it has an interpolation, which would be resolved here)")
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
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise UserError(f"{where} holds no recipe of this version of rlinf-vla ({missing[0]} has no value)")
    return config


def _interpolates(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_interpolates(child) for item in node.items() for child in item)
    return any(map(_interpolates, node)) if isinstance(node, list) else isinstance(node, str) and "${" in node


def _options(node: dict[str, Any], absent: str | None, kind: str, known: dict[str, Any]) -> Any:
    return None if node["name"] == absent else plugins.choose(kind, node["name"], known).Config()

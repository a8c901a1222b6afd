"""The typed recipe: what a user may write, where, and in which units. Defaults live here and in the plug-ins' own dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_origin

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from rlinf_vla import plugins
from rlinf_vla.algorithms import grpo
from rlinf_vla.algorithms.classifier import ClassifierConfig
from rlinf_vla.algorithms.grpo import GRPOConfig
from rlinf_vla.algorithms.ppo import PPOConfig
from rlinf_vla.algorithms.sac import SACConfig
from rlinf_vla.algorithms.sft import SFTConfig
from rlinf_vla.flow.planning.plan import SPLITS
from rlinf_vla.ranges import Count, CountOrZero, Matches, Name, NonNegative, OneOf, Positive, Range, Seed, Size, check_values
from rlinf_vla.recipe.checks import NO_MODEL, check
from rlinf_vla.recipe.cluster import ClusterConfig
from rlinf_vla.recipe.evaluation import NO_ALGORITHM, EvaluationConfig, NoAlgorithmConfig, SweepConfig
from rlinf_vla.recipe.robot import ROBOT, RobotEnvConfig, SessionConfig
from rlinf_vla.recipe.suggestions import meant
from rlinf_vla.rollout.control_config import ControlConfig
from rlinf_vla.training.lora import LoraOptions
from rlinf_vla.trust import OUTSIDE
from rlinf_vla.types import DTYPES, UserError

ALGORITHMS = {"ppo": PPOConfig, "grpo": GRPOConfig, "sac": SACConfig, "sft": SFTConfig, "classifier": ClassifierConfig}
ALGORITHMS |= {NO_ALGORITHM: NoAlgorithmConfig}
ASSET = "asset://"
FOLDER = Matches(r"\w[\w.-]*", "letters, digits, dots, hyphens and underscores")


@dataclass
class ModelConfig:
    name: Name = MISSING
    checkpoint: str = MISSING
    """Directory in the model's official layout; asset://NAME is one that comes with the package."""
    options: Any = MISSING
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass
class RewardConfig:
    """What training takes as the reward of a control step. Evaluations keep the environment's own."""

    name: Name | None = None
    """A reward plug-in; null: the environment's own."""
    options: Any = None
    weight: NonNegative = 1.0
    """Of that reward."""
    env_weight: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Of the environment's own, added."""
    terminal: bool = False
    """Only an episode's last step earns a reward."""


@dataclass
class RolloutConfig:
    temperature: Annotated[float, Range(0, 100, above=True)] = 1.0
    """Of sampling, in rollouts and in updates alike."""
    pipeline_depth: Annotated[int, Range(1, 1024)] = 2
    """Environment groups that take turns: while one simulates, the policy infers for another."""
    batch_size: Size = 8
    """Environments per policy call."""
    split: Annotated[str, OneOf(*SPLITS)] = "none"
    """head: rollout workers have the policy's action head only, feature workers beside the trainer its backbone (docs/split.md)."""
    rounded_weights: bool = False
    """Rollouts and evaluations act with what trains rounded to the dtype of the other weights: half the bytes beside bfloat16."""


@dataclass
class RecordConfig:
    """Of ``rlinf-vla record``."""

    video: bool = True
    """Cameras become H.264 video; false: PNG images, which are larger and lose nothing."""
    failures: bool = False
    """Episodes without success are kept too."""


@dataclass
class CheckpointConfig:
    every: Count = 5
    """Iterations between checkpoints."""
    keep: Count = 3


@dataclass
class PresetConfig:
    """What a preset (recipes/preset) is for; nothing where none was chosen."""

    name: Name | None = None
    algorithm: Name | None = None
    models: list[Name] = field(default_factory=list)


@dataclass
class Recipe:
    name: Annotated[str, FOLDER] = MISSING
    """Also of the folder below runs/ where its runs lie."""
    seed: Seed = 0
    iterations: CountOrZero = MISSING
    """Of the algorithm; of what is shown how (sft, classifier), optimiser steps."""
    run_dir: str | None = field(default=None, metadata=OUTSIDE)
    """null: runs/<recipe>/<timestamp>."""
    resume: str = "never"
    """never, auto (the newest complete checkpoint of run_dir, or of all runs of this recipe), or a run directory or checkpoint."""
    checkpoint: str | None = None
    """A checkpoint of an earlier run, to evaluate, to start from or to export; eval and export take a run directory's newest, too."""
    output: str | None = field(default=None, metadata=OUTSIDE)
    """Where export and record write: a directory that is new or empty."""
    output_dtype: Annotated[str, OneOf(*DTYPES)] | None = None
    """Of exported weights: float32 or bfloat16; null: as in model.checkpoint."""
    episodes: Count = 200
    """Evaluation episodes; in a sweep, of every task."""
    profile: Any = None
    """Of plan: a file, or a list of them, with what operations cost on a type of device; null: measured here, now."""
    profile_scale: Positive | None = None
    """Of plan: for GPUs that were never measured, suppose that they do the policy's part so many times as fast as the profile's device."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    env: Any = MISSING
    robot: Any = None
    """The arm of env=robot, a plug-in; null: episodes are played in a simulator."""
    session: SessionConfig = field(default_factory=SessionConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: Any = MISSING
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    preset: PresetConfig = field(default_factory=PresetConfig)


def register() -> None:
    """Make the schemas known to Hydra: one choice of group ``env``, ``reward``, ``model`` and ``algorithm`` per plug-in."""
    OmegaConf.register_new_resolver("episodes", _control_steps, replace=True)
    _store(None, "schema", Recipe)
    _store("cluster", "schema", ClusterConfig)
    for name, config in ALGORITHMS.items():
        _store("algorithm", name, config)
    for name, preset in grpo.PRESETS.items():
        _store("algorithm", name, preset)
    for name, env in env_configs().items():
        _store("env", name, env)
    for name, robot in plugins.robots().items():
        _store("robot", name, robot.Config)
    for name, reward in plugins.rewards().items():
        _store("reward", name, RewardConfig(name=name, options=reward.Config()))
    _store("model", NO_MODEL, ModelConfig(name=NO_MODEL, checkpoint=NO_MODEL, options=None))
    for name, model in plugins.models().items():
        _store("model", name, ModelConfig(name=name, options=model.Config()))


def _store(group: str | None, name: str, node: Any) -> None:
    """What is there already is left: Hydra takes each node apart anew, which is half of what composing a recipe costs."""
    if _STORED.get((group, name)) != node:
        ConfigStore.instance().store(group=group, name=name, node=node)
        _STORED[group, name] = node


_STORED: dict[tuple[str | None, str], Any] = {}


def env_configs() -> dict[str, type]:
    """What ``env=NAME`` may be."""
    return {name: env.Config for name, env in plugins.envs().items()} | {ROBOT: RobotEnvConfig}


def _control_steps(episodes: int, *, _root_: DictConfig) -> int:
    """What ``${episodes:N}`` means in a recipe: control steps of N episodes, whatever the task's limit is."""
    if (limit := _root_.env.episode_limit) is None:
        raise ValueError("counts whole episodes, and env.episode_limit=null does not say how many control steps that is")
    return int(episodes * limit)


def keys() -> list[str]:
    """Every key that some recipe may have."""
    nodes = [("", Recipe), *(("algorithm.", config) for config in ALGORITHMS.values())]
    nodes += [("env.", env) for env in env_configs().values()]
    nodes += [("robot.", robot.Config) for robot in plugins.robots().values()]
    nodes += [("reward.options.", reward.Config) for reward in plugins.rewards().values()]
    nodes += [("model.options.", model.Config) for model in plugins.models().values()]
    return sorted({prefix + key for prefix, node in nodes for key in _keys(OmegaConf.structured(node))})


def right_key(key: str) -> str:
    """How the complaint that ``key`` does not exist goes on: with what was meant."""
    known = keys()
    if key in known:
        return " of what is chosen here: give recipe=NAME, which chooses env, model and algorithm"
    found = meant(key, known)
    return f"; did you mean {' or '.join(found)}?" if found else " (--cfg job shows all keys)"


def _keys(node: DictConfig) -> list[str]:
    found: list[str] = []
    for name in map(str, node):
        child = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        found.append(name)
        if isinstance(child, DictConfig) and get_origin(child._metadata.ref_type) is not dict:  # whose keys are the user's to choose
            found += [f"{name}.{key}" for key in _keys(child)]
    return found


def read_node(config: DictConfig, name: str) -> Any:
    """The node ``name`` of a composed configuration that is nothing else: without environment and algorithm, say. Raises UserError."""
    _refuse_unknown_keys(config)
    node = OmegaConf.to_object(config[name])
    check_values(node, f"{name}.")
    return node


def _refuse_unknown_keys(config: DictConfig) -> None:
    unknown = sorted(set(_keys(config)) - set(keys()))  # Hydra's +KEY=VALUE adds any
    if unknown:
        raise UserError(f"{unknown[0]} is not a key{right_key(unknown[0])}")


def read(config: DictConfig) -> Recipe:
    """The composed configuration as dataclasses, checked as a whole. Raises UserError."""
    _refuse_unknown_keys(config)
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            hint = " (choose one with recipe=NAME; `rlinf-vla list recipes` names them)" if "name" in missing else ""
            raise UserError(f"{missing[0]} has no value{hint or f': give {missing[0]}=...'}")
        recipe = OmegaConf.to_object(config)
    except InterpolationResolutionError as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0].rpartition(': ')[2]}") from None
    assert isinstance(recipe, Recipe)
    check_values(recipe)
    _check_choices(recipe)
    check(recipe)
    return recipe


def _check_choices(recipe: Recipe) -> None:
    """What ``GROUP=NAME`` chose still has its name, and its own keys. Raises UserError."""
    model, reward = recipe.model, recipe.reward
    _check_choice("algorithm", recipe.algorithm, getattr(recipe.algorithm, "name", None), ALGORITHMS)
    _check_choice("env", recipe.env, getattr(recipe.env, "name", None), env_configs())
    if recipe.robot is not None:
        known = {name: robot.Config for name, robot in plugins.robots().items()}
        _check_choice("robot", recipe.robot, getattr(recipe.robot, "name", None), known)
    _check_choice("model", model.options, model.name, {name: each.Config for name, each in plugins.models().items()} | {NO_MODEL: NoneType})
    if reward.name is None and not (reward.options is None or is_dataclass(reward.options)):
        raise UserError(f"reward.options={reward.options} belongs to no reward: choose one with reward=NAME")
    if reward.name is not None:
        _check_choice("reward", reward.options, reward.name, {name: each.Config for name, each in plugins.rewards().items()})


def _check_choice(group: str, node: Any, name: Any, known: dict[str, type]) -> None:
    if name not in known:
        raise UserError(f"{group}.name={name} is not known{plugins.nearest(str(name), list(known))}: choose with {group}=NAME")
    if not isinstance(node, known[name]):
        raise UserError(f"{group}.name={name} does not go with the other keys of {group}: choose with {group}={name}, which sets them too")


def asset_path(location: str) -> Path:
    """A path, or ``asset://NAME`` inside the package."""
    if not location.startswith(ASSET):
        return Path(location).expanduser()
    path = Path(str(files("rlinf_vla.assets"))) / location[len(ASSET) :]
    if not path.exists():
        known = [child.name for child in path.parent.glob("[a-z]*") if child.is_dir()]
        raise UserError(f"{location} is not in the package{plugins.nearest(path.name, known)}")
    return path

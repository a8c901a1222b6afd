"""Define the typed recipe: keys, types, units and defaults; plug-ins add their own dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from rlinf_vla.config.cluster import SPLITS, ClusterConfig
from rlinf_vla.config.control import ControlConfig
from rlinf_vla.config.evaluation import EvaluationConfig, SweepConfig
from rlinf_vla.config.ranges import Count, CountOrZero, Matches, Name, NonNegative, OneOf, Positive, Range, Seed, Size, SizeOrZero
from rlinf_vla.config.robot import SessionConfig
from rlinf_vla.config.trust import OUTSIDE

FOLDER = Matches(r"\w[\w.-]*", "letters, digits, dots, hyphens and underscores")


@dataclass
class LoraOptions:
    """Recipe node ``model.lora``."""

    rank: SizeOrZero = 32
    """Rank of the adapters; 0 trains all weights instead."""
    alpha: Size | None = None
    """Numerator of the scale alpha / rank; null: rank."""
    targets: list[Name] = field(default_factory=list)
    """Suffixes of the names of adapted backbone modules; empty: the model's default."""
    adapter: str | None = None
    """Start from this PEFT directory, written by official scripts; it sets rank, alpha, targets."""
    vision: bool = True
    """Add adapters to the vision towers."""
    language: bool = True
    """Add adapters to the language model."""


@dataclass
class ModelConfig:
    name: Name = MISSING
    checkpoint: str = MISSING
    """Model directory in its official layout, or asset://NAME for one shipped with the package."""
    options: Any = MISSING
    """Options of the model plug-in."""
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass
class RewardConfig:
    """Training reward of a control step. Evaluation keeps the environment's success signal."""

    name: Name | None = None
    """Reward plug-in; null: the environment's reward."""
    options: Any = None
    """Options of the reward plug-in."""
    weight: NonNegative = 1.0
    """Weight of the plug-in's reward."""
    env_weight: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Weight of the environment's reward, which is added."""
    terminal: bool = False
    """Give a reward only at the last step of an episode; all other steps get 0."""


@dataclass
class RolloutConfig:
    temperature: Annotated[float, Range(0, 100, above=True)] = 1.0
    """Sampling temperature, the same in rollouts and in updates."""
    pipeline_depth: Annotated[int, Range(1, 1024)] = 2
    """Environment groups per rollout worker; one simulates while the policy infers for another."""
    batch_size: Size = 8
    """Environments per policy call."""
    split: Annotated[str, OneOf(*SPLITS)] = "none"
    """head: rollout workers hold only the policy's action head; feature workers on the trainer's
    machine run its backbone (docs/split.md). none: rollout workers hold the whole policy."""
    rounded_weights: bool = False
    """Act with trained weights rounded to the network's dtype in rollouts and evaluation; training
    keeps float32. For a bfloat16 network this halves the bytes sent after an update."""


@dataclass
class RecordConfig:
    """Settings of ``rlinf-vla record`` and ``rlinf-vla robot record``."""

    video: bool = True
    """Store cameras as H.264 video; false: as PNG images, which are larger and lossless."""
    failures: bool = False
    """Also keep episodes without success."""


@dataclass
class CheckpointConfig:
    every: Count = 5
    """Iterations between checkpoints."""
    keep: Count = 3
    """Number of newest checkpoints to keep; older ones are deleted."""


@dataclass
class PresetConfig:
    """Algorithm and models that the chosen preset (recipes/preset) fits; empty without a preset."""

    name: Name | None = None
    algorithm: Name | None = None
    models: list[Name] = field(default_factory=list)


@dataclass
class Recipe:
    name: Annotated[str, FOLDER] = MISSING
    """Recipe name; its runs are stored in runs/<name>/."""
    seed: Seed = 0
    """Random seed of the run: initial weights, sampling noise, episodes and minibatches."""
    iterations: CountOrZero = MISSING
    """Training iterations; for supervised algorithms (sft, classifier) optimiser steps."""
    run_dir: str | None = field(default=None, metadata=OUTSIDE)
    """Run directory; null: runs/<name>/<timestamp>."""
    resume: str = "never"
    """never, auto (newest complete checkpoint in run_dir, or of all runs of this recipe), or a run
    directory or checkpoint."""
    checkpoint: str | None = None
    """Checkpoint of an earlier run to evaluate, start from or export; eval and export also take a
    run directory and use its newest checkpoint."""
    output: str | None = field(default=None, metadata=OUTSIDE)
    """Output directory of export and record; must be new or empty."""
    output_dtype: Annotated[str, OneOf("float32", "bfloat16")] | None = None
    """dtype of exported weights: float32 or bfloat16; null: as in model.checkpoint."""
    episodes: Count = 200
    """Evaluation episodes; in a sweep, per task."""
    profile: Any = None
    """For plan: file or list of files with operation costs of a device type; null: measure here."""
    profile_scale: Positive | None = None
    """For plan, on GPUs without a profile: assumed policy speed relative to the profiled device."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    env: Any = MISSING
    robot: Any = None
    """Robot plug-in for env=robot; null: episodes run in a simulator."""
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

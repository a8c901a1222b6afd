"""Define the typed recipe: keys, types, units and defaults; plug-ins add their own dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from omegaconf import MISSING

from rlinf_vla.config.cluster import SPLITS, ClusterConfig
from rlinf_vla.config.policy_server import BackboneConfig
from rlinf_vla.config.ranges import (
    OUTSIDE,
    Count,
    CountOrZero,
    Matches,
    Name,
    NonNegative,
    OneOf,
    Range,
    Seed,
    Size,
    SizeOrZero,
)
from rlinf_vla.config.robot import ControlConfig, SessionConfig
from rlinf_vla.config.serve import ServeConfig

MODES = ("sampled", "greedy")
PROBES = ("blank_instruction", "shuffled_instruction", "blank_image", "frozen_image")
BLANK_INSTRUCTION, SHUFFLED_INSTRUCTION, BLANK_IMAGE, FROZEN_IMAGE = PROBES
NO_PROBE = "none"
"""What a result says of an episode with unchanged observations."""
ON_POLICY = "on-policy"
OFF_POLICY = "off-policy"
SUPERVISED = "supervised"
INTERACTIVE = "interactive"
NO_ALGORITHM = "none"
"""Algorithm name of a recipe without training, for ``rlinf-vla eval``."""
NO_AUGMENTATION = "none"
"""Value of ``algorithm.augmentation`` with which images stay as they are."""
POLICY = "policy"
"""``record.player``: the recipe's policy."""
EXPERT = "expert"
"""``algorithm.teacher``: the simulator's scripted expert."""

TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "trackio", "mlflow")

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
    init: Annotated[str, OneOf("kaiming", "gaussian")] = "kaiming"
    """How factors A of new adapters are drawn, as in peft: uniformly, as weights of a linear layer,
    or normally with the standard deviation 1 / rank."""
    adapter: str | None = None
    """Start from this PEFT directory, or hf://ORG/NAME; it sets rank, alpha, targets."""
    vision: bool = True
    """Train the vision towers: their adapters, or with rank 0 all their weights."""
    language: bool = True
    """Train the language model, in the same way."""
    merge: bool = True
    """Act with adapters merged into the weights, which costs no more than without adapters. The
    weights before are kept in main memory; false: needs no room for them, and acts slower."""


@dataclass
class ModelConfig:
    """The policy that acts and learns."""

    name: Name = MISSING
    """Model plug-in; ``model=NAME`` chooses it."""
    checkpoint: str = MISSING
    """Model directory in its official layout, asset://NAME for one shipped with the package, or
    hf://ORG/NAME or hf://ORG/NAME@REVISION for one of the Hugging Face Hub (cached in HF_HOME)."""
    options: Any = MISSING
    """Options of the model plug-in."""
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass
class AlgorithmConfig:
    """Base of the recipe nodes ``algorithm``; each has a key ``name``.

    The same in all algorithms that have them:

    batch_size: rows per optimiser step.
    learning_rate: learning rate of AdamW.
    value_learning_rate: learning rate of AdamW for the critics.
    weight_decay: weight decay of AdamW.
    warmup_steps: optimiser steps over which the learning rate rises linearly, before it decays.
    max_grad_norm: gradients with a larger 2-norm are scaled down to this norm.
    """

    family: ClassVar[str] = ""
    """How it learns: from its own rollouts, from a replay buffer, from labelled data, or from an
    operator who corrects it at a robot."""
    acts: ClassVar[bool] = True
    """Whether what it trains acts, and so can be evaluated in an environment."""
    trains_reward: ClassVar[bool] = False
    """Whether it trains the network of a reward instead of a policy."""


@dataclass
class NoAlgorithmConfig(AlgorithmConfig):
    """``algorithm=none``: the recipe is for evaluation only."""

    name: Name = NO_ALGORITHM


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
class DeadlineConfig:
    """Recipe node ``rollout.deadline``: simulators run by the clock of a robot's control loop.

    Training and evaluation then have the delays that the policy will meet (docs/control_loop.md).
    """

    delays: list[Annotated[int, Range(0, 1023)]] = field(default_factory=list)
    """Control steps between an observation and the arrival of its action chunk; each inference
    draws one of the list. Empty, without ``measured``: chunks arrive at once."""
    measured: str | None = None
    """control.json of a robot run, whose measured delays are drawn instead."""
    execution_horizon: Size | None = None
    """Actions executed per inference; null: the chunk less the longest delay."""
    drop: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Probability that a chunk never arrives, so that the arm is held for the horizon."""


@dataclass
class LimitsConfig:
    """Recipe node ``rollout.limits``: simulators change actions as an arm's safety filter does.

    Training and evaluation then count the changes as costs (docs/algorithms.md).
    """

    translation: Annotated[float, Range(0, 2, above=True)] | None = None
    """Largest length of an action's translation, in units of a full action; null: no limit."""
    rotation: Annotated[float, Range(0, 2, above=True)] | None = None
    """The same of its rotation."""
    workspace: list[Annotated[float, Range(-100, 100)]] = field(default_factory=list)
    """Box [x0, y0, z0, x1, y1, z1] in metres in which the tool's target stays; empty: no limit."""


@dataclass
class RolloutConfig:
    """How the policy acts in the environments."""

    temperature: Annotated[float, Range(0, 100, above=True)] = 1.0
    """Sampling temperature, the same in rollouts and in updates."""
    pipeline_depth: Annotated[int, Range(1, 1024)] = 2
    """Environment groups per rollout worker; one simulates while the policy infers for another."""
    batch_size: Size = 8
    """Environments per policy call."""
    deadline: DeadlineConfig = field(default_factory=DeadlineConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    split: Annotated[str, OneOf(*SPLITS)] = "none"
    """head: rollout workers hold only the policy's action head; feature workers on the trainer's
    machine, or the server at ``backbone.url``, run its backbone (docs/split.md). none: rollout
    workers hold the whole policy."""
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    rounded_weights: bool = False
    """Act with trained weights rounded to the network's dtype in rollouts and evaluation; training
    keeps float32. For a bfloat16 network this halves the bytes sent after an update."""


@dataclass
class EvaluationConfig:
    """What is evaluated, and when."""

    modes: list[Annotated[str, OneOf(*MODES)]] = field(default_factory=lambda: list(MODES))
    """sampled: act at ``temperature``; greedy: act at temperature 0."""
    temperature: Annotated[float, Range(0, 100, above=True)] | None = None
    """Of the mode sampled; null: rollout.temperature."""
    probes: list[Annotated[str, OneOf(*PROBES)]] = field(default_factory=list)
    """Evaluate the same episodes again, once for each of these changes of what the policy observes:
    blank_instruction: no text; shuffled_instruction: its words in an order drawn from the episode's
    seed; blank_image: all cameras grey; frozen_image: the episode's first images all the time
    (docs/evaluation.md)."""
    every: CountOrZero = 0
    """Iterations between evaluations during training; 0: none during training."""
    before_and_after: bool = True
    """Evaluate before the first and after the last iteration."""
    filmed: CountOrZero = 1
    """Episodes per evaluation saved as video; in a sweep per policy and task, failures first."""


START = "start"
"""In ``sweep.policies``: model.checkpoint unchanged."""


@dataclass
class SweepConfig:
    """Sweep of ``rlinf-vla eval``: policies x suites x tasks x seeds (docs/evaluation.md)."""

    policies: list[str] = field(default_factory=list)
    """Policies under evaluation, all on the same episodes: ``start`` (model.checkpoint unchanged),
    a checkpoint of a run, a run (its newest checkpoint), a model directory (or asset://NAME,
    hf://ORG/NAME), ``expert`` (the simulator's script) or ``random``.
    ``checkpoint`` is added. ``${model_or:expert,random}``: the checkpoint or else the model that is
    given, or these. Empty: no sweep; ``checkpoint`` alone is evaluated, into its run."""
    block: Count = 10
    """Episodes of a task that run and are saved together; a kill loses only unfinished blocks."""
    parallel: Size = 1
    """Processes that run blocks, each with its own environments; 1: this process."""
    stop_when_decided: bool = False
    """Compare two policies, and end each suite as soon as one is shown to be better, at an error of
    5 %; looked at after every ``block`` seeds of all tasks. ``episodes`` is then the most."""


@dataclass
class RecordConfig:
    """Settings of ``rlinf-vla record`` and ``rlinf-vla robot record``."""

    player: Annotated[str, OneOf(EXPERT, POLICY)] = EXPERT
    """Who plays a simulator's episodes: its scripted expert, or the policy of the recipe or of
    ``checkpoint``."""
    first: CountOrZero = 0
    """Number of the first episode; the same numbers are the same initial states."""
    video: bool = True
    """Store cameras as H.264 video; false: as PNG images, which are larger and lossless."""
    failures: bool = False
    """Also keep episodes without success."""


@dataclass
class CheckpointConfig:
    """When a run writes checkpoints, and how many it keeps."""

    every: Count = 5
    """Iterations between checkpoints."""
    keep: Count = 3
    """Number of newest checkpoints to keep; older ones are deleted."""


@dataclass
class PresetConfig:
    """Algorithm and models that the chosen preset (recipes/preset) fits; empty without a preset."""

    name: Name | None = None
    """Name of the preset."""
    algorithm: Name | None = None
    """Algorithm for which it was published."""
    models: list[Name] = field(default_factory=list)
    """Models that it fits."""


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
    """Checkpoint of an earlier run to evaluate, serve, start from or export, or a run directory for
    its newest one."""
    output: str | None = field(default=None, metadata=OUTSIDE)
    """Output directory of export and record, which must be new or empty; new file of plan."""
    output_dtype: Annotated[str, OneOf("float32", "bfloat16")] | None = None
    """dtype of exported weights: float32 or bfloat16; null: as in model.checkpoint."""
    episodes: Count = 200
    """Evaluation episodes; in a sweep, per task."""
    profile: Any = None
    """For plan: file or list of files with operation costs of a device type. null: measure here;
    for machines in cluster.nodes, predict from published numbers (docs/plan.md)."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    env: Any = MISSING
    """Environment plug-in and its keys; ``env=NAME`` chooses it."""
    robot: Any = None
    """Robot plug-in for env=robot; null: episodes run in a simulator."""
    session: SessionConfig = field(default_factory=SessionConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: Any = MISSING
    """Algorithm and its keys; ``algorithm=NAME`` chooses it."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: list[Annotated[str, OneOf(*TRACKERS)]] = field(default_factory=lambda: [TENSORBOARD])
    """Where metrics go besides ``metrics.jsonl``: tensorboard (a folder of the run), wandb,
    trackio, mlflow. Accounts and addresses are in the environment, as each library documents
    (docs/guides/share.md)."""
    record: RecordConfig = field(default_factory=RecordConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    preset: PresetConfig = field(default_factory=PresetConfig)


def flat(node: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested dictionaries: key, with dots, -> value."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in flat(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }

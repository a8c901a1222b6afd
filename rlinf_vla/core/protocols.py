"""Protocols that model, simulator and reward plug-ins implement.

The engine knows plug-ins only through this module. A package registers them as entry points:
``rlinf_vla.models`` (a :class:`Policy` subclass), ``rlinf_vla.envs`` (an :class:`EnvPlugin`) and
``rlinf_vla.rewards`` (a :class:`RewardPlugin`). Modules of the latter two must be cheap to import:
they import PyTorch, simulators and drivers on first use, and ``core/tasks.py`` instead of this one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlinf_vla.core.devices import CPU, device_of, moved
from rlinf_vla.core.images import blank
from rlinf_vla.core.tasks import Diagnosis as Diagnosis
from rlinf_vla.core.tasks import Suite as Suite
from rlinf_vla.core.tasks import Task as Task
from rlinf_vla.core.types import (
    ActionEval,
    ActionSample,
    Episodes,
    Inputs,
    Observation,
    StepResult,
    Tensors,
)

if TYPE_CHECKING:
    from rlinf_vla.core.distributions import Distribution
    from rlinf_vla.core.origin import Origin


@dataclass(frozen=True)
class ToolUnits:
    """Units of actions ``(dx, dy, dz, gripper)`` or ``(dx, dy, dz, rx, ry, rz, gripper)``.

    An action of 1 moves the tool's target so far per control step; see docs/conventions.md.
    """

    translation_m: float
    """Metres along an axis of the robot's base."""
    rotation_rad: float = 0.0
    """Radians, right-handed, about an axis of the robot's base."""


@dataclass(frozen=True)
class Convention:
    """Known meanings. A policy whose convention differs from its environment's is refused.

    None: not known, and so not compared.
    """

    tool: ToolUnits | None = None
    gripper: str | None = None
    """``open_positive``: +1 opens, -1 closes; ``close_positive``: the opposite; ``zero_to_one``: 0
    closes, 1 opens."""
    state: str | None = None
    """``quaternion``: as docs/conventions.md; ``axis_angle``: position, rotation vector and both
    fingers; ``qpos``: the positions of all joints."""
    images: str | None = None
    """``upright``; ``rot180``: LIBERO's images rotated by 180 degrees, which are mirrored;
    ``none``: as LIBERO renders them, upside down."""
    jpeg: bool = False
    """Of a policy: it reads images after a JPEG round trip (``core/jpeg.py``), as they are in RLDS
    data. Environments show them beside the others: ``VectorEnv.add_jpeg``."""


def common(tool: ToolUnits) -> Convention:
    """Return the convention of docs/conventions.md."""
    return Convention(tool, "open_positive", "quaternion", "upright")


ImageSize = tuple[int, int]
"""(height, width) in pixels."""


@runtime_checkable
class Noise(Protocol):
    """The random numbers of one policy call; those of a row depend only on its episode and step."""

    def uniform(self, *shape: int) -> Tensor:
        """Draw float32 ``[B, *shape]`` uniformly from the open interval (0, 1)."""

    def normal(self, *shape: int) -> Tensor:
        """Draw float32 ``[B, *shape]`` from the standard normal distribution."""


@dataclass(frozen=True)
class NoiseKeys:
    """What determines the random numbers of a policy call: int64 ``[B]`` each, beside the seed."""

    run_seed: int
    task: Tensor
    """Task and attempt: ``task_id + attempt * MAX_TASKS``."""
    seed: Tensor
    step: Tensor


@runtime_checkable
class KeyedNoise(Noise, Protocol):
    """Noise that a policy on another machine can draw itself, from the same keys."""

    keys: NoiseKeys


@dataclass(frozen=True)
class PolicySpec:
    """Input and output sizes of a policy."""

    chunk: int
    action_dim: int
    state_dim: int
    """0 if the policy does not read proprioception."""
    images: dict[str, ImageSize]
    convention: Convention = Convention()
    """What its actions, states and images mean, as far as the checkpoint tells."""
    env: dict[str, Any] = field(default_factory=dict)
    """Values that this policy needs of keys of the node ``env``, used where these are null."""
    remarks: tuple[str, ...] = ()
    """Lines for the user at the start of a run, such as what is assumed of the checkpoint."""
    bars: float | None = None
    """Share of black bars at the top or the left, if images of other shapes are brought to the
    policy's with such bars, and small ones enlarged; None: they are stretched, and not enlarged."""
    suite: str | None = None
    """The only suite of LIBERO whose data it learned; None: several, or not known."""


class Policy(nn.Module):
    """A VLA policy: ``prepare -> encode -> act`` in rollouts, ``evaluate`` in updates.

    ``backbone`` is the module that LoRA adapts, with the official parameter names. ``value_head``
    is the critic, trained with a separate learning rate.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    """Dataclass of a recipe's ``model.options`` node."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Default LoRA targets: module-name suffixes inside ``backbone``."""
    vision_modules: ClassVar[tuple[str, ...]] = ()
    """Full names of ``backbone`` modules that do not train with ``model.lora.vision=false``."""
    language_modules: ClassVar[tuple[str, ...]] = ()
    """The same for ``model.lora.language=false``."""
    full_modules: ClassVar[tuple[str, ...]] = ()
    """Modules of ``backbone`` trained in full beside the adapters: new or small heads."""
    split_unsupported: ClassVar[str | None] = (
        "does not declare which of its modules form the action head"
    )
    """Why ``rollout.split=head`` is not supported, as a phrase that follows the model's name.

    None: it is supported, by the three methods marked "for a split".
    """
    head_modules: tuple[str, ...] = ()
    """Full names of ``backbone`` modules that ``act`` and ``value`` run: part of the head.

    All modules outside ``backbone`` belong to the head, too.
    """
    head_rows: dict[str, slice] | None = None
    """Weights of the head of which only these rows are used, unless they have adapters."""
    noise_dim: int | None = None
    """Dimension of the noise that ``act_from_noise`` takes; None: it is unsupported."""
    condition_unsupported: str | None = "does not declare which of its inputs the instruction gives"
    """Why a condition cannot be added to its instructions (``algorithm=recap``), as a phrase that
    follows the name.

    None: it can, by ``prompt`` and ``guided``.
    """
    augmentation_unsupported: str | None = "does not declare an official augmentation of its images"
    """Why ``algorithm.augmentation=official`` is not supported, as a phrase that follows the name.

    None: it is supported, by ``augment`` and ``prepare_to_augment``.
    """
    distributions_unsupported: str | None = (
        "draws no number of an action from a distribution in closed form"
    )
    """Why ``distributions`` is not supported, as a phrase that follows the name; None: it is."""
    sees_depth: ClassVar[bool] = False
    """Whether its images may be distances (``core/observation_features.py``)."""
    learns: ClassVar[bool] = True
    """False: its weights are elsewhere. It has no parameters, only acts, and is not loaded from
    ``model.checkpoint``."""
    elsewhere: BackboneElsewhere | None = None
    """Where the backbone runs if this policy is only a head (``rollout.backbone``); None: here."""
    origin: Origin | None = None
    """The files that it was loaded from; None: not known."""
    state_limit: tuple[str, float] | None = None
    """Name of the prepared input with the state as the checkpoint's statistics scale it, and the
    magnitude from which an entry is beyond them; None: it has none."""
    merge_adapters: bool = True
    """Whether rollouts merge the adapters into the weights (``model.lora.merge``)."""

    spec: PolicySpec
    backbone: nn.Module
    value_head: nn.Module

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Path, config: Any) -> Policy:
        """Load this model's official checkpoint layout. Raises UserError if it does not fit."""

    @classmethod
    def without_weights(cls, checkpoint: Path, config: Any) -> Policy:
        """Build with the backbone on the meta device, in the dtypes of ``load``; read no weights.

        To see whether it fits before its weights are loaded, to count memory, and for a split. A
        model whose weights load in an instant need not override it.
        """
        return cls.load(checkpoint, config)

    @classmethod
    def published_sizes(cls, location: str, config: Any) -> tuple[str, Any] | None:
        """Return where the package has the sizes of a published checkpoint, and ``config`` for it.

        For one that is not on this machine; there are no weights. None: it is not known.
        """
        return None

    @classmethod
    def provenance(cls, config: Any) -> dict[str, Any]:
        """For a policy that does not learn: return JSON values that identify its weights.

        ``sha256`` of their files and ``device``; each None if unknown. Raises UserError.
        """
        raise NotImplementedError

    def begin_control(self) -> None:
        """Called before the policy acts in a control loop, where a late answer is an error."""
        if self.elsewhere is not None:
            self.elsewhere.begin_control()

    @abstractmethod
    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Write the official checkpoint layout, which ``load`` reads, into an existing directory.

        ``dtype``: of the weights; None: as loaded, or bfloat16 if the weights began as random ones.
        """

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        """Make room for the prompts of these instructions, before the first ``prepare``.

        Raises UserError if a prompt is longer than the recipe allows.
        """

    @abstractmethod
    def prepare(self, obs: Observation) -> Inputs:
        """Tokenise and resize an observation. The result is cheap to store."""

    def prompt(self, obs: Observation) -> Inputs:
        """Return those of the inputs of ``prepare`` that depend on the instruction."""
        raise NotImplementedError

    def guided(self, features: Any, without: Any, scale: float) -> Any:
        """Return features of which ``act`` extrapolates from those ``without`` a condition.

        It generates from ``without + scale * (features - without)``: of velocities (classifier-free
        guidance, arXiv 2207.12598), or of the mean action."""
        raise NotImplementedError

    def prepare_to_augment(self, obs: Observation) -> Inputs:
        """Prepare a demonstration for ``augment``: without what the augmentation replaces."""
        return self.prepare(obs)

    def augment(self, inputs: Inputs, noise: Noise) -> Inputs:
        """Return inputs of ``supervised_loss`` with the images augmented as the official trainer
        does, from what ``prepare_to_augment`` returned. A row depends on its own noise only."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, inputs: Inputs) -> Any:
        """Run vision encoder and language backbone; return features for ``act`` and ``value``."""

    @abstractmethod
    def pooled(self, features: Any) -> Tensor:
        """Pool the features to one vector per row, float32 ``[B, F]``, as input of a critic."""

    @cached_property
    def horizon(self) -> int:
        """Actions that a call predicts and imitation learns; ``spec.chunk`` are executed."""
        return self.spec.chunk

    @cached_property
    def pooled_width(self) -> int:
        """``F`` of ``pooled``, found by encoding an empty observation."""
        empty = Observation(
            blank(self.spec.images, 1),
            torch.zeros(1, self.spec.state_dim),
            ["nothing"],
        )
        with torch.no_grad():
            return self.pooled(self.encode(self.prepare(empty))).shape[1]

    def value(self, features: Any) -> Tensor:
        """Return the critic's value estimate, float32 ``[B]``."""
        return self.value_head(self.pooled(features)).squeeze(-1)

    @abstractmethod
    def act(self, features: Any, noise: Noise | None, temperature: float) -> ActionSample:
        """Sample a chunk.

        ``temperature=0`` is greedy, with the log_prob of temperature 1; a flow still starts from
        drawn noise, as published ones do. ``noise=None`` is greedy, too, and it starts from 0.
        """

    def act_from_noise(self, features: Any, noise: Tensor) -> Tensor:
        """Map noise float32 ``[B, noise_dim]`` to actions ``[B, C, D]``, deterministically."""
        raise NotImplementedError

    @abstractmethod
    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        """Evaluate samples under the same distribution as ``act``, differentiably."""

    def distributions(
        self, inputs: Inputs, latent: dict[str, Tensor], temperature: float
    ) -> Distribution:
        """Return what each number of a sample was drawn from, differentiably: the distribution
        whose log-probability and entropy ``evaluate`` returns."""
        raise NotImplementedError

    @abstractmethod
    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        """Return the imitation loss float32 ``[B]``; ``noise``: for models that denoise.

        ``actions``: the expert's next ones, float32 ``[B, horizon, D]``.
        """

    def pack(self, features: Any) -> Tensors:
        """For a split: reduce features to tensors ``[B, ...]`` that ``act`` and ``value`` need."""
        raise NotImplementedError

    def unpack(self, tensors: Tensors) -> Any:
        """For a split: restore features; ``act`` and ``value`` are bit-identical on them."""
        raise NotImplementedError

    def stored_weights(self, checkpoint: Path) -> Mapping[str, Callable[[], Tensor]]:
        """For a split: return what reads each weight that ``load`` would read, by full name.

        Raises UserError, as does each of them.
        """
        raise NotImplementedError

    def precompute(self, inputs: Inputs) -> Inputs:
        """Compute what no update can change ahead of ``evaluate``; the default does nothing.

        An update calls it once, without gradients; all epochs pass its result to ``evaluate``.
        Every tensor has leading dimension ``B``.
        """
        return inputs

    def reference_actions(self, inputs: Inputs) -> Tensor | None:
        """Return greedy actions, float32 ``[B, C, D]``, of an implementation without optimisations.

        ``rlinf-vla bench policy`` compares with it. None: there is none.
        """
        return None


@torch.no_grad()
def precompute_frozen(
    policy: Policy, inputs: dict[str, Tensor], rows: int, wanted: Tensor | None = None
) -> dict[str, Tensor]:
    """Apply ``policy.precompute`` to ``inputs``, ``rows`` rows at a time.

    ``wanted``: rows to compute (int64), all by default; other rows of the result are undefined.
    """
    first = next(iter(inputs.values()))
    wanted = torch.arange(len(first)) if wanted is None else wanted
    result: dict[str, Tensor] = {}
    for index in wanted.split(rows):
        part = moved({name: value[index] for name, value in inputs.items()}, device_of(policy))
        outputs = policy.precompute(part)
        if outputs is part:
            return inputs
        for name, value in moved(outputs, CPU).items():
            result.setdefault(name, value.new_empty(len(first), *value.shape[1:]))[index] = value
    return result


@runtime_checkable
class RealTimeChunking(Protocol):
    """A policy for ``control.real_time_chunking``: its chunks continue the one being executed."""

    def act_with_prefix(
        self, features: Any, noise: Noise | None, temperature: float, committed: Tensor, frozen: int
    ) -> ActionSample:
        """Sample a chunk that starts with ``committed[:, :frozen]``, then departs from it smoothly.

        committed: float32 ``[B, N, D]``, N <= C: what the robot will execute from this observation
        on unless a new chunk arrives; with N = 0 this is ``act``. frozen: how many of these actions
        will have been executed when this chunk arrives. Not in inference mode.
        """


class BackboneElsewhere(Protocol):
    """The backbone of a split policy, which another machine runs for the head here."""

    def prepare(self, obs: Observation) -> Inputs:
        """Return what ``encode`` takes of an observation."""

    def encode(self, inputs: Inputs) -> Tensors:
        """Return the packed features of ``inputs``, on the CPU. Raises Failure."""

    def trained(self, weights: Mapping[str, Tensor]) -> Tensors:
        """Take note of the trained weights of the whole policy, by full name, which replace those
        noted before; return those of the head."""

    def begin_control(self) -> None:
        """See ``Policy``."""


class RewardModel(nn.Module):
    """A success classifier, trained by ``rlinf-vla train recipe=reward_classifier``."""

    images: dict[str, ImageSize]
    """Its input images, by camera name."""

    @property
    def spec(self) -> PolicySpec:
        """That of a policy with the same inputs and no actions."""
        return PolicySpec(chunk=1, action_dim=0, state_dim=0, images=self.images)

    @abstractmethod
    def prepare(self, obs: Observation) -> Inputs:
        """Convert an observation to inputs with leading dimension ``B`` that are cheap to store."""

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Return the logits of success, float32 ``[B]``."""

    @abstractmethod
    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Write the plug-in's checkpoint into an existing directory; ``dtype=None``: float32."""


Learner = Policy | RewardModel
"""A network that a trainer can train."""


def prepared(learner: Learner, obs: Observation, augmented: bool = False) -> Inputs:
    """Return the inputs of ``learner``, prepared on its device.

    ``augmented``: of a policy, for ``Policy.augment``.
    """
    seen = obs.to(device_of(learner))
    if augmented and isinstance(learner, Policy):
        return learner.prepare_to_augment(seen)
    return learner.prepare(seen)


@dataclass(frozen=True)
class EnvSpec:
    """Static properties of a vector environment."""

    num_envs: int
    action_dim: int
    state_dim: int
    control_hz: float
    episode_limit: int
    """Number of control steps after which an episode is truncated."""
    images: dict[str, ImageSize]
    tasks: tuple[str, ...]
    """Task names, indexed by ``Episodes.task_id``."""
    device: torch.device
    tool: ToolUnits | None = None
    """None: actions and states do not follow docs/conventions.md (joint angles, for example)."""
    stack: dict[str, str] = field(default_factory=dict)
    """Versions, physics engine and renderer. Results of different stacks need not be comparable."""
    native: Convention | None = None
    """What is known of another convention than that of docs/conventions.md."""
    instructions: tuple[str, ...] = ()
    """All instructions that episodes can have; empty: not known in advance."""
    starts: int | None = None
    """Number of initial states of a task's evaluation episodes; None: each seed has its own."""
    steps_per_call: int | None = None
    """Control steps executed per policy call; None: the policy's whole chunk."""

    def steps(self, chunk: int) -> int:
        """Return the control steps of a policy call with ``chunk`` actions."""
        return self.steps_per_call or chunk

    @property
    def motion(self) -> ToolUnits | None:
        """What 1 means in actions of docs/conventions.md, whatever the states are; None: others."""
        convention = self.convention
        return self.tool or (convention.tool if convention.gripper == "open_positive" else None)

    @property
    def convention(self) -> Convention:
        if self.native is not None:
            return self.native
        return Convention() if self.tool is None else common(self.tool)


class VectorEnv(Protocol):
    """``B`` environments that step together, with gymnasium's DISABLED autoreset mode.

    The caller decides which environments are reset, and to which episode. The same episodes and
    actions give the same results, whatever ran before.
    """

    spec: EnvSpec

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        """Start ``episodes`` ``[B]`` in the environments of ``mask`` (bool ``[B]``; None: all)."""

    def reset_wait(self) -> Observation:
        """Return the current observation of all ``B`` environments, the first one after a reset."""

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        """Start up to ``C`` control steps of float32 ``[B, C, D]``.

        No episode may have ended, unless ``skip_ended``: environments whose episode has then
        execute nothing.
        """

    def step_wait(self) -> StepResult: ...

    def reset(self, episodes: Episodes, mask: Tensor | None = None) -> Observation:
        self.reset_async(episodes, mask)
        return self.reset_wait()

    def step(self, actions: Tensor) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def add_jpeg(self, cameras: Sequence[str]) -> None:
        """From the next reset on, also show images of ``cameras``, and no others, as ``jpeg``.

        The round trips belong where images are made: in processes, beside the simulators. An
        environment that does not implement this leaves them to the policy.
        """
        return None

    def render(self, index: int) -> Tensor:
        """Render environment ``index`` for human viewers: uint8 ``[H, W, 3]``."""

    def expert_actions(self) -> Tensor:
        """Return a scripted expert's actions for the current states: float32 ``[B, D]``.

        The expert is stateless and can label any state. Raises UserError if the task has none.
        """

    def losses(self) -> int:
        """Return how many simulators died or hung so far and were replaced without data loss."""
        return 0

    def close(self) -> None:
        """Release all resources; may be called repeatedly."""


@runtime_checkable
class HasOutline(Protocol):
    """An ``EnvPlugin`` whose specs are known before a simulator starts, or is installed."""

    def outline(self, config: Any) -> EnvSpec | None:
        """Return the spec of ``create(config, 1)``, without its stack; None if only the simulator
        knows it. Raises UserError for mistakes of the user."""


@runtime_checkable
class HasSuites(Protocol):
    """An ``EnvPlugin`` whose tasks may need more than one kind of vector environment."""

    def suites(self, config: Any) -> list[Suite]:
        """Return the suites in the order of execution, without starting a simulator.
        Raises UserError for mistakes of the user."""


@runtime_checkable
class HasBackends(Protocol):
    """An ``EnvPlugin`` that simulates on the CPU or on a GPU, as ``config.backend`` says."""

    def backend(self, config: Any, here: bool = True) -> str:
        """Return ``cpu`` or ``gpu``: where all ``config.num_envs`` environments are simulated.

        ``here``: on this machine, whose GPU is examined; else on one with a GPU. With ``auto`` the
        number decides, so it is that of the whole run, however workers divide it. Raises UserError
        if ``gpu`` is set and not possible.
        """


@runtime_checkable
class TakesGPU(Protocol):
    """An ``EnvPlugin`` whose simulators may take memory of the policy's GPU."""

    def gpu_bytes(self, config: Any, environments: int, processes: int) -> float:
        """Return the estimated bytes that ``environments`` of those of ``config`` take on a GPU.

        ``processes``: that draw them, if the CPU simulates.
        """


class EnvPlugin(Protocol):
    """A simulator plug-in, registered as an entry point of ``rlinf_vla.envs``."""

    name: str
    Config: type
    """Dataclass of the recipe node ``env``; needs ``name``, ``num_envs`` and ``episode_limit``."""

    def create(self, config: Any, groups: int) -> list[VectorEnv]:
        """Create ``config.num_envs`` environments as ``groups`` equal vector environments.

        They step independently. Raises UserError for mistakes of the user.
        """

    def tasks(self) -> list[Task]: ...

    def diagnose(self) -> list[Diagnosis]: ...


class Reward(Protocol):
    """The reward for training; evaluation always uses the simulator's success signal."""

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """Return ``result`` with ``reward`` ``[B, C]`` replaced by this reward.

        ``actions`` ``[B, C, D]`` were executed after observation ``before``. The reward may set
        ``terminated`` in a row's last valid step to end that episode. Invalid steps are ignored.
        """


@runtime_checkable
class ChecksOptions(Protocol):
    """A ``RewardPlugin`` that refuses wrong options before simulators start."""

    def check(self, config: Any) -> None:
        """Raise UserError if ``create`` would refuse the options in any environment."""


class RewardPlugin(Protocol):
    """A reward plug-in, registered as an entry point of ``rlinf_vla.rewards``."""

    name: str
    Config: type
    """Dataclass of a recipe's ``reward.options`` node."""

    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        """Create the reward. It may compute on ``device``; results are on the device of its inputs.

        Raises UserError for mistakes of the user.
        """

    def learner(self, config: Any) -> RewardModel:
        """Return the trainable network of this reward. Raises UserError if it has none."""


class WrappedEnv(VectorEnv):
    """Pass every call on to ``env``; subclasses override what they change."""

    def __init__(self, env: VectorEnv) -> None:
        self.spec = env.spec
        self._env = env

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._env.reset_async(episodes, mask)

    def reset_wait(self) -> Observation:
        return self._env.reset_wait()

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self._env.step_async(actions, skip_ended)

    def step_wait(self) -> StepResult:
        return self._env.step_wait()

    def add_jpeg(self, cameras: Sequence[str]) -> None:
        self._env.add_jpeg(cameras)

    def render(self, index: int) -> Tensor:
        return self._env.render(index)

    def expert_actions(self) -> Tensor:
        return self._env.expert_actions()

    def losses(self) -> int:
        return self._env.losses()

    def close(self) -> None:
        self._env.close()

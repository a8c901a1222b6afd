"""What a plug-in implements. The engine knows models and simulators only through this page.

A package announces its plug-ins by entry points: ``rlinf_vla.models`` (a :class:`Policy` subclass) and ``rlinf_vla.envs``
(an :class:`EnvPlugin`). A plug-in module must be cheap to import: simulators and drivers are imported when first used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlinf_vla.types import ActionEval, ActionSample, Episodes, Inputs, Observation, StepResult, Tensors

ImageSize = tuple[int, int]
"""(height, width) in pixels."""


@runtime_checkable
class Noise(Protocol):
    """The random numbers of one policy call; row ``b`` depends on the episode and control step of row ``b`` alone."""

    def uniform(self, *shape: int) -> Tensor:
        """float32 ``[B, *shape]`` in the open interval (0, 1)."""

    def normal(self, *shape: int) -> Tensor:
        """float32 ``[B, *shape]``, standard normal."""


@dataclass(frozen=True)
class PolicySpec:
    chunk: int
    action_dim: int
    state_dim: int
    """0 where the policy does not read proprioception."""
    images: dict[str, ImageSize]


class Policy(nn.Module):
    """A VLA policy: ``prepare -> encode -> act`` in rollouts, ``evaluate`` in updates.

    ``backbone`` is the module that LoRA adapts, under the official parameter names; ``value_head`` is the critic, trained with
    its own learning rate.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    """Dataclass: the typed ``model.options`` node of a recipe."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Default LoRA targets: module-name suffixes inside ``backbone``."""
    vision_modules: ClassVar[tuple[str, ...]] = ()
    """Modules of ``backbone``, by full name, that ``model.lora.vision=false`` leaves without adapters."""
    language_modules: ClassVar[tuple[str, ...]] = ()
    """The same for ``model.lora.language=false``."""
    full_modules: ClassVar[tuple[str, ...]] = ()
    """Modules of ``backbone`` that train in full beside the adapters: heads, which start from nothing or are small."""
    inseparable: ClassVar[str | None] = "does not say which of its modules act"
    """Why ``rollout.split=head`` cannot be, as what follows the model's name. None: it can, with the three methods that say so."""
    head_modules: tuple[str, ...] = ()
    """Modules of ``backbone``, by full name, that ``act`` and ``value`` run: the head, with all that stands outside ``backbone``."""
    head_rows: dict[str, slice] | None = None
    """Weights among them of which only these rows are run, unless they have adapters."""
    noise_dim: int | None = None
    """Of the noise that ``steer`` makes actions of; None: this policy makes none of noise."""

    spec: PolicySpec
    backbone: nn.Module
    value_head: nn.Module

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Path, config: Any) -> Policy:
        """Read the official checkpoint layout of this model. Raises UserError when it does not fit."""

    @classmethod
    def without_weights(cls, checkpoint: Path, config: Any) -> Policy:
        """For a split: as ``load``, but the backbone is on the meta device: its weights are neither read nor take memory."""
        raise NotImplementedError

    @abstractmethod
    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Write the official checkpoint layout into an existing directory, such that ``load`` reads it.

        ``dtype``: of the weights; None: as the policy was loaded from, bfloat16 where it began with random weights.
        """

    @abstractmethod
    def prepare(self, obs: Observation) -> Inputs:
        """Tokenise and resize, once; cheap to store."""

    @abstractmethod
    def encode(self, inputs: Inputs) -> Any:
        """Vision encoder and language backbone: features for ``act`` and ``value``."""

    @abstractmethod
    def pooled(self, features: Any) -> Tensor:
        """One vector of what ``encode`` found, float32 ``[B, F]``: what a critic reads."""

    def value(self, features: Any) -> Tensor:
        """The critic's estimate, float32 ``[B]``."""
        return self.value_head(self.pooled(features)).squeeze(-1)

    @abstractmethod
    def act(self, features: Any, noise: Noise | None, temperature: float) -> ActionSample:
        """Choose a chunk. ``temperature=0`` is greedy and needs no noise; its log_prob is that of temperature 1."""

    def steer(self, features: Any, noise: Tensor) -> Tensor:
        """The actions float32 ``[B, C, D]`` that begin in this noise, float32 ``[B, noise_dim]``, without any further chance."""
        raise NotImplementedError

    @abstractmethod
    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        """The same distribution as ``act``; differentiable."""

    @abstractmethod
    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        """Imitation loss for expert chunks float32 ``[B, C, D]``; returns float32 ``[B]``. ``noise``: for models that denoise."""

    def pack(self, features: Any) -> Tensors:
        """For a split: of features, as tensors with leading dimension ``B``, no more than ``act`` and ``value`` need."""
        raise NotImplementedError

    def unpack(self, tensors: Tensors) -> Any:
        """For a split: features of which ``act`` and ``value`` make the same bits as of those that were packed."""
        raise NotImplementedError

    def fix(self, inputs: Inputs) -> Inputs:
        """Inputs to ``evaluate`` that already hold what no update can change; here, that is nothing.

        An update calls it once, without gradients, and all its epochs use the result. Every tensor has leading dimension ``B``.
        """
        return inputs

    def plain_actions(self, inputs: Inputs) -> Tensor | None:
        """Greedy actions float32 ``[B, C, D]`` the way they are usually computed, without what ``encode`` and ``act`` save.

        ``rlinf-vla bench policy`` compares with it. None: there is no other way.
        """
        return None


@dataclass(frozen=True)
class ToolUnits:
    """What 1 means in actions ``(dx, dy, dz, gripper)`` or ``(dx, dy, dz, rx, ry, rz, gripper)``: docs/conventions.md."""

    translation_m: float
    """By which the target of the tool moves in one control step, along an axis of the robot's base."""
    rotation_rad: float = 0.0
    """By which it turns, right-handed, about an axis of the robot's base."""


@dataclass(frozen=True)
class EnvSpec:
    num_envs: int
    action_dim: int
    state_dim: int
    control_hz: float
    episode_limit: int
    """Control steps after which an episode is truncated."""
    images: dict[str, ImageSize]
    tasks: tuple[str, ...]
    """What ``Episodes.task_id`` indexes."""
    device: torch.device
    tool: ToolUnits | None = None
    """None: actions (and states) are something else than docs/conventions.md says, joint angles for example."""


class VectorEnv(Protocol):
    """``B`` environments that advance together, with gymnasium's DISABLED autoreset: the caller decides who is reset, and to which episode.

    Same episodes and same actions give the same results, whatever was played before.
    """

    spec: EnvSpec

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        """Begin ``episodes`` (``[B]``) where ``mask`` (bool ``[B]``, default all) is true; rows elsewhere are ignored."""

    def reset_wait(self) -> Observation:
        """The present observation of all ``B`` environments, fresh after a reset."""

    def step_async(self, actions: Tensor) -> None:
        """Begin up to ``C`` control steps, ``actions`` float32 ``[B, C, D]``. Every episode must be under way."""

    def step_wait(self) -> StepResult: ...

    def reset(self, episodes: Episodes, mask: Tensor | None = None) -> Observation:
        self.reset_async(episodes, mask)
        return self.reset_wait()

    def step(self, actions: Tensor) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def render(self, index: int) -> Tensor:
        """A picture for people of environment ``index``: uint8 ``[H, W, 3]``."""

    def expert_actions(self) -> Tensor:
        """What a scripted expert would do now: float32 ``[B, D]``. It has no memory, so it can label any state.

        Raises UserError where the task has no expert.
        """

    def close(self) -> None:
        """Idempotent."""


class Reward(Protocol):
    """What training is told that an environment group's steps were worth. Evaluations keep the simulator's own word."""

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """``result`` of ``actions`` ``[B, C, D]``, taken where ``before`` was seen, with this reward as ``reward`` ``[B, C]``.

        It may set ``terminated`` in a row's last valid step, and so end that episode. Where ``valid`` is false nothing is looked at.
        """


class RewardModel(nn.Module):
    """A network that looks whether a task is done, learnt by ``rlinf-vla train recipe=reward_classifier``."""

    images: dict[str, ImageSize]
    """What it looks at."""

    @property
    def spec(self) -> PolicySpec:
        """As of a policy that does nothing."""
        return PolicySpec(chunk=1, action_dim=0, state_dim=0, images=self.images)

    @abstractmethod
    def prepare(self, obs: Observation) -> Inputs:
        """Each tensor with leading dimension ``B``; cheap to store."""

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Logits of success, float32 ``[B]``."""

    @abstractmethod
    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Into an existing directory, such that the plug-in reads it; float32 where ``dtype`` says nothing."""


Learner = Policy | RewardModel
"""What a trainer may train."""


class RewardPlugin(Protocol):
    """A reward, as an entry point of ``rlinf_vla.rewards`` names it."""

    name: str
    Config: type
    """Dataclass: the typed ``reward.options`` node of a recipe."""

    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        """``device``: where it may compute; results come back where they were. Raises UserError for what the user can mend."""

    def learner(self, config: Any) -> RewardModel:
        """The network behind it, to be trained. Raises UserError where there is none."""


@dataclass(frozen=True)
class Diagnosis:
    """One check of ``rlinf-vla doctor``. ``mend`` says what to do when it is not ``ok``; ``repair`` does it, where it can be done."""

    name: str
    ok: bool
    detail: str
    mend: str = ""
    repair: Callable[[], None] | None = None


@dataclass(frozen=True)
class Task:
    name: str
    instruction: str
    available: bool
    """False where files are missing; ``note`` says which."""
    has_expert: bool
    note: str = ""


class EnvPlugin(Protocol):
    """A simulator, as an entry point of ``rlinf_vla.envs`` names it."""

    name: str
    Config: type
    """Dataclass: the typed ``env`` node of a recipe; has at least ``name``, ``num_envs`` and ``episode_limit``."""

    def create(self, config: Any, groups: int) -> list[VectorEnv]:
        """``config.num_envs`` environments, as ``groups`` equal vector environments that advance independently.

        Raises UserError for what the user can mend.
        """

    def variants(self, config: Any) -> dict[str, Any]:
        """Settings whose speed is worth comparing, by name."""

    def tasks(self) -> list[Task]: ...

    def diagnose(self) -> list[Diagnosis]: ...

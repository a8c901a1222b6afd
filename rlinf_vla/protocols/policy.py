"""What a model implements."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlinf_vla.types import ActionEval, ActionSample, Inputs, Observation, Tensors

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


@runtime_checkable
class ActsOnto(Protocol):
    """A policy whose chunks can continue what the robot is doing while it infers (``control.real_time_chunking``)."""

    def act_onto(self, features: Any, noise: Noise | None, temperature: float, committed: Tensor, frozen: int) -> ActionSample:
        """As ``act``, with a chunk that begins with ``committed[:, :frozen]`` and leaves the rest of ``committed`` smoothly.

        committed: float32 ``[B, N, D]``, N <= C: what the robot will do from this observation on if nothing new comes. frozen: so many of
        them will have been executed when this chunk comes. Without any (``N = 0``), it is ``act``. Not in inference mode: it may need
        gradients.
        """

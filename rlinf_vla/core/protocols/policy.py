"""The base of a model plug-in: a network that acts."""

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
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation, Tensors

from .convention import Convention

if TYPE_CHECKING:
    from rlinf_vla.core.origin import Origin

    from .backbone import BackboneElsewhere

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
    convention: Convention = Convention()  # noqa: RUF009  (frozen)
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
    sees_depth: ClassVar[bool] = False
    """Whether its images may be distances (``core/observation_features.py``)."""
    learns: ClassVar[bool] = True
    """False: its weights are elsewhere. It has no parameters, only acts, and is not loaded from
    ``model.checkpoint``."""
    elsewhere: BackboneElsewhere | None = None
    """Where the backbone runs if this policy is only a head (``rollout.backbone``); None: here."""
    origin: Origin | None = None
    """The files that it was loaded from; None: not known."""
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

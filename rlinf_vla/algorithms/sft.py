"""Supervised fine-tuning (SFT, behaviour cloning) on demonstrations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import Algorithm, DemonstrationConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    Count,
    CountOrZero,
    LearningRate,
    Name,
    OneOf,
    Positive,
    Probability,
    Range,
    Size,
)
from rlinf_vla.config.recipe import NO_AUGMENTATION, SUPERVISED, AlgorithmConfig
from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.types import Batched, Inputs


@dataclass
class ImitationConfig(AlgorithmConfig):
    """Recipe node ``algorithm``: keys shared by algorithms that imitate demonstrations alone."""

    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    batch_size: Size = 64
    learning_rate: LearningRate = 1e-3
    adam_beta2: Annotated[float, Range(0, 1, below=True)] = 0.95
    """Adam's beta2; beta1 is 0.9."""
    weight_decay: Probability = 0.01
    max_grad_norm: Positive = 1.0
    ema_decay: Annotated[float, Range(0, 1, above=True, below=True)] | None = None
    """Decay per step of a moving average of the trained weights; null: there is none.

    The average is evaluated, saved and exported, while steps are taken on the weights themselves.
    """
    augmentation: Annotated[str, OneOf(NO_AUGMENTATION, "official")] = NO_AUGMENTATION
    """Augment training images as the model's official trainer does (official), or not (none)."""


@dataclass
class SFTConfig(ImitationConfig):
    """Recipe node ``algorithm``."""

    family: ClassVar[str] = SUPERVISED

    name: Name = "sft"
    warmup_steps: CountOrZero = 60
    schedule: Annotated[str, OneOf("cosine", "step")] = "cosine"
    """How the learning rate falls after the warm-up: on a half cosine, or at once (step)."""
    decay_steps: Count | None = None
    """Step from which on learning_rate_end is left, possibly beyond the run; null: iterations."""
    learning_rate_end: Probability = 0.0
    """Share of the learning rate that is left from decay_steps on; 1: it stays constant."""


@dataclass(frozen=True)
class Demonstrations(Batched):
    """``N`` prepared policy inputs and the expert's next actions, float32 ``[N, horizon, D]``.

    draws: int64 ``[N]``, counters of the random numbers in a loss, unique within a run.
    weight: float64 ``[N]``, in proportion to which rows are drawn; None: all alike.
    """

    inputs: Inputs
    actions: Tensor
    draws: Tensor
    weight: Tensor | None = None

    @staticmethod
    def of(episodes: Sequence[tuple[Inputs, Tensor]], horizon: int) -> Demonstrations:
        """Concatenate ``episodes``: inputs ``[L, ...]`` and actions ``[L, D]`` of each."""
        inputs = {
            name: torch.cat([episode_inputs[name] for episode_inputs, _ in episodes])
            for name in episodes[0][0]
        }
        actions = torch.cat(
            [action_chunks(episode_actions, horizon) for _, episode_actions in episodes]
        )
        return Demonstrations(inputs, actions, torch.arange(len(actions)))

    def draw(self, count: int, generator: torch.Generator) -> Demonstrations:
        """Draw rows with replacement; they have no weight any more."""
        rows = drawn_rows(self.weight, len(self), count, generator)
        return replace(self[rows], weight=None)

    @property
    def counts(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.actions)


def drawn_rows(weight: Tensor | None, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` of ``rows`` with replacement, int64, in proportion to ``weight`` ``[rows]``;
    None: all alike."""
    if weight is None:
        return torch.randint(rows, (count,), generator=generator)
    ends = weight.cumsum(0)
    drawn = ends[-1] * torch.rand(count, dtype=torch.float64, generator=generator)
    return torch.searchsorted(ends, drawn, right=True).clamp(max=rows - 1)


def action_chunks(actions: Tensor, chunk: int) -> Tensor:
    """Return the chunk that starts at each action of an episode: ``[L, D]`` to ``[L, C, D]``.

    Beyond the end, the last action is repeated, as openpi and LeRobot train on their datasets.
    """
    steps = torch.arange(len(actions))[:, None] + torch.arange(chunk)
    return actions[steps.clamp(max=len(actions) - 1)]


def imitation_loss(
    policy: Policy,
    batch: Demonstrations,
    noise: Callable[[Tensor], Noise],
    augmentation: Callable[[Tensor], Noise] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the supervised loss, summed over the batch; ``noise(draws)``: its random numbers.

    ``augmentation(draws)``: those of the images' augmentation; None: they are not augmented.
    """
    inputs = batch.inputs
    if augmentation is not None:
        inputs = policy.augment(inputs, augmentation(batch.draws))
    loss = policy.supervised_loss(inputs, batch.actions, noise(batch.draws)).sum()
    return loss, {"sft/loss": loss.detach()}


class StepFlow(Protocol):
    """Base of the flows in which an iteration is one optimiser step on demonstrations."""

    iteration: int

    def generator(self) -> torch.Generator:
        """Return this iteration's random number generator, identical in a resumed run."""

    def log(self, metrics: dict[str, float]) -> None: ...


class Flow(StepFlow, Protocol):
    """The operations of behaviour cloning; a runtime implements them."""

    def demonstrate(self, config: DemonstrationConfig, augmented: bool) -> Demonstrations:
        """Return all demonstrations; the first iteration of a run collects or reads them.

        ``augmented``: prepare them for ``Policy.augment``."""

    def fit(self, batch: Demonstrations, rate: float) -> None:
        """Take one optimiser step with ``rate`` times the learning rate."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of a batch's rows by their counters, int64 ``[N]``."""

    noise: Callable[[Tensor], Noise]
    augmentation: Callable[[Tensor], Noise]


class Supervised(Algorithm):
    """Base class of algorithms in which an iteration is one optimiser step on labelled data."""

    product: ClassVar[tuple[str, str]] = ("policy", "model.checkpoint")
    """Directory that a network trained in full is written to at the end, and the key to use it."""
    adds_heads: ClassVar[bool] = False
    """Whether the network has heads that are not in the model's own layout."""

    @property
    def ends_with_run(self) -> str | None:
        constant = getattr(self.config, "learning_rate_end", 0.0) == 1
        if constant or getattr(self.config, "decay_steps", None) is not None:
            return None
        chosen = hasattr(self.config, "decay_steps")
        key = "algorithm.decay_steps=null" if chosen else f"algorithm={self.config.name}"
        return f"{key}: the learning rate falls until the last iteration"

    def loss(self, model: Any, batch: Any, draws: Draws) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and statistics, each summed over the batch."""
        raise NotImplementedError

    def predict(self, model: Any, inputs: Inputs) -> Tensor:
        """Of a model that does not act: return what it predicts of each row, float32 ``[B]``."""
        raise NotImplementedError


class Imitation(Algorithm):
    """Base class of algorithms that imitate demonstrations alone."""

    config: ImitationConfig

    def loss(self, model: Any, batch: Any, draws: Draws) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Supervised``."""
        return imitation_loss(
            model, batch, draws.noise, draws.augmentation if self.augments else None
        )

    @property
    def augments(self) -> bool:
        return self.config.augmentation != NO_AUGMENTATION

    @property
    def ema_decay(self) -> float | None:
        return self.config.ema_decay


class SFT(Imitation, Supervised):
    """Behaviour cloning: each iteration is one optimiser step on random demonstrations."""

    Config: ClassVar[type[AlgorithmConfig]] = SFTConfig
    config: SFTConfig

    def __init__(self, config: Any, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        if config.schedule == "step" and config.decay_steps is None:
            raise UserError(
                "algorithm.schedule=step needs the step at which the learning rate falls: set algorithm.decay_steps"
            )

    def rate(self, step: int) -> float:
        """Return the share of the learning rate at ``step``."""
        config = self.config
        total = config.decay_steps or self.iterations
        if config.schedule == "step" and step >= config.warmup_steps:
            return 1.0 if step < total else config.learning_rate_end
        return warmup_cosine(step, config.warmup_steps, total, config.learning_rate_end)

    def iteration(self, flow: Flow) -> None:
        demonstrations = flow.demonstrate(self.config.demonstrations, self.augments)
        size = self.config.batch_size
        batch = demonstrations.draw(size, flow.generator())
        batch = replace(batch, draws=flow.iteration * size + torch.arange(size))
        rate = self.rate(flow.iteration)
        flow.fit(batch, rate)
        flow.log({"sft/learning_rate": rate * self.config.learning_rate})


def warmup_cosine(step: int, warmup: int, total: int, end: float = 0.0) -> float:
    """Return the learning rate's share: linear warm-up, then a half cosine to ``end`` at ``total``.

    optax's ``warmup_cosine_decay_schedule``, as openpi calls it, but for the warm-up: openpi's is
    (step + 1) / (warmup + 1).
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))

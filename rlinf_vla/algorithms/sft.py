"""Supervised fine-tuning (SFT, behaviour cloning) on demonstrations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import Algorithm, DemonstrationConfig
from rlinf_vla.config.ranges import (
    Count,
    CountOrZero,
    LearningRate,
    Name,
    Positive,
    Probability,
    Size,
)
from rlinf_vla.config.recipe import SUPERVISED, AlgorithmConfig
from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.types import Batched, Inputs


@dataclass
class SFTConfig(AlgorithmConfig):
    """Recipe node ``algorithm``."""

    family: ClassVar[str] = SUPERVISED

    name: Name = "sft"
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    batch_size: Size = 64
    learning_rate: LearningRate = 1e-3
    warmup_steps: CountOrZero = 60
    decay_steps: Count | None = None
    """Step at which the learning rate reaches zero, possibly beyond the run; null: iterations."""
    weight_decay: Probability = 0.01
    max_grad_norm: Positive = 1.0


@dataclass(frozen=True)
class Demonstrations(Batched):
    """``N`` prepared policy inputs and the expert's next actions, float32 ``[N, horizon, D]``.

    draws: int64 ``[N]``, counters of the random numbers in a loss, unique within a run.
    """

    inputs: Inputs
    actions: Tensor
    draws: Tensor

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

    @property
    def counts(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.actions)


def action_chunks(actions: Tensor, chunk: int) -> Tensor:
    """Return the chunk that starts at each action of an episode: ``[L, D]`` to ``[L, C, D]``.

    Beyond the end, the last action is repeated, as openpi and LeRobot train on their datasets.
    """
    steps = torch.arange(len(actions))[:, None] + torch.arange(chunk)
    return actions[steps.clamp(max=len(actions) - 1)]


def imitation_loss(
    policy: Policy, batch: Demonstrations, noise: Callable[[Tensor], Noise]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the supervised loss, summed over the batch; ``noise(draws)``: its random numbers."""
    loss = policy.supervised_loss(batch.inputs, batch.actions, noise(batch.draws)).sum()
    return loss, {"sft/loss": loss.detach()}


class StepFlow(Protocol):
    """Base of the flows in which an iteration is one optimiser step on demonstrations."""

    iteration: int

    def generator(self) -> torch.Generator:
        """Return this iteration's random number generator, identical in a resumed run."""

    def log(self, metrics: dict[str, float]) -> None: ...


class Flow(StepFlow, Protocol):
    """The operations of behaviour cloning; a runtime implements them."""

    def demonstrate(self, config: DemonstrationConfig) -> Demonstrations:
        """Return all demonstrations; the first iteration of a run collects or reads them."""

    def imitate(self, batch: Demonstrations, rate: float) -> None:
        """Take one optimiser step with ``rate`` times the learning rate."""


class Supervised(Algorithm):
    """Base class of algorithms in which an iteration is one optimiser step on labelled data."""


class SFT(Supervised):
    """Behaviour cloning: each iteration is one optimiser step on random demonstrations."""

    Config = SFTConfig
    config: SFTConfig

    def iteration(self, flow: Flow) -> None:
        demonstrations = flow.demonstrate(self.config.demonstrations)
        size = self.config.batch_size
        batch = demonstrations[
            torch.randint(len(demonstrations), (size,), generator=flow.generator())
        ]
        batch = replace(batch, draws=flow.iteration * size + torch.arange(size))
        rate = warmup_cosine(
            flow.iteration, self.config.warmup_steps, self.config.decay_steps or self.iterations
        )
        flow.imitate(batch, rate)
        flow.log({"sft/learning_rate": rate * self.config.learning_rate})


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Return the learning rate factor: linear warm-up, then cosine decay to zero at ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

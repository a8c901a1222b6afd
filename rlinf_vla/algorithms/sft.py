"""Supervised fine-tuning (behaviour cloning) on demonstrations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

import torch
from torch import Tensor

from rlinf_vla.protocols import Noise, Policy
from rlinf_vla.ranges import Count, CountOrZero, Label, LearningRate, Name, NonEmpty, Positive, Probability, Range, Size
from rlinf_vla.types import Inputs


@dataclass
class DemonstrationConfig:
    """Recipe node ``algorithm.demonstrations``: what a scripted expert shows, or a dataset."""

    dataset: str | None = None
    """A LeRobotDataset (v3.0): all its episodes are learnt, and no scripted expert plays (episodes, noise ... are then not used)."""
    action_key: Label = "action"
    """What of the dataset is imitated."""
    cameras: list[Label] = field(default_factory=list)
    """What the dataset calls the policy's cameras, where it calls them otherwise: [base:front]."""
    episodes: Count = 300
    noise: Annotated[list[Annotated[float, Range(0, 100)]], NonEmpty()] = field(default_factory=lambda: [0.0, 0.3, 0.6])
    """Standard deviations of Gaussian noise on the executed (not the learnt) action; each episode draws one of them."""
    random_actions: Probability = 0.05
    """Share of wholly random actions in the episodes with noise."""
    detour: CountOrZero = 0
    """Up to so many control steps at the start of an episode go in one random direction. Without them, where the arm is soon gives away
    what the instruction says, and a learner does not read it."""


@dataclass
class SFTConfig:
    """Recipe node ``algorithm``."""

    name: Name = "sft"
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    batch_size: Size = 64
    learning_rate: LearningRate = 1e-3
    warmup_steps: CountOrZero = 60
    decay_steps: Count | None = None
    """Steps until the learning rate has fallen to zero; null: iterations. More stops half-way on purpose."""
    weight_decay: Probability = 0.01
    max_grad_norm: Positive = 1.0


@dataclass(frozen=True)
class Demonstrations:
    """``N`` states, prepared for a policy, and what the expert does there: actions float32 ``[N, C, D]``.

    draws: int64 ``[N]``, numbers that the random part of a loss belongs to; no two alike in a run.
    """

    inputs: Inputs
    actions: Tensor
    draws: Tensor

    @staticmethod
    def of(episodes: Sequence[tuple[Inputs, Tensor]], chunk: int) -> Demonstrations:
        """``episodes``: inputs ``[L, ...]`` and actions ``[L, D]`` of each."""
        inputs = {name: torch.cat([each[name] for each, _ in episodes]) for name in episodes[0][0]}
        actions = torch.cat([following(each, chunk) for _, each in episodes])
        return Demonstrations(inputs, actions, torch.arange(len(actions)))

    @property
    def counts(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.bool, device=self.actions.device)

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, index: Tensor | slice) -> Demonstrations:
        return Demonstrations({name: value[index] for name, value in self.inputs.items()}, self.actions[index], self.draws[index])


def following(actions: Tensor, chunk: int) -> Tensor:
    """For each of an episode's actions ``[L, D]`` the ``chunk`` that begin with it ``[L, C, D]``; past the end the last one is repeated."""
    steps = torch.arange(len(actions), device=actions.device)[:, None] + torch.arange(chunk, device=actions.device)
    return actions[steps.clamp(max=len(actions) - 1)]


def imitation_loss(policy: Policy, batch: Demonstrations, noise: Callable[[Tensor], Noise]) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed over the batch. ``noise(draws)``: the random numbers of these draws."""
    loss = policy.supervised_loss(batch.inputs, batch.actions, noise(batch.draws)).sum()
    return loss, {"sft/loss": loss.detach()}


class StepFlow(Protocol):
    """What macro flows have in common in which an iteration is one optimiser step on what was shown."""

    iteration: int

    def generator(self) -> torch.Generator:
        """Random numbers of this iteration, the same in a resumed run."""


class Flow(StepFlow, Protocol):
    """The operations that imitation is made of."""

    def demonstrate(self, config: DemonstrationConfig) -> Demonstrations:
        """All that is shown; played or read in a run's first iteration."""

    def imitate(self, batch: Demonstrations, rate: float) -> None:
        """An optimiser step, at this share of the learning rate."""


class SFT:
    def __init__(self, config: SFTConfig, iterations: int) -> None:
        self.config, self.decay_steps = config, config.decay_steps or iterations

    def iteration(self, flow: Flow) -> None:
        shown, size = flow.demonstrate(self.config.demonstrations), self.config.batch_size
        batch = shown[torch.randint(len(shown), (size,), generator=flow.generator())]
        batch = replace(batch, draws=flow.iteration * size + torch.arange(size))
        flow.imitate(batch, warmup_cosine(flow.iteration, self.config.warmup_steps, self.decay_steps))


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Share of the peak learning rate: linear up, then half a cosine down to zero at ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

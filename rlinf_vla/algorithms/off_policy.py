"""Shared parts of algorithms that learn from a replay buffer: recipe keys, batches and flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import GAMMA_UNITS
from rlinf_vla.algorithms.augmentation import shift_images
from rlinf_vla.algorithms.base import Algorithm, CostConfig, CostLimited, Trainable
from rlinf_vla.algorithms.feature_policy import ACTOR_OUTPUT
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    Count,
    CountOrZero,
    Label,
    LearningRate,
    NonNegative,
    OneOf,
    Positive,
    Probability,
    Range,
    Size,
)
from rlinf_vla.config.recipe import OFF_POLICY, AlgorithmConfig
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.transitions import (
    ACTED,
    ACTION,
    COST,
    DISCOUNT,
    OUTCOME,
    REWARD,
    Transitions,
)
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Tensors


@dataclass
class ReplayConfig(AlgorithmConfig):
    """Recipe node ``algorithm``: keys shared by algorithms that learn from a replay buffer."""

    family: ClassVar[str] = OFF_POLICY

    episodes: Count = 16
    """Number of episodes collected per iteration, before its updates."""
    batch_size: Size = 128
    replay_capacity: Count = 100_000
    """Maximum number of stored observations; the oldest ones are dropped."""
    learning_rate: LearningRate = 3e-4
    max_grad_norm: Positive = 10.0


@dataclass
class OffPolicyConfig(ReplayConfig, CostConfig):
    """Recipe node ``algorithm``: keys shared by off-policy algorithms."""

    updates_per_step: Annotated[float, Range(0, 1000)] = 0.5
    """Critic updates per collected control step."""
    demonstrations: CountOrZero = 0
    """Episodes of the scripted expert, run before the first iteration and kept throughout."""
    dataset: str | None = None
    """LeRobotDataset with rewards, used as demonstrations instead of a scripted expert."""
    dataset_cameras: list[Label] = field(default_factory=list)
    """Camera names that differ, as policy:dataset pairs: [base:front]."""
    demonstration_share: Annotated[float, Range(0, 1, below=True)] = 0.5
    """Fraction of every batch drawn from the demonstrations, if there are any."""
    sft_coef: NonNegative = 0.0
    """Coefficient of the actor's additional imitation loss on demonstrations (co-training)."""
    gamma: Probability = 0.97
    """Discount factor per gamma_unit."""
    gamma_unit: Annotated[str, OneOf(*GAMMA_UNITS)] = "step"
    """Discount per control step (step) or per policy call (chunk).

    With chunk, rewards within a chunk are not discounted, as in RLinf's chunk_level.
    """
    frozen_backbone: bool = False
    """Train only actor and critics; features are computed once and stored instead of images."""
    noise_bound: Positive | None = None
    """Let the actor output the initial noise of a frozen flow policy (DSRL) instead of actions.

    Each noise dimension is at most this large in magnitude. null: the actor outputs actions.
    """
    hidden: Size = 256
    """Width of the hidden layers of actor and critics."""
    target_rate: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Rate of the moving average that updates the target networks (tau)."""
    shift: Annotated[int, Range(0, 1024)] = 4
    """Shift images at random by up to this many pixels (DrQ, Kostrikov et al. 2021); 0: off."""
    value_learning_rate: LearningRate = 3e-4


class Flow(Protocol):
    """The operations from which an iteration is composed; a runtime implements them."""

    iteration: int

    def demonstrate(self, episodes: int) -> None:
        """Store the dataset's episodes, or ``episodes`` of the expert, unless already stored."""

    def training_episodes(self, count: int, draw: int) -> Episodes: ...
    def collect_transitions(self, episodes: Episodes) -> int:
        """Run the episodes and store their transitions; return the number of control steps."""

    def update_from_replay(self, updates: int, algorithm: ReplayLearner) -> None:
        """Run ``updates`` gradient steps on replay batches."""

    def publish(self) -> None: ...
    def log(self, metrics: dict[str, float]) -> None: ...


class ReplayLearner(Algorithm):
    """Base class of algorithms that learn from a replay buffer."""

    config: Any
    peak_iteration = 1 << 30
    """Number of an iteration whose updates take the most memory: one in which all parts learn."""

    def demonstrated(self, iteration: int) -> float:
        """Return the fraction of a batch drawn from the demonstrations, if there are any."""
        return 0.0

    def stored(self, records: Tensors) -> Tensors:
        """Return the records ``[L, ...]`` of an episode as the replay stores them."""
        return records

    def charged(self, batch: Transitions) -> Transitions:
        """Return a replay batch as ``step`` learns from it."""
        return batch

    def record(self, policy: Policy, inputs: Inputs, sample: ActionSample) -> Tensors:
        """Return a policy call as the replay stores it, to count memory: fields ``[1, ...]``."""
        raise NotImplementedError

    def step(
        self,
        trainer: Trainable,
        batch: Transitions,
        generator: torch.Generator,
        iteration: int,
        index: int,
        demonstrations: Callable[[], Transitions],
    ) -> dict[str, float]:
        """Take the gradient steps of ``iteration``'s update number ``index``; return statistics.

        ``batch`` may be one trainer rank's rows of the drawn batch. So losses and statistics are
        this rank's part of it (``Transitions.part``); the caller and ``trainer`` sum over ranks.
        ``generator`` (on the CPU) is the only source of randomness, the same on all ranks: random
        numbers are drawn for ``len(batch)`` rows (``Transitions.own``). ``demonstrations`` draws a
        batch of them, for ``sft_coef``. Raises FloatingPointError if a gradient is not finite.
        """
        raise NotImplementedError


class OffPolicy(CostLimited, ReplayLearner):
    """Base class of off-policy algorithms: collect episodes, then update from the replay.

    Subclasses implement ``wrap``, ``optimizers`` and ``step``.
    """

    config: OffPolicyConfig

    def __init__(
        self, config: OffPolicyConfig, temperature: float = 1.0, iterations: int = 0
    ) -> None:
        super().__init__(config, temperature, iterations)
        if config.demonstrations and config.dataset is not None:
            raise UserError(
                "algorithm.dataset and algorithm.demonstrations exclude each other: set only one of them"
            )
        if self._has_demonstrations and not config.demonstration_share:
            raise UserError(
                "algorithm.demonstration_share=0 disables the demonstrations: raise it, or remove the demonstrations"
            )
        if config.sft_coef and not self._has_demonstrations:
            raise UserError(
                f"algorithm.sft_coef={config.sft_coef} needs demonstrations: set algorithm.demonstrations or algorithm.dataset"
            )
        if config.noise_bound is not None and not config.frozen_backbone:
            raise UserError(
                "algorithm.noise_bound needs a frozen policy: set algorithm.frozen_backbone=true"
            )
        if config.noise_bound is not None and self._has_demonstrations:
            raise UserError(
                "algorithm.noise_bound cannot use demonstrations, which are actions and not noise: remove one of them"
            )

    @property
    def _has_demonstrations(self) -> bool:
        return self.config.demonstrations > 0 or self.config.dataset is not None

    def iteration(self, flow: Flow) -> None:
        if self._has_demonstrations:
            flow.demonstrate(self.config.demonstrations)
        steps = flow.collect_transitions(flow.training_episodes(self.config.episodes, 0))
        flow.update_from_replay(round(steps * self.config.updates_per_step), self)
        flow.publish()

    def demonstrated(self, iteration: int) -> float:
        return self.config.demonstration_share

    def record(self, policy: Policy, inputs: Inputs, sample: ActionSample) -> Tensors:
        number = sample.value.new_empty(1)
        return policy.precompute(inputs) | {
            ACTION: sample.latent[ACTOR_OUTPUT],
            REWARD: number,
            DISCOUNT: number,
            ACTED: number.bool(),
            COST: number,
        }

    def inputs(
        self, batch: Transitions, records: Tensors, generator: torch.Generator, device: torch.device
    ) -> Tensors:
        """Return the inputs in ``records`` of ``batch`` on ``device``, images shifted at random."""
        inputs = {name: value.to(device) for name, value in records.items() if name not in OUTCOME}
        return shift_images(inputs, self.config.shift, generator, batch)


def critic_loss(values: Tensor, target: Tensor) -> Tensor:
    """Return half the squared error of ``values`` ``[K, B]`` to ``target`` ``[B]``.
    The mean over the batch is summed over the critics, which share no weights."""
    return 0.5 * ((values - target) ** 2).mean(dim=1).sum()

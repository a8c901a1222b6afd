"""Base class of algorithms: what a recipe's ``algorithm=NAME`` names.

A package registers an algorithm as an entry point of ``rlinf_vla.algorithms``. It derives from one
of the families ``OnPolicy``, ``OffPolicy`` and ``Supervised``, whose flows every runtime has.

An algorithm that is ``CostLimited`` can limit an episode's mean cost, by a Lagrangian penalty whose
multiplier adapts to the cost. Reward constrained policy optimisation (Tessler et al. 2018, arXiv
1805.11074, eq. 10) learns from ``reward - multiplier * cost``. The multiplier follows projected
dual ascent on (mean episode cost - limit), once per iteration, as in PPO-Lagrangian (Ray et al.
2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    Count,
    CountOrZero,
    Label,
    NonEmpty,
    NonNegative,
    Positive,
    Probability,
    Range,
)
from rlinf_vla.config.recipe import AlgorithmConfig
from rlinf_vla.core.protocols import EnvSpec, Policy
from rlinf_vla.core.transitions import COST, REWARD
from rlinf_vla.core.types import Rollouts, Trajectory

if TYPE_CHECKING:
    from rlinf_vla.core.transitions import Transitions

CRITIC = "value_head."
"""Prefix of the names of a critic's parameters."""
EPISODE_COST = "rollout/cost_per_episode"
"""The metric that the multiplier of a cost limit follows."""
MULTIPLIER = "cost_multiplier"
"""Its name in metrics and checkpoints."""


DEMONSTRATIONS = "algorithm.demonstrations"


@dataclass
class WeightedDataset:
    """An entry of ``algorithm.demonstrations.mixture``."""

    dataset: Label = ""
    """LeRobotDataset to use in full."""
    weight: Positive = 1.0
    """A row of a batch is of this dataset with a probability in proportion to its weight."""
    action_key: Label | None = None
    """As ``algorithm.demonstrations.action_key``, which counts if this is null."""
    state_key: Label | None = None
    """As ``algorithm.demonstrations.state_key``, which counts if this is null."""
    cameras: list[Label] | None = None
    """As ``algorithm.demonstrations.cameras``, which count if this is null."""
    all_succeed: bool | None = None
    """As ``algorithm.demonstrations.all_succeed``, which counts if this is null."""


@dataclass
class DemonstrationConfig:
    """Recipe node ``algorithm.demonstrations``: those of a scripted expert or of datasets."""

    advantage_key: ClassVar[str | None] = None
    """Feature that tells which actions are better than usual; None: it is not told."""
    dataset: str | None = None
    """LeRobotDataset to use in full; the keys of the scripted expert are then ignored."""
    action_key: Label = "action"
    """Name of the dataset's feature to imitate."""
    state_key: Label = "observation.state"
    """Name of the dataset's feature that the policy reads as its state."""
    cameras: list[Label] = field(default_factory=list)
    """Camera names that differ, as policy:dataset pairs: [base:front]."""
    all_succeed: bool = False
    """For values: every episode of the dataset succeeds, and ``next.success`` is not read."""
    only_successes: bool = False
    """Imitate the successful episodes of a dataset alone."""
    mixture: list[WeightedDataset] = field(default_factory=list)
    """Several datasets instead of one: [{dataset: DIR, weight: 0.7}, {dataset: B, weight: 0.3}].
    Each may have its own action_key, state_key, cameras and all_succeed."""
    episodes: Count = 300
    """Number of episodes of the scripted expert."""
    noise: Annotated[list[Annotated[float, Range(0, 100)]], NonEmpty()] = field(
        default_factory=lambda: [0.0, 0.3, 0.6]
    )
    """Standard deviations of the noise on executed (not on imitated) actions, drawn per episode."""
    random_actions: Probability = 0.05
    """Fraction of uniformly random actions in the episodes with noise."""
    detour: CountOrZero = 0
    """Maximum number of control steps in one random direction at the start of an episode.

    Without them, the arm's position soon reveals the task, and a policy learns to ignore the
    instruction.
    """

    @property
    def datasets(self) -> dict[str, WeightedDataset]:
        """The datasets by the recipe node of their keys; without any, the scripted expert plays.

        Raises UserError if there is a mixture beside ``dataset``.
        """
        if self.dataset is not None and self.mixture:
            raise UserError(
                f"{DEMONSTRATIONS}.dataset and {DEMONSTRATIONS}.mixture exclude each other: set only one of them"
            )
        if self.dataset is not None:
            return {DEMONSTRATIONS: self._filled(WeightedDataset(self.dataset))}
        return {
            f"{DEMONSTRATIONS}.mixture[{number}]": self._filled(entry)
            for number, entry in enumerate(self.mixture)
        }

    def _filled(self, entry: WeightedDataset) -> WeightedDataset:
        return WeightedDataset(
            entry.dataset,
            entry.weight,
            entry.action_key or self.action_key,
            entry.state_key or self.state_key,
            self.cameras if entry.cameras is None else entry.cameras,
            self.all_succeed if entry.all_succeed is None else entry.all_succeed,
        )


class Algorithm:
    """An algorithm as configured: its networks beside the policy's, optimisers and iteration."""

    Config: ClassVar[type[AlgorithmConfig]]
    """Dataclass of a recipe's ``algorithm`` node."""
    averaged: ClassVar[tuple[str, ...]] = ()
    """Modules of the policy of which the trainer keeps a moving average."""
    asks_policy: ClassVar[bool] = False
    """Whether ``require`` may refuse a policy."""

    def __init__(self, config: Any, temperature: float = 1.0, iterations: int = 0) -> None:
        """``temperature``: of the rollouts; ``iterations``: of the run. Raises UserError."""
        self.config = config
        self.temperature = temperature
        self.iterations = iterations

    def require(self, policy: Policy) -> None:
        """Raise UserError if the policy, which may have no weights, cannot be trained by it."""

    def check(self, env: EnvSpec) -> None:
        """Raise UserError if the recipe does not fit the environment."""

    def wrap(self, policy: Policy, seed: int) -> Policy:
        """Return the policy with fresh networks of the algorithm, which depend only on ``seed``."""
        return policy

    @property
    def max_grad_norm(self) -> float:
        return self.config.max_grad_norm

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer keeps a copy of the initial weights."""
        return False

    @property
    def keeps_proximal(self) -> bool:
        """Whether the trainer copies the weights before an iteration, for its later updates."""
        return False

    @property
    def augments(self) -> bool:
        """Whether the images of demonstrations are augmented."""
        return False

    @property
    def ema_decay(self) -> float | None:
        """Decay, per step, of the moving average of the trained weights that acts; None: none."""
        return None

    @property
    def ends_with_run(self) -> str | None:
        """What changes until the last iteration, so that a resumed run must keep ``iterations``: a
        key with its value, and what it does; None: nothing."""
        return None

    def optimizers(self, parameters: Mapping[str, Tensor]) -> dict[str, Optimizer]:
        """Return the optimisers, by name, of the trainable ``parameters``: one AdamW by default."""
        config = self.config
        rate = self.config.learning_rate
        return OptimizerConfig(
            learning_rate=rate,
            value_learning_rate=getattr(config, "value_learning_rate", rate),
            max_grad_norm=self.max_grad_norm,
            weight_decay=getattr(config, "weight_decay", 0.0),
            betas=(0.9, getattr(config, "adam_beta2", 0.95)),
            epsilon=getattr(config, "adam_eps", 1e-8),
        ).optimizers(parameters)

    def iteration(self, flow: Any) -> None:
        """Compose an iteration of the operations of the family's flow."""
        raise NotImplementedError

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt to the metrics of the iteration that has ended; return further metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what ``adapt`` changes, as JSON for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore it from a checkpoint's state; an empty one is that of a new run."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW, with a learning rate for the critic, and of gradient clipping."""

    learning_rate: float
    value_learning_rate: float
    max_grad_norm: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    averaged: ClassVar[tuple[str, ...]] = ()
    ema_decay: float | None = None

    def optimizers(self, parameters: Mapping[str, Tensor]) -> dict[str, Optimizer]:
        actor = [value for name, value in parameters.items() if not name.startswith(CRITIC)]
        critic = [value for name, value in parameters.items() if name.startswith(CRITIC)]
        groups = [
            {"params": actor, "lr": self.learning_rate},
            {"params": critic, "lr": self.value_learning_rate},
        ]
        # on a GPU the default would take as much memory in a step as the weights
        fused = all(value.is_cuda for value in parameters.values()) or None
        return {
            "policy": torch.optim.AdamW(
                groups,
                betas=self.betas,
                eps=self.epsilon,
                weight_decay=self.weight_decay,
                fused=fused,
            )
        }


class Trainable(Protocol):
    """What an algorithm's own gradient step uses of the trainer; see ``training/trainer.py``."""

    policy: Any
    target: Any
    """Moving averages of the modules that ``Algorithm.averaged`` names, as attributes."""
    teacher: Any
    """The policy that labels what is visited, whose weights do not change; None: there is none."""

    def descend(self, name: str, loss: Tensor) -> None:
        """Take a step of the optimiser ``name`` down the sum of all ranks' ``loss``.

        Raises FloatingPointError, without a step."""

    def average(self, rate: float) -> None:
        """Move the moving averages towards the current weights by ``rate``."""

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' ``part``."""


@dataclass
class CostConfig(AlgorithmConfig):
    """Recipe keys of an algorithm that can limit the cost of an episode."""

    cost_limit: NonNegative | None = None
    """Limit of the mean cost per episode, the number of changes by safety limits; null: none."""
    cost_rate: NonNegative = 0.01
    """Change of the multiplier per iteration and unit of cost above cost_limit."""
    cost_initial: NonNegative = 0.0
    """Initial multiplier: the penalty, in units of reward, for each unit of cost."""


class CostLimited(Algorithm):
    """Base class of algorithms with a cost limit."""

    multiplier: float
    """Penalty for each unit of cost; 0 without a limit."""

    def __init__(self, config: Any, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        self.restore({})

    def state(self) -> dict[str, Any]:
        return {} if self.config.cost_limit is None else {MULTIPLIER: self.multiplier}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.multiplier = (
            0.0
            if self.config.cost_limit is None
            else float(state.get(MULTIPLIER, self.config.cost_initial))
        )

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the dual step, unless no episode ended; return the multiplier as a metric."""
        limit = self.config.cost_limit
        cost = metrics.get(EPISODE_COST)
        if limit is None:
            return {}
        if cost is not None:
            self.multiplier = max(0.0, self.multiplier + self.config.cost_rate * (cost - limit))
        return {f"actor/{MULTIPLIER}": self.multiplier}

    def charged(self, batch: Transitions) -> Transitions:
        """Return a replay batch with the penalty subtracted from the reward."""
        if not self.multiplier:
            return batch
        return replace(
            batch, now=batch.now | {REWARD: batch.now[REWARD] - self.multiplier * batch.now[COST]}
        )


@dataclass(frozen=True)
class Charged:
    """Rollouts with the penalty subtracted from the reward, shard by shard."""

    rollouts: Rollouts
    multiplier: float

    def __iter__(self) -> Iterator[Trajectory]:
        for shard in self.rollouts:
            assert shard.cost is not None, "config/checks.py refuses a cost limit without a cost"
            yield replace(shard, reward=shard.reward - self.multiplier * shard.cost)

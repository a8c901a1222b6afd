"""DAgger: imitate a teacher in the states that the policy visits.

Ross, Gordon and Bagnell 2011 (arXiv 1011.0686): the states of all iterations so far, which a
mixture of teacher and policy visits, are labelled by the teacher and imitated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import Trainable
from rlinf_vla.algorithms.off_policy import ReplayConfig, ReplayLearner
from rlinf_vla.config.ranges import Count, Name, OneOf, Positive, Probability, Size
from rlinf_vla.config.recipe import EXPERT
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.transitions import ACTED, ACTION, REWARD, Transitions
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Tensors


@dataclass
class DAggerConfig(ReplayConfig):
    """Recipe node ``algorithm``."""

    name: Name = "dagger"
    teacher: Annotated[str, OneOf(EXPERT)] = EXPERT
    """What labels the visited states: the simulator's scripted expert."""
    beta: Probability | None = None
    """In iteration i, from 0 on, the expert acts with probability beta**i, drawn per policy call.

    So it acts alone in the first iteration, and with 0 in no other. null: it never acts.
    """
    updates: Count = 100
    """Optimiser steps per iteration."""
    batch_size: Size = 64
    weight_decay: Probability = 0.01
    max_grad_norm: Positive = 1.0


class Flow(Protocol):
    """The operations from which an iteration is composed; a runtime implements them."""

    iteration: int

    def training_episodes(self, count: int, draw: int) -> Episodes: ...
    def visit(self, episodes: Episodes, beta: float) -> None:
        """Run the episodes, with probability ``beta`` by the expert; store and label their
        states."""

    def update_from_replay(self, updates: int, algorithm: ReplayLearner) -> None:
        """Run ``updates`` gradient steps on replay batches."""

    def publish(self) -> None: ...
    def log(self, metrics: dict[str, float]) -> None: ...


class DAgger(ReplayLearner):
    """Visit states, then imitate the labels of all iterations so far."""

    Config = DAggerConfig
    config: DAggerConfig

    def iteration(self, flow: Flow) -> None:
        config = self.config
        beta = 0.0 if config.beta is None else config.beta**flow.iteration
        flow.log({"dagger/beta": beta})
        flow.visit(flow.training_episodes(config.episodes, 0), beta)
        flow.update_from_replay(config.updates, self)
        flow.publish()

    def step(
        self,
        trainer: Trainable,
        batch: Transitions,
        generator: torch.Generator,
        iteration: int,
        index: int,
        demonstrations: Callable[[], Transitions],
    ) -> dict[str, float]:
        """Take an optimiser step on the labels."""
        policy = trainer.policy
        device = device_of(policy)
        now = {name: value.to(device) for name, value in batch.now.items()}
        label = now.pop(ACTION)
        inputs = {name: value for name, value in now.items() if name not in (REWARD, ACTED)}
        noise = DrawnNoise(batch, generator, device)
        loss = batch.part(policy.supervised_loss(inputs, label, noise).mean())
        trainer.descend("policy", loss)
        return {"sft/loss": float(loss.detach())}

    def record(self, policy: Policy, inputs: Inputs, sample: ActionSample) -> Tensors:
        label = sample.actions.new_empty(1, policy.horizon, policy.spec.action_dim)
        number = sample.value.new_empty(1)
        return inputs | {ACTION: label, REWARD: number, ACTED: number.bool()}


class DrawnNoise:
    """A ``Noise`` of the rows of a batch, drawn from a generator of the CPU.

    Numbers are drawn for the whole batch, so that they do not depend on the ranks that divide it.
    """

    def __init__(
        self, batch: Transitions, generator: torch.Generator, device: torch.device
    ) -> None:
        self._batch = batch
        self._generator = generator
        self._device = device

    def uniform(self, *shape: int) -> Tensor:
        # rand has multiples of 2**-24 from 0 on; half a step more is within the open interval
        drawn = torch.rand(len(self._batch), *shape, generator=self._generator)
        return self._batch.own(drawn.clamp(min=2.0**-25)).to(self._device)

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(len(self._batch), *shape, generator=self._generator)
        return self._batch.own(drawn).to(self._device)

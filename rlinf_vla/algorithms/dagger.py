"""DAgger: learn from a teacher in the states that the policy visits.

Ross, Gordon and Bagnell 2011 (arXiv 1011.0686): the states of all iterations so far, which a
mixture of teacher and policy visits, are labelled by the teacher and imitated. With a policy as
teacher it is distillation on the student's own states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import Trainable
from rlinf_vla.algorithms.off_policy import ReplayConfig, ReplayLearner
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, Name, OneOf, Positive, Probability, Size
from rlinf_vla.config.recipe import EXPERT
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.transitions import ACTED, ACTION, LATENT, REWARD, Transitions
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Tensors

LOSSES = (IMITATION, FORWARD, REVERSE) = ("imitation", "forward_kl", "reverse_kl")


@dataclass
class DAggerConfig(ReplayConfig):
    """Recipe node ``algorithm``."""

    name: Name = "dagger"
    teacher: str = EXPERT
    """What labels the visited states: the simulator's scripted expert (expert), or the policy in a
    directory as of model.checkpoint, of the same model."""
    loss: Annotated[str, OneOf(*LOSSES)] = IMITATION
    """Imitate the teacher's actions (imitation), or lower a divergence between the distributions of
    each number of an action: KL(teacher || policy) (forward_kl) or KL(policy || teacher)."""
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
    def visit(self, episodes: Episodes, beta: float | None) -> None:
        """Run the episodes and store what they visit, labelled by the expert, which acts with
        probability ``beta``. None: the policy acts, and there are no labels."""

    def update_from_replay(self, updates: int, algorithm: ReplayLearner) -> None:
        """Run ``updates`` gradient steps on replay batches."""

    def publish(self) -> None: ...
    def log(self, metrics: dict[str, float]) -> None: ...


class DAgger(ReplayLearner):
    """Visit states, then imitate the labels of all iterations so far."""

    Config = DAggerConfig
    config: DAggerConfig

    def __init__(self, config: DAggerConfig, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        if self._by_expert and config.loss != IMITATION:
            raise UserError(
                f"algorithm.loss={config.loss} compares distributions, and the scripted expert has none: "
                "set algorithm.teacher to a model directory, or algorithm.loss=imitation"
            )
        if not self._by_expert and config.beta is not None:
            raise UserError(
                f"algorithm.beta={config.beta}: a teacher that is a policy only labels, set algorithm.beta=null"
            )

    @property
    def _by_expert(self) -> bool:
        return self.config.teacher == EXPERT

    def iteration(self, flow: Flow) -> None:
        config = self.config
        beta = None
        if self._by_expert:
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
        """Take an optimiser step on the mean loss of the batch."""
        device = device_of(trainer.policy)
        now = {name: value.to(device) for name, value in batch.now.items()}
        noise = DrawnNoise(batch, generator, device)
        loss = batch.part(self.loss(trainer.policy, trainer.teacher, now, noise).mean())
        trainer.descend("policy", loss)
        name = "sft/loss" if self.config.loss == IMITATION else f"dagger/{self.config.loss}"
        return {name: float(loss.detach())}

    def loss(self, policy: Policy, teacher: Policy, records: Tensors, noise: Noise) -> Tensor:
        """Return the loss ``[B]`` on the device of ``records``: an imitation loss, or the mean
        divergence of the numbers of a chunk, each given the policy's own ones before it."""
        latent, inputs = dict[str, Tensor](), dict[str, Tensor]()
        for name, value in records.items():
            if name.startswith(LATENT):
                latent[name.removeprefix(LATENT)] = value
            elif name not in (ACTION, REWARD, ACTED):
                inputs[name] = value
        if self._by_expert:
            return policy.supervised_loss(inputs, records[ACTION], noise)
        if self.config.loss == IMITATION:
            with torch.no_grad():
                label = teacher.act(teacher.encode(inputs), None, 0.0).actions
            return policy.supervised_loss(inputs, label, noise)
        with torch.no_grad():
            theirs = teacher.distributions(inputs, latent, self.temperature)
        own = policy.distributions(inputs, latent, self.temperature)
        forward = self.config.loss == FORWARD
        divergence = theirs.divergence(own) if forward else own.divergence(theirs)
        return divergence.mean((1, 2))

    def record(self, policy: Policy, inputs: Inputs, sample: ActionSample) -> Tensors:
        number = sample.value.new_empty(1)
        if self._by_expert:
            label = sample.actions.new_empty(1, policy.horizon, policy.spec.action_dim)
            labels = {ACTION: label}
        else:
            labels = {f"{LATENT}{name}": value for name, value in sample.latent.items()}
        return inputs | labels | {REWARD: number, ACTED: number.bool()}


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

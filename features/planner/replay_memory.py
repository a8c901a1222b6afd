"""Run an off-policy algorithm's gradient step on the meta device, to count its memory."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.off_policy import ReplayLearner
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.transitions import Transitions
from rlinf_vla.core.types import ActionSample, Inputs
from rlinf_vla.features.planner.accounting import UnknownNumbers, repeated


class _Passes:
    """A ``Trainable`` that computes gradients. It takes no step, for which Adam needs no memory."""

    def __init__(self, policy: Policy, target: nn.ModuleDict, teacher: Policy | None) -> None:
        self.policy = policy
        self.target = target
        self.teacher = teacher

    def descend(self, name: str, loss: Tensor) -> None:
        loss.backward()

    def average(self, rate: float) -> None:
        """Do nothing: averages change in place."""

    def total(self, part: Tensor) -> Tensor:
        return part


class ReplayUpdate:
    """The updates of an off-policy algorithm: each of their passes is of a whole batch."""

    def __init__(
        self,
        algorithm: ReplayLearner,
        policy: Policy,
        inputs: Inputs,
        sample: ActionSample,
        teacher: Policy | None,
    ) -> None:
        """``inputs``, ``sample``: of one call ``[1]``. ``teacher``: on the meta device, too."""
        self.teacher = teacher
        self._record = algorithm.record(policy, inputs, sample)
        self._algorithm = algorithm
        self._averages = nn.ModuleDict(
            {name: copy.deepcopy(getattr(policy, name)) for name in algorithm.averaged}
        )
        self._averages.requires_grad_(False)

    @property
    def average_bytes(self) -> int:
        """Bytes of the moving averages that the trainer keeps."""
        return sum(average.nbytes for average in self._averages.parameters())

    @property
    def teacher_bytes(self) -> int:
        """Bytes of the teacher's weights, which each trainer rank has."""
        if self.teacher is None:
            return 0
        held = (*self.teacher.parameters(), *self.teacher.buffers())
        return sum(each.nbytes for each in held)

    def batch(self, rows: int) -> Transitions:
        return Transitions(repeated(self._record, rows), repeated(self._record, rows))

    def step(self, policy: Policy, batch: Transitions) -> None:
        """Run the passes of one update, the actor's included. Statistics are 0."""
        with UnknownNumbers():
            self._algorithm.step(
                _Passes(policy, self._averages, self.teacher),
                batch,
                torch.Generator(),
                self._algorithm.peak_iteration,
                0,
                lambda: batch,
            )

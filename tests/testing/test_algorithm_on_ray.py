"""The suite of algorithm plug-ins once with Ray: an algorithm whose loss reads what ``adapt`` changes."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_vla.algorithms.on_policy import joint
from rlinf_vla.testing.algorithm import AlgorithmConformance
from tests.algorithms.a2c import A2C
from tests.skips import needs

pytestmark = [pytest.mark.machine, pytest.mark.slow, needs("ray")]


class Scheduled(A2C):
    """Its coefficient of the entropy follows the progress of the run, and its loss reads it."""

    def __init__(self, *arguments: Any) -> None:
        self.bonus = 1.0
        super().__init__(*arguments)

    def loss(self, policy: Any, batch: Any, value_only: bool) -> Any:
        total, metrics = super().loss(policy, batch, value_only)
        new = policy.evaluate(batch.calls.inputs, batch.calls.latent, self.temperature)
        return total - self.bonus * joint(new.entropy, batch.calls.valid).sum(), metrics

    def adapt(self, metrics: Any) -> dict[str, float]:
        self.bonus /= 2
        return super().adapt(metrics) | {"actor/bonus": self.bonus}

    def state(self) -> dict[str, Any]:
        return super().state() | {"bonus": self.bonus}

    def restore(self, state: Any) -> None:
        super().restore(state)
        self.bonus = float(state.get("bonus", 1.0))


class TestScheduled(AlgorithmConformance):
    algorithm = Scheduled
    keys = ("algorithm.minibatch_size=10", "algorithm.learning_rate=0.05")

"""The toy policy and environment of the engine's tests pass the conformance suites."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance
from rlinf_vla.testing.policy import DiscretePolicyConformance
from rlinf_vla.testing.toy_env import CounterWorld
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy


class TestLinearPolicy(DiscretePolicyConformance):
    @pytest.fixture
    def policy(self) -> LinearPolicy:
        return LinearPolicy(LinearOptions(chunk=3))

    def blank(self, policy: LinearPolicy) -> LinearPolicy:
        return LinearPolicy(replace(policy.options, seed=1))

    def choices(self, latent: dict[str, Tensor]) -> Tensor:
        return latent["choice"]


class TestCounterWorld(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [CounterWorld(NUM_ENVS, EPISODE_LIMIT) for _ in range(2)]

"""A batch as a vector environment: the gpu backends' chunk logic, on a toy."""

from __future__ import annotations

import torch

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.envs.batched import BatchedVectorEnv
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance, episodes
from tests.envs.point_batch import PointBatch


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [BatchedVectorEnv(PointBatch(NUM_ENVS), EPISODE_LIMIT, ("walk",)) for _ in range(2)]


def test_the_final_observation_of_an_environment_is_kept() -> None:
    """The batch continues, including this environment; its later observations are not returned."""
    batch = PointBatch(NUM_ENVS)
    env = BatchedVectorEnv(batch, EPISODE_LIMIT, ("walk",))
    env.reset(episodes(1, 2, 3))
    batch.goal[0] = batch.position[0] + 0.3
    batch.goal[1:] = 100.0
    start = batch.position.clone()
    result = env.step(torch.ones(NUM_ENVS, 3, 2))
    assert result.valid.tolist() == [[True, False, False], [True] * 3, [True] * 3]
    assert result.terminated[0].tolist() == [True, False, False]
    assert torch.allclose(result.observation.state - start, torch.tensor([[0.3], [0.9], [0.9]]).expand(-1, 2))

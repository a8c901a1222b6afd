"""A batch as a vector environment: the gpu backends' chunk logic, on a toy."""

from __future__ import annotations

import pytest
import torch

from rlinf_vla.core.images import through_jpeg
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.envs.batched import BatchedVectorEnv
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance, episodes, random_actions
from tests.envs.point_batch import PointBatch
from tests.envs.test_batch_serving import make_env


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [BatchedVectorEnv(PointBatch(NUM_ENVS), EPISODE_LIMIT, ("walk",)) for _ in range(2)]


@pytest.mark.parametrize("in_process", [False, True])
def test_images_also_as_jpeg(in_process: bool) -> None:
    """The same bits beside a batch in this process and in one of its own."""
    env = make_env() if in_process else BatchedVectorEnv(PointBatch(NUM_ENVS), EPISODE_LIMIT, ("walk",))
    env.add_jpeg(["map"])
    shown = [env.reset(episodes(1, 2, 3)), env.step(random_actions(env, 4, seed=0)).observation]
    shown.append(env.reset(episodes(4, 5, 6), torch.tensor([True, False, False])))
    for seen in shown:
        assert torch.equal(seen.jpeg["map"], through_jpeg(seen.images["map"]))
    env.add_jpeg([])
    assert env.reset(episodes(1, 2, 3)).jpeg == {}
    env.close()


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

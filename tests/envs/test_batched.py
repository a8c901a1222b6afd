"""The gpu backend without a GPU: its chunk logic on a toy batch, and its ManiSkill side as a batch of one on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.envs.maniskill.batched import BatchedVectorEnv
from rlinf_vla.protocols import VectorEnv
from tests.conformance.vector_env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance, episodes


class PointBatch:
    """Points that walk to their goals, all at once."""

    num_envs, action_dim, state_dim, control_hz, image_size = NUM_ENVS, 2, 2, 10.0, (4, 6)
    device, tool, stack = torch.device("cpu"), None, dict[str, str]()

    def __init__(self) -> None:
        self.position, self.goal = torch.zeros(NUM_ENVS, 2), torch.zeros(NUM_ENVS, 2)

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        for row in rows:
            self.position[row], self.goal[row] = 2 * torch.rand(2, 2, generator=torch.Generator().manual_seed(seeds[row])) - 1
        return ["go to the goal"] * NUM_ENVS

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.position += 0.3 * actions.clamp(-1, 1)
        reached = (self.position - self.goal).abs().amax(1) < 0.01
        return reached.float(), reached, reached

    def observe(self) -> tuple[Tensor, Tensor]:
        shade = (50 * self.position.abs().sum(1)).to(torch.uint8)
        return self.position.clone(), shade[:, None, None, None].expand(-1, 4, 6, 3).clone()

    def expert(self) -> Tensor:
        return ((self.goal - self.position) / 0.3).clamp(-1, 1)

    def render(self, index: int) -> Tensor:
        return torch.zeros(2, 2, 3, dtype=torch.uint8)

    def close(self) -> None:
        pass


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [BatchedVectorEnv(PointBatch(), EPISODE_LIMIT, ("walk",)) for _ in range(2)]


def test_what_an_environment_saw_at_its_end_is_kept() -> None:
    """The others of the batch go on, and it with them; that is not shown."""
    batch = PointBatch()
    env = BatchedVectorEnv(batch, EPISODE_LIMIT, ("walk",))
    env.reset(episodes(1, 2, 3))
    batch.goal[0] = batch.position[0] + 0.3
    batch.goal[1:] = 100.0
    start = batch.position.clone()
    result = env.step(torch.ones(NUM_ENVS, 3, 2))
    assert result.valid.tolist() == [[True, False, False], [True] * 3, [True] * 3]
    assert result.terminated[0].tolist() == [True, False, False]
    assert torch.allclose(result.observation.state - start, torch.tensor([[0.3], [0.9], [0.9]]).expand(-1, 2))

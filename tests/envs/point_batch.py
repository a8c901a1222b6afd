"""Points that move to their goals as one batch in PyTorch. As a program it serves them in a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlinf_vla.envs import frame_memory
from rlinf_vla.envs.batch_serving import BatchServer
from rlinf_vla.envs.serving import serve
from rlinf_vla.envs.shared_arrays import SimulatorSpec


class PointBatch:
    """Points that move to their goals as one batch."""

    spec = SimulatorSpec(
        action_dim=2, state_dim=2, control_hz=10.0, images={"map": [4, 6]}, picture=[2, 2]
    )
    device = torch.device("cpu")

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.position = torch.zeros(num_envs, 2)
        self.goal = torch.zeros(num_envs, 2)

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        for row in rows:
            self.position[row], self.goal[row] = (
                2 * torch.rand(2, 2, generator=torch.Generator().manual_seed(seeds[row])) - 1
            )
        return ["go to the goal"] * self.num_envs

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.position += 0.3 * actions.clamp(-1, 1)
        reached = (self.position - self.goal).abs().amax(1) < 0.01
        return reached.float(), reached, reached

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        position = self.position[rows]
        shade = (50 * position.abs().sum(1)).to(torch.uint8)
        return position, {"map": shade[:, None, None, None].expand(-1, 4, 6, 3)}

    def expert(self) -> Tensor:
        return ((self.goal - self.position) / 0.3).clamp(-1, 1)

    def render(self, index: int) -> Tensor:
        return torch.zeros(2, 2, 3, dtype=torch.uint8)

    def close(self) -> None:
        pass


def mapped(handle: dict[str, Any]) -> Tensor:
    if handle["refused"]:
        raise RuntimeError("no IPC today")
    return torch.from_file(handle["file"], shared=True, size=handle["count"], dtype=torch.uint8)


@contextmanager
def memory_of_a_gpu(file: Path, refused: bool = False) -> Iterator[None]:
    """A file stands for memory of a GPU, and its name for the handle."""

    def allocated(count: int, device: torch.device) -> Tensor:
        file.write_bytes(bytes(count))
        return mapped({"file": str(file), "count": count, "refused": False})

    def exported(memory: Tensor) -> dict[str, Any]:
        return {"file": str(file), "count": len(memory), "refused": refused}

    with patch.multiple(frame_memory, allocated=allocated, exported=exported):
        yield


if __name__ == "__main__":
    frame_memory.opened = mapped
    serve(lambda options, slots: PointBatch(slots + options.get("spare", 0)), BatchServer)

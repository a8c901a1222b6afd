"""Two ranks that hold a minibatch between them take the step that one process takes on all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.training.test_trainer import loss, rows, trainer, weights

SPLIT = 7


def steps(rank: int | None) -> dict[str, torch.Tensor]:
    """Three of them; ``rank`` 0 has the first rows, 1 the others, None all."""
    mine = slice(None) if rank is None else slice(SPLIT) if rank == 0 else slice(SPLIT, None)
    subject = trainer()
    for seed in range(3):
        subject.step(rows(seed=seed)[mine], loss)
    return weights(subject)


def test_ranks_change_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.training.test_data_parallel", str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    expected = steps(None)
    for rank in (0, 1):
        for name, value in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(steps(rank), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()

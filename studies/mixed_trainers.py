"""How near an update on two trainer ranks of different speed comes to the ideal split.

    python studies/mixed_trainers.py [--speed 0.4] [--updates 12] [--row-ms 4]

Two ranks over gloo on the CPU train a small network. A rank sleeps for ``--row-ms`` per row, the
other one for that divided by ``--speed``, so that neither other work on the machine nor the number
of its cores matters much. The ideal is that both work until the end of an update: rows times
seconds per row, divided by 1 + speed. Printed are the median seconds of an update with
``cluster.trainer_split`` even and measured, the ideal divided by them, and the greatest difference
between the weights of both. The first updates, before the shares settle, are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn  # type: ignore[attr-defined]

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.training.ranks import TrainerSplit, minibatches, rank
from rlinf_vla.training.trainer import Trainer

ROWS, MINIBATCH, MICRO, WARMUP = 256, 128, 16, 5


@dataclass
class Numbers:
    """Rows ``x``, float ``[N, 8]``, all of which count."""

    x: Tensor

    @property
    def counts(self) -> Tensor:
        return torch.ones(len(self.x), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Numbers:
        return Numbers(self.x[index])

    def to(self, device: torch.device) -> Numbers:
        return Numbers(self.x.to(device))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speed", type=float, default=0.4, help="of the slow rank; the other: 1")
    parser.add_argument("--updates", type=int, default=12, help="updates of each split")
    parser.add_argument("--row-ms", type=float, default=4.0, help="ms of the fast rank per row")
    arguments = parser.parse_args()
    print(f"load when it begins: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    ideal = ROWS * arguments.row_ms / 1000 / (1 + arguments.speed)
    print(f"ideal: {ideal:.3f} s")
    trained = []
    with tempfile.TemporaryDirectory() as folder:
        for measures in (False, True):
            result = Path(folder) / f"{measures}"
            spawn(work, (str(result), measures, arguments), nprocs=2)
            seconds, shares, weights = torch.load(result, weights_only=True)
            trained.append(weights)
            typical = statistics.median(seconds[WARMUP:])
            print(
                f"{'measured' if measures else 'even'}: {typical:.3f} s, {100 * ideal / typical:.0f} % of the ideal; "
                f"shares {[round(share, 3) for share in shares] or 'equal'}"
            )
    even, measured = trained
    difference = max(float((even[name] - measured[name]).abs().max()) for name in even)
    print(f"weights differ by at most {difference:.1e}")


def work(place: int, result: str, measures: bool, arguments: argparse.Namespace) -> None:
    """Train as rank ``place``; rank 0 writes the seconds, the last shares and the weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{result}.meet", rank=place, world_size=2)
    row_s = arguments.row_ms / 1000 / (arguments.speed if rank() else 1.0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    trainer = Trainer(network, OptimizerConfig(1e-3, 1e-3, 1.0), MICRO)
    split = TrainerSplit(2, measures)

    def loss(model: nn.Module, batch: Numbers) -> tuple[Tensor, dict[str, Tensor]]:
        time.sleep(row_s * len(batch))
        value = (model(batch.x) - batch.x.sum(1, keepdim=True)).square().sum()
        return value, {"loss": value.detach()}

    seconds = []
    for update in range(arguments.updates):
        batch = Numbers(torch.randn(ROWS, 8))
        parts = minibatches(ROWS, 1, MINIBATCH, update)
        dist.barrier()
        began = time.perf_counter()
        with trainer.divided(split.shares) as division:
            trainer.update(batch, loss, parts)
        seconds.append(time.perf_counter() - began)
        speeds = [0.0, 0.0]
        dist.all_gather_object(speeds, division.speed)
        split.observe(speeds)
    if not place:
        torch.save((seconds, split.shares, trainer.weights()), result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measure the main memory of trainer ranks on this machine while they update.

    python studies/rank_memory.py [RANKS] [CALLS]      # default: 4 ranks, 2048 calls of two images

Real trainer workers on a Ray cluster of this machine train a toy policy on stored calls that have
two camera images beside. ``shared``: pages of the object store that a rank has read, which exist
once per machine. ``private``: pages that only this rank has. Both are the maximum during the
update, in MB above what the rank had before its first call arrived. Takes two minutes.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.core.types import Trajectory
from rlinf_vla.features.planner import synthetic
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.ray.actors import HEALTH
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.places import Role
from rlinf_vla.runtime.ray.trainers import Trainers
from rlinf_vla.runtime.workers.base import Builders
from rlinf_vla.runtime.workers.shards import heavy_parts, light_part, light_trajectory
from rlinf_vla.runtime.workers.trainer import TrainerWorker
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer

SHARDS = 8
CAMERAS, PIXELS = 2, 224
SETTINGS = Settings(0, 1.0, 64, False)
CLUSTER = ClusterConfig(name="here", update_threads=1)


def pages() -> tuple[int, int]:
    """Bytes of main memory of this process, shared and private."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {
        line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")
    }
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return sizes["Rss"] - private, private


class Measured(TrainerWorker):
    """Trainer rank that samples its memory while it updates."""

    def begin(self) -> None:
        self.before = pages()
        self.most = [0, 0]

    def update(self, *arguments: Any) -> Any:
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(0.02):
                self.most = [max(pair) for pair in zip(self.most, pages(), strict=True)]

        thread = threading.Thread(target=sample)
        thread.start()
        result = super().update(*arguments)
        ended.set()
        thread.join()
        return result

    def memory(self) -> list[float]:
        """The largest shared and private memory of an update, in MB."""
        return [(most - before) / 1e6 for most, before in zip(self.most, self.before, strict=True)]


def shard(number: int, rows: int) -> Trajectory:
    calls = synthetic.calls(LinearPolicy(LinearOptions()), rows, SETTINGS, 1)
    generator = torch.Generator().manual_seed(number)
    shape = (rows, PIXELS, PIXELS, 3)
    images = {
        f"camera{number}": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        for number in range(CAMERAS)
    }
    return replace(calls, inputs=calls.inputs | images)


def main(ranks: int, count: int) -> None:
    algorithm = PPO(PPOConfig(epochs=4, minibatch_size=256, target_kl=None), 1.0)
    settings: Any = SETTINGS
    policy = lambda: LinearPolicy(LinearOptions())  # noqa: E731
    builders = Builders(
        learner=policy,
        head=policy,
        environments=lambda: None,  # type: ignore[arg-type,return-value]
        trainer=lambda built: Trainer(built, OptimizerConfig(1e-3, 1e-3, 1.0), 16),
        algorithm=lambda: algorithm,
        reward_shaper=lambda env: None,  # type: ignore[arg-type,return-value]
        rewards_apart=False,
        settings=settings,
        cluster=CLUSTER,
    )
    with connect_cluster(None, {"trainer": Role(count=ranks)}, print):
        measure(ranks, count, builders, algorithm)


def measure(ranks: int, count: int, builders: Builders, algorithm: PPO) -> None:
    rows = count // SHARDS
    remote: Any = ray.remote
    kind = remote(concurrency_groups={HEALTH: 1})(Measured)
    trainers = Trainers([kind.remote(builders, index) for index in range(ranks)], CLUSTER)
    trainers.call("begin")
    light, references = [], []
    for number in range(SHARDS):
        trajectory = shard(number, rows)
        references.append(ray.put(heavy_parts(trajectory)[0]))
        trainers.call("accept", number, references[-1])
        light.append(light_trajectory(light_part(trajectory), number))
    calls = Trajectory.cat(light)
    generator = torch.Generator().manual_seed(0)
    batch: Batch = replace(
        algorithm.weighted(calls, torch.randn(count, generator=generator)),
        target=torch.zeros(count),
    )
    started = time.perf_counter()
    result = trainers.call("update", batch, False, 0, 0)
    print(
        f"{ranks} ranks, {count} calls: {CAMERAS * PIXELS * PIXELS * 3 * count / 1e6:.0f} MB of images; {result[0][0][0]}"
    )
    for rank, ((shared, private),) in enumerate(trainers.call("memory")):
        print(
            f"rank {rank}: shared {shared:.0f} MB, private {private:.0f} MB; update {time.perf_counter() - started:.1f} s"
        )
    trainers.close()


if __name__ == "__main__":
    main(*(int(argument) for argument in (*sys.argv[1:], *("4", "2048")[len(sys.argv) - 1 :])))

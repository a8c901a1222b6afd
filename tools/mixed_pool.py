"""How near a rollout on two workers of different speed comes to the ideal split.

    python tools/mixed_pool.py [--stopped 60] [--shards 2 4 8]

PPO in real ManiSkill on Ray, with two rollout workers, one of which is stopped (SIGSTOP) for
``--stopped`` of every 100 ms, with its simulators. With one shard per worker, both have half of the
environments, and the rollout takes as long as the slow one: T0 and T1 are the times of both. The
ideal is that both work until the end at these speeds: 2 T0 T1 / (T0 + T1). With several shards per
worker (``cluster.shards_per_worker``) each takes the next one when it is free. Printed is the ideal
divided by the time of the rollout, the median over the last iterations. Needs two free cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rlinf_vla.telemetry.run_files import read_run

ITERATIONS, WARMUP = 8, 2
KEYS = (
    *("recipe=maniskill_ppo", "cluster=laptop", "cluster.runtime=ray", "cluster.rollout_workers=2", "env.processes=1"),
    *(
        "env.num_envs=32",
        "env.episode_limit=10",
        "env.reward=normalized_dense",
        "rollout.batch_size=16",
        "algorithm.horizon=20",
        "rollout.pipeline_depth=1",
    ),
    *("model.checkpoint=asset://openvla_tiny", "model.options.random_weights=true", "algorithm.epochs=1", "algorithm.minibatch_size=160"),
    *(f"iterations={ITERATIONS}", "evaluation.before_and_after=false", "checkpoints.every=100", "seed=7"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stopped", type=int, default=60, help="percent of the time in which one worker is stopped")
    parser.add_argument("--shards", type=int, nargs="*", default=[2, 4, 8], help="shards per worker")
    given = parser.parse_args()
    alone, (fast, slow) = rollout(1, given.stopped)
    ideal = 2 * fast * slow / (fast + slow)
    print(f"1 shard per worker: {alone:.2f} s, workers {fast:.2f} and {slow:.2f} s; ideal {ideal:.2f} s: {100 * ideal / alone:.0f} %")
    for shards in given.shards:
        seconds, _ = rollout(shards, given.stopped)
        print(f"{shards} shards per worker: {seconds:.2f} s: {100 * ideal / seconds:.0f} % of the ideal split", flush=True)


def rollout(shards: int, stopped: int) -> tuple[float, tuple[float, float]]:
    """Return the median seconds of a rollout, and those of each worker until its last step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "rlinf_vla.cli.main", "train", *KEYS, f"cluster.shards_per_worker={shards}", f"run_dir={run}"]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
            slowed: list[psutil.Process] = []
            while process.poll() is None:
                if not slowed and (run / "metrics.jsonl").exists():  # its simulators have started, too
                    workers = json.loads((run / "placement.json").read_text())["workers"]
                    worker = psutil.Process(next(each["pid"] for each in workers if (each["role"], each["number"]) == ("rollout", 1)))
                    slowed = [worker, *worker.children(recursive=True)]
                send(slowed, signal.SIGSTOP)
                time.sleep(stopped / 1000)
                send(slowed, signal.SIGCONT)
                time.sleep((100 - stopped) / 1000)
        if process.returncode:
            raise RuntimeError((Path(folder) / "log").read_text())
        found = read_run(run)
    seconds = [line["timing_s/rollout"] for line in found.metrics if "timing_s/rollout" in line][WARMUP:]
    ends = [[span.end for span in found.timeline if span.track.startswith(f"rollout {number} ")] for number in (0, 1)]
    starts = [span.start for span in found.timeline if span.track.startswith("rollout ")]
    return statistics.median(seconds), (max(ends[0]) - min(starts), max(ends[1]) - min(starts))


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


if __name__ == "__main__":
    main()

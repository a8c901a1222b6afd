"""How near a rollout on two workers of different speed comes to the ideal split.

    python studies/mixed_pool.py [--stopped 60] [--shards 1 2 4] [--envs 64]

PPO in real ManiSkill on Ray, with two rollout workers, one of which is stopped (SIGSTOP) for
``--stopped`` of every 100 ms, with its simulators, and so has a share s = 1 - stopped / 100 of its
speed. T is the time of a rollout with one shard per worker and none stopped. The ideal with one
stopped is that both work until the end: 2 T / (1 + s). A shard per worker that nobody hands on
would take T / s. Printed is the ideal divided by the time of the rollout, the median over the last
iterations, for several shards per worker (``cluster.shards_per_worker``), and the share of that
time in which the workers were at work. A worker whose partner waits has more of the machine, so
its speed differs from s. Needs two free cores.
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

ITERATIONS, WARMUP = 8, 3
KEYS = (
    *(
        "recipe=maniskill_ppo",
        "cluster=laptop",
        "cluster.runtime=ray",
        "cluster.rollout_workers=2",
        "env.processes=1",
    ),
    *(
        "env.episode_limit=10",
        "env.reward=normalized_dense",
        "algorithm.horizon=20",
        "rollout.pipeline_depth=1",
    ),
    *(
        "model.checkpoint=asset://openvla_tiny",
        "model.options.random_weights=true",
        "algorithm.epochs=1",
        "algorithm.minibatch_size=160",
    ),
    *(
        f"iterations={ITERATIONS}",
        "evaluation.before_and_after=false",
        "checkpoints.every=100",
        "seed=7",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stopped", type=int, default=60, help="percent of the time in which one worker is stopped"
    )
    parser.add_argument(
        "--shards", type=int, nargs="*", default=[1, 2, 4], help="shards per worker"
    )
    parser.add_argument("--envs", type=int, default=64, help="environments of both workers")
    arguments = parser.parse_args()
    (whole, _) = rollout(1, 0, arguments.envs)
    speed = 1 - arguments.stopped / 100
    ideal = 2 * whole / (1 + speed)
    print(
        f"none stopped: {whole:.2f} s; one stopped: {ideal:.2f} s ideally, {whole / speed:.2f} s if each keeps its half",
        flush=True,
    )
    for shards in arguments.shards:
        seconds, busy = rollout(shards, arguments.stopped, arguments.envs)
        share = f"{100 * ideal / seconds:.0f} % of the ideal split, workers busy for {100 * busy:.0f} % of it"
        print(f"{shards} shards per worker: {seconds:.2f} s: {share}", flush=True)


def rollout(shards: int, stopped: int, envs: int) -> tuple[float, float]:
    """Return the seconds of a rollout, and the share of them in which workers worked: medians."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sizes = (
            f"env.num_envs={envs}",
            f"rollout.batch_size={envs // 2}",
            f"cluster.shards_per_worker={shards}",
        )
        command = [
            sys.executable,
            "-m",
            "rlinf_vla.cli.main",
            "train",
            *KEYS,
            *sizes,
            f"run_dir={run}",
        ]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            slowed: list[psutil.Process] = []
            while process.poll() is None:
                if (
                    not slowed and (run / "metrics.jsonl").exists()
                ):  # its simulators have started, too
                    workers = json.loads((run / "placement.json").read_text())["workers"]
                    worker = psutil.Process(
                        next(
                            entry["pid"]
                            for entry in workers
                            if (entry["role"], entry["number"]) == ("rollout", 1)
                        )
                    )
                    slowed = [worker, *worker.children(recursive=True)]
                if stopped:
                    send(slowed, signal.SIGSTOP)
                    time.sleep(stopped / 1000)
                send(slowed, signal.SIGCONT)
                time.sleep((100 - stopped) / 1000)
        if process.returncode:
            raise RuntimeError((Path(folder) / "log").read_text())
        record = read_run(run)
    lines = [line for line in record.metrics if "timing_s/rollout" in line][WARMUP:]
    busy = [
        line["utilisation/rollout"] * line["timing_s/iteration"] / line["timing_s/rollout"]
        for line in lines
    ]
    return statistics.median(line["timing_s/rollout"] for line in lines), statistics.median(busy)


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


if __name__ == "__main__":
    main()

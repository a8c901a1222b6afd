"""CPU time of parts of `rlinf-vla train recipe=maniskill_ppo`: a simulator's calls, and an update.

python studies/loop_cost.py [KEY=VALUE ...]

To compare two checkouts, run it in turns with the Python program of each: it measures whatever
rlinf_vla that program has. CPU times depend little on what else the machine does. The digest is of
all states, images and rewards.
"""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

SLOTS = 8
EPISODES = 2
STEPS = 16
CHUNK = 2
UPDATES = 3


def simulator() -> None:
    """Print the CPU milliseconds of a reset, a control step and an observation of PushCube."""
    from rlinf_vla.envs.maniskill.config import ManiSkillConfig
    from rlinf_vla.envs.maniskill.plugin import cpu_driver, simulator_options

    config = ManiSkillConfig(task="PushCube", reward="progress")
    backend, environment = cpu_driver(config)
    if any(os.environ.get(name) != value for name, value in environment.items()):
        # the Vulkan loader reads it when the program starts
        sys.exit(
            subprocess.run(
                [sys.executable, *sys.argv], env=os.environ | environment, check=False
            ).returncode
        )
    from rlinf_vla.envs.maniskill.simulator import ManiSkillSimulator

    simulator = ManiSkillSimulator(simulator_options(config) | {"render_backend": backend}, SLOTS)
    actions = (
        np.random.default_rng(0)
        .uniform(-1, 1, (STEPS, SLOTS, simulator.spec.action_dim))
        .astype(np.float32)
    )
    digest = hashlib.sha256()
    times = defaultdict[str, list[float]](list)

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.process_time()
        result = call(*arguments)
        times[name].append(time.process_time() - begun)
        return result

    for episode in range(EPISODES + 1):
        if episode == 1:
            times.clear()  # the first episodes load files
        for slot in range(SLOTS):
            timed("reset", simulator.reset, slot, episode * SLOTS + slot, 0)
        for step in range(STEPS):
            for slot in range(SLOTS):
                digest.update(
                    repr(timed("step", simulator.step, slot, actions[step, slot])).encode()
                )
                if step % CHUNK == CHUNK - 1:
                    seen = timed("observe", simulator.observe, slot)
                    digest.update(seen.state.tobytes() + seen.images["base"].tobytes())
    means = ", ".join(
        f"{name} {1e3 * sum(values) / len(values):.2f} ms" for name, values in times.items()
    )
    print(f"simulator: {means}; digest {digest.hexdigest()[:16]}", flush=True)


def updates(keys: list[str]) -> None:
    """Print the CPU seconds of the first updates of a short run."""
    from rlinf_vla.cli import main as cli
    from rlinf_vla.training.trainer import Trainer

    original = Trainer.update
    seconds = list[float]()

    def update(trainer: Trainer, *arguments: Any, **keywords: Any) -> dict[str, float]:
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        metrics = original(trainer, *arguments, **keywords)
        seconds.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun)
        return metrics

    Trainer.update = update  # type: ignore[assignment,method-assign]
    short = [
        f"iterations={UPDATES}",
        "evaluation.before_and_after=false",
        "algorithm.horizon=30",
        "algorithm.value_warmup=0",
    ]
    with tempfile.TemporaryDirectory() as directory:
        cli.run(
            [
                "train",
                "recipe=maniskill_ppo",
                "cluster.update_threads=1",
                *short,
                *keys,
                f"run_dir={directory}/run",
            ]
        )
    print(
        f"update of 240 policy calls, 3 epochs: {', '.join(f'{duration:.2f}' for duration in seconds)} s"
    )


if __name__ == "__main__":
    simulator()
    updates(sys.argv[1:])

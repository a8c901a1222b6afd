"""Benchmark environment steps against the simulator's own vector environment.

``rlinf-vla bench env env=NAME[,NAME]`` reports control steps per second and CPU time per step,
with and without images. Both do the same work: reset all environments, then an episode of random
actions, several times.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from omegaconf import OmegaConf

from rlinf_vla.benchmarks import harness
from rlinf_vla.benchmarks.simulators import Baseline
from rlinf_vla.core import child_process
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.runtime import recipes
from rlinf_vla.telemetry.measurement import usage

EPISODES = 3
"""Measured episodes per environment, after one warm-up episode."""
TIMEOUT = 1800.0
"""Seconds after which a baseline process is killed."""
CHUNK = 8
"""Actions between two images, as OpenVLA-OFT executes them in LIBERO."""
USAGE = "rlinf-vla bench env env=maniskill[,NAME ...] [env.KEY=VALUE ...]"


@dataclass(frozen=True)
class EnvThroughput:
    """Result of one run: control steps of all environments, core-seconds of all processes."""

    name: str
    images: str
    steps: int
    seconds: float
    cpu_seconds: float

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds

    @property
    def cpu_per_step(self) -> float:
        return self.cpu_seconds / self.steps


def run(arguments: Sequence[str]) -> None:
    """Benchmark each simulator, print tables and write bench_env.json."""
    configs = harness.simulators(arguments, USAGE)
    if not configs:
        return
    report = harness.Report(next(iter(configs.values())), "bench_env")
    document = dict[str, Any]()
    for name, config in configs.items():
        with report.console.status(f"starting {name}") as status:
            throughputs = _simulator(recipes.read_node(config, "env"), status.update)
        rows = [
            (
                throughput.name,
                throughput.images,
                f"{throughput.steps_per_s:.1f}",
                f"{1000 * throughput.cpu_per_step:.1f}",
            )
            for throughput in throughputs
        ]
        title = f"{name}: {config.env.num_envs} environments, {EPISODES} episodes each"
        report.show(("vector environment", "images", "steps/s", "CPU ms per step"), rows, title)
        document[name] = {
            "env": OmegaConf.to_container(config.env),
            "measured": [asdict(throughput) for throughput in throughputs],
            "ratios": _ratios(throughputs),
        }
        for what, ratio in document[name]["ratios"].items():
            report.console.print(f"{what}: {ratio:.2f}")
    report.write(document)


def _simulator(env: Any, say: Callable[[str], None]) -> list[EnvThroughput]:
    """Measure ours at three image rates, then the simulator's own baselines."""
    with harness.opened(env) as group:
        limit = group.spec.episode_limit
        throughputs = []
        for chunk, images in (
            (1, "every step"),
            (min(CHUNK, limit), f"every {min(CHUNK, limit)} steps"),
            (limit, "once an episode"),
        ):
            say(f"{env.name}: images {images}")
            throughputs.append(_ours(group, chunk, images))
    others = harness.comparisons(env)
    for baseline in others.baselines(env, EPISODES) if others else []:
        say(f"{env.name}: {baseline.name}")
        throughputs.append(_stock(baseline, EPISODES * limit * env.num_envs))
    return throughputs


def _ours(env: VectorEnv, chunk: int, images: str) -> EnvThroughput:
    generator = torch.Generator().manual_seed(0)
    steps = 0
    started = spent = 0.0
    for episode in range(1 + EPISODES):
        if episode == 1:
            started = time.perf_counter()
            spent = _cpu()
            steps = 0
        steps += _episode(env, chunk, episode, generator)
    return EnvThroughput("ours", images, steps, time.perf_counter() - started, _cpu() - spent)


def _episode(env: VectorEnv, chunk: int, number: int, generator: torch.Generator) -> int:
    """Run for the length of one episode and return the control steps; reset what ends early."""
    size = env.spec.num_envs
    limit = env.spec.episode_limit
    done = 0
    episodes = numbered_episodes(
        EVALUATION_SEEDS, number * size, size, 1
    )  # the first task, as in the baselines
    env.reset(episodes)
    for first in range(0, limit, chunk):
        result = env.step(harness.random_actions(env.spec, min(chunk, limit - first), generator))
        done += int(result.valid.sum())
        if result.done.any() and first + chunk < limit:
            env.reset(
                Episodes(episodes.task_id, episodes.seed, episodes.attempt), result.done.cpu()
            )
    return done


def _cpu() -> float:
    """Core-seconds used so far by this process and its descendants."""
    return time.process_time() + usage().cpu


def _stock(baseline: Baseline, steps: int) -> EnvThroughput:
    command = child_process.command(baseline.program, baseline.python)
    environment = child_process.environment({"OMP_NUM_THREADS": "1", **baseline.environment})
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment, text=True
        ) as process,
    ):
        watch = threading.Timer(TIMEOUT, process.kill)
        watch.start()
        try:
            _wait_for("begin", process, baseline)
            started = time.perf_counter()
            spent = usage().cpu
            _wait_for("end", process, baseline)
            seconds = time.perf_counter() - started
            spent = usage().cpu - spent
            process.communicate("", timeout=60)
        finally:
            watch.cancel()
            process.kill()
    return EnvThroughput(
        baseline.name, "every step" if baseline.images else "none", steps, seconds, spent
    )


def _wait_for(word: str, process: subprocess.Popen[str], baseline: Baseline) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise RuntimeError(
        f"the baseline {baseline.name} ended before it printed {word!r} (exit code {process.wait()})"
    )


def _ratios(throughputs: Sequence[EnvThroughput]) -> dict[str, float]:
    """Compare ours with the simulator's own; above 1, ours is better."""
    every, chunked, rare = throughputs[:3]
    ratios = {}
    for stock in throughputs[3:]:
        if stock.images == "none":
            ratios[f"steps/s, an image once an episode / {stock.name}"] = (
                rare.steps_per_s / stock.steps_per_s
            )
            ratios[f"CPU per step, {stock.name} / an image once an episode"] = (
                stock.cpu_per_step / rare.cpu_per_step
            )
        else:
            for ours in (every, chunked):
                ratios[f"steps/s, image {ours.images} / {stock.name}"] = (
                    ours.steps_per_s / stock.steps_per_s
                )
                ratios[f"CPU per step, {stock.name} / image {ours.images}"] = (
                    stock.cpu_per_step / ours.cpu_per_step
                )
    return ratios

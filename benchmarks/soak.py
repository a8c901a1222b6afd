"""Check that a simulator's memory does not grow over a long run.

``rlinf-vla bench soak env=NAME[,NAME] [seconds=3600] [page=PAGE.md]`` runs random actions in
episodes of random tasks, seeds and lengths, with an image per chunk, and samples resident memory
of this process and the simulator's. The first sixth of the time warms up (allocators, caches). The
exit code is 1 if memory grows by 2 % or more from the second to the last sixth.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.benchmarks import harness
from rlinf_vla.benchmarks.env import CHUNK
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes
from rlinf_vla.runtime import recipes
from rlinf_vla.telemetry.measurement import resident, usage

USAGE = "rlinf-vla bench soak env=maniskill[,NAME ...] [seconds=3600] [page=PAGE.md] [env.KEY=VALUE ...]"
ALLOWED = 0.02
SAMPLES = 240
"""Memory samples per run, evenly spread."""
HEAD = """# Memory over time

`make soak` writes this page, one line per run: random actions in episodes of random tasks, seeds and lengths. Memory is in MB, of the
simulator's processes and the measuring process: medians over the second and over the last sixth of the time.

| date | simulator | minutes | episodes | control steps | second sixth | last sixth | growth | versions |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Sample:
    seconds: float
    resident: int
    """Bytes of this process and its descendants."""


@dataclass(frozen=True)
class SoakResult:
    seconds: float
    episodes: int
    steps: int
    samples: list[Sample]

    @property
    def levels(self) -> tuple[float, float]:
        """Median bytes of the second and of the last sixth of the samples."""
        held = [sample.resident for sample in self.samples]
        sixth = len(self.samples) // 6
        return statistics.median(held[sixth : 2 * sixth]), statistics.median(held[-sixth:])

    @property
    def growth(self) -> float:
        then, now = self.levels
        return now / then - 1


def run(arguments: Sequence[str]) -> int:
    """Test each simulator and write bench_soak.json. Returns 1 if the memory of any grew."""
    own = dict(
        argument.split("=", 1)
        for argument in arguments
        if argument.startswith(("seconds=", "page="))
    )
    configs = harness.simulators(
        [argument for argument in arguments if argument.partition("=")[0] not in own], USAGE
    )
    seconds = _seconds(own.get("seconds", "3600"))
    if not configs:
        return 0
    report = harness.Report(next(iter(configs.values())), "bench_soak")
    console = report.console
    document = dict[str, Any]()
    grown = []
    for name, config in configs.items():
        with (
            console.status(f"starting {name}") as status,
            harness.opened(recipes.read_node(config, "env")) as group,
        ):
            result = soak(group, seconds, status.update)
        document[name] = {"growth": result.growth, **asdict(result), "stack": group.spec.stack}
        console.print(
            f"{name}: {result.growth:+.2%} in {seconds / 60:.0f} minutes, {result.episodes} episodes"
        )
        if "page" in own:
            _write(Path(own["page"]), _line(name, group, result))
        if result.growth >= ALLOWED:
            grown.append(name)
    report.write(document)
    if grown:
        console.print(f"memory grew by {ALLOWED:.0%} or more: {', '.join(grown)}")
    return int(bool(grown))


def soak(env: VectorEnv, seconds: float, say: Callable[[str], None]) -> SoakResult:
    """Run episodes for ``seconds``; each ends at a random length, on success or at the limit."""
    chance = random.Random(0)  # noqa: S311  (nothing secret)
    noise = torch.Generator().manual_seed(0)
    spec = env.spec
    drawn = Episodes.first_attempts(
        torch.zeros(spec.num_envs, dtype=torch.int64), torch.zeros(spec.num_envs, dtype=torch.int64)
    )
    left = [0] * spec.num_envs
    over = torch.ones(spec.num_envs, dtype=torch.bool)
    samples = list[Sample]()
    episodes = 0
    steps = 0
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < seconds:
        for row in over.nonzero().flatten().tolist():
            drawn.task_id[row] = chance.randrange(len(spec.tasks))
            drawn.seed[row] = chance.randrange(2**31)
            left[row] = chance.randint(1, spec.episode_limit)
        if over.any():
            env.reset(drawn, over)
            episodes += int(over.sum())
        result = env.step(harness.random_actions(spec, CHUNK, noise))
        steps += int(result.valid.sum())
        left = [count - CHUNK for count in left]
        over = result.done.cpu() | (torch.tensor(left) <= 0)
        if now >= len(samples) * seconds / SAMPLES:
            samples.append(Sample(now, usage().resident + resident("VmRSS")))
            say(
                f"{now:.0f} of {seconds:.0f} s: {samples[-1].resident / 1e6:.0f} MB after {episodes} episodes"
            )
    if len(samples) < 6:
        raise UserError(
            f"seconds={seconds:g} is too short: memory was sampled {len(samples)} times, and 6 samples are needed"
        )
    return SoakResult(seconds, episodes, steps, samples)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise UserError(f"seconds={text} must be a number of seconds, at least 1: {USAGE}")
    return seconds


def _line(name: str, env: VectorEnv, result: SoakResult) -> str:
    then, now = (level / 1e6 for level in result.levels)
    versions = ", ".join(
        f"{key} {value}"
        for key, value in env.spec.stack.items()
        if value[:1].isdigit() and "." in value
    )
    figures = f"{result.seconds / 60:.0f} | {result.episodes} | {result.steps} | {then:.0f} | {now:.0f} | {result.growth:+.2%}"
    return (
        f"| {date.today()} | {name} ({env.spec.num_envs} environments) | {figures} | {versions} |\n"
    )


def _write(page: Path, line: str) -> None:
    text = page.read_text() if page.exists() else HEAD
    page.write_text(text + line)

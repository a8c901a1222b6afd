"""Benchmark rollouts: steps per second, serial and pipelined, and the bound of pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import Policy
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.collector import collect, rollout_calls
from rlinf_vla.rollout.episodes import EVALUATION_SEEDS, numbered_episodes
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import merged_lora

REPEATS = 3
FRAMES = 200


@dataclass(frozen=True)
class Rollout:
    """The fastest of ``REPEATS`` rollouts.

    A stage's seconds are those in which it, or the wait for it, occupied its track of the timeline.
    """

    pipeline_depth: int
    steps: int
    seconds: float
    policy_seconds: float
    simulator_seconds: float

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds


def run(config: DictConfig) -> None:
    """Run serial and pipelined rollouts, print a table and write bench_rollout.json."""
    recipe = recipes.read(config)
    policy = builders.build_policy(recipe)
    depth = max(2, recipe.rollout.pipeline_depth)
    console = Console(highlight=False)
    with builders.threads(recipe.cluster.rollout_threads), console.status("starting") as status:
        serial, pipelined = (_rollout(recipe, policy, each, status.update) for each in (1, depth))
        frames = _frames(recipe, status.update)
    ratio = pipelined.steps_per_s / serial.steps_per_s
    bound = serial.seconds / max(serial.policy_seconds, serial.simulator_seconds)
    table = Table("rollout", "steps/s", "policy s", "simulator s", "wall s", title=f"{recipe.env.num_envs} environments")
    for name, each in (("serial", serial), (f"pipelined, depth {depth}", pipelined)):
        numbers = (each.steps_per_s, each.policy_seconds, each.simulator_seconds, each.seconds)
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    console.print(table)
    console.print(f"pipelined / serial: {ratio:.2f}; the bound (time of the slower stage alone): {bound:.2f}")
    for name, rate in frames.items():
        console.print(f"frames/s in one simulator process, {name}: {rate:.1f}")
    directory = run_directory.for_evaluation(config, None)
    document = {"serial": asdict(serial), "pipelined": asdict(pipelined), "ratio": ratio, "bound": bound, "frames_per_s": frames}
    write_json(directory / "bench_rollout.json", document | {"environment": fingerprint()})
    console.print(f"numbers: {builders.relative(directory / 'bench_rollout.json')}")


def _rollout(recipe: Recipe, policy: Policy, depth: int, say: Callable[[str], None]) -> Rollout:
    timeline, best = Timeline(), None
    with builders.open_envs(recipe, policy, depth) as groups:
        limit = groups[0].spec.episode_limit
        calls = rollout_calls(getattr(recipe.algorithm, "horizon", limit), limit, policy.spec.chunk)
        actor = Actor(policy, builders.actor_settings(recipe, recipe.rollout.temperature))
        for repeat in range(REPEATS):
            say(f"rollout at pipeline depth {depth}, {repeat + 1} of {REPEATS}")
            timeline.begin_iteration(repeat)
            started = time.perf_counter()
            with merged_lora(policy):
                rollouts = collect(actor, groups, 0, 0, calls, timeline)
            seconds = time.perf_counter() - started
            simulators = [timeline.busy(f"simulator {index}") for index in range(depth)]
            measured = Rollout(depth, int(rollouts.valid.sum()), seconds, timeline.busy("policy"), max(simulators))
            best = measured if best is None or measured.seconds < best.seconds else best
    assert best is not None
    return best


def _frames(recipe: Recipe, say: Callable[[str], None]) -> dict[str, float]:
    """Control steps per second, each with an image, in one environment of each variant."""
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    rates = {}
    for name, variant in plugin.variants(replace(recipe.env, num_envs=1)).items():
        say(f"frames of {name}")
        rates[name] = _frame_rate(plugin.create(variant, 1)[0])
    return rates


def _frame_rate(env: Any) -> float:
    try:
        episodes = numbered_episodes(EVALUATION_SEEDS, 0, 1, len(env.spec.tasks))
        env.reset(episodes)
        generator = torch.Generator().manual_seed(0)
        started, steps = time.perf_counter(), 0
        while steps < FRAMES:
            actions = torch.rand(1, 1, env.spec.action_dim, generator=generator) * 2 - 1
            steps += 1
            if env.step(actions).done.any():
                env.reset(episodes)
        return steps / (time.perf_counter() - started)
    finally:
        env.close()

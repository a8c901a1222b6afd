"""Benchmark rollouts: steps per second, serial and pipelined, and the bound of pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import torch
from omegaconf import DictConfig

from rlinf_vla.benchmarks import harness
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.devices import threads
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.collector import collect, rollout_calls
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.runtime import builders, recipes
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
    report = harness.Report(config, "bench_rollout")
    console = report.console
    with threads(recipe.cluster.rollout_threads), console.status("starting") as status:
        serial, pipelined = _rollouts(recipe, policy, (1, depth), status.update)
        frames = _frames(recipe, status.update)
    ratio = pipelined.steps_per_s / serial.steps_per_s
    bound = serial.seconds / max(serial.policy_seconds, serial.simulator_seconds)
    rows = [
        (
            name,
            *(
                f"{number:.2f}"
                for number in (
                    rollout.steps_per_s,
                    rollout.policy_seconds,
                    rollout.simulator_seconds,
                    rollout.seconds,
                )
            ),
        )
        for name, rollout in (("serial", serial), (f"pipelined, depth {depth}", pipelined))
    ]
    report.show(
        ("rollout", "steps/s", "policy s", "simulator s", "wall s"),
        rows,
        f"{recipe.env.num_envs} environments",
    )
    share = f"{100 * ratio / bound:.0f} % of the bound {bound:.2f} (time of the slower stage alone)"
    console.print(f"pipelined / serial: {ratio:.2f}, {share}")
    for name, rate in frames.items():
        console.print(f"frames/s in one simulator process, {name}: {rate:.1f}")
    document = {
        "serial": asdict(serial),
        "pipelined": asdict(pipelined),
        "ratio": ratio,
        "bound": bound,
        "frames_per_s": frames,
    }
    report.write(document)


def _rollouts(
    recipe: Recipe, policy: Policy, depths: Sequence[int], say: Callable[[str], None]
) -> list[Rollout]:
    """The fastest rollout at each depth; they take turns, so that all meet the same load."""
    rollouts: dict[int, list[Rollout]] = {depth: [] for depth in depths}
    with ExitStack() as stack:
        opened = {
            depth: stack.enter_context(builders.open_envs(recipe, policy, depth))
            for depth in depths
        }
        actor = Actor(policy, builders.actor_settings(recipe, recipe.rollout.temperature))
        for repeat in range(REPEATS):
            for depth, groups in opened.items():
                say(f"rollout at pipeline depth {depth}, {repeat + 1} of {REPEATS}")
                rollouts[depth].append(_rollout(recipe, actor, groups))
    return [min(repeats, key=lambda rollout: rollout.seconds) for repeats in rollouts.values()]


def _rollout(recipe: Recipe, actor: Actor, groups: Sequence[VectorEnv]) -> Rollout:
    timeline = Timeline()
    limit = groups[0].spec.episode_limit
    calls = rollout_calls(
        getattr(recipe.algorithm, "horizon", limit), limit, actor.policy.spec.chunk
    )
    timeline.begin_iteration(0)
    started = time.perf_counter()
    with merged_lora(actor.policy):
        rollouts = collect(actor, groups, 0, 0, calls, timeline)
    seconds = time.perf_counter() - started
    simulators = max(timeline.busy(f"simulator {index}") for index in range(len(groups)))
    return Rollout(
        len(groups), int(rollouts.valid.sum()), seconds, timeline.busy("policy"), simulators
    )


def _frames(recipe: Recipe, say: Callable[[str], None]) -> dict[str, float]:
    """Control steps per second, each with an image, in one environment of each variant."""
    one = replace(recipe.env, num_envs=1)
    others = harness.comparisons(recipe.env)
    rates = {}
    for name, variant in (others.variants(one) if others else {one.name: one}).items():
        say(f"frames of {name}")
        with harness.opened(variant) as env:
            rates[name] = _frame_rate(env)
    return rates


def _frame_rate(env: VectorEnv) -> float:
    episodes = numbered_episodes(EVALUATION_SEEDS, 0, 1, len(env.spec.tasks))
    env.reset(episodes)
    generator = torch.Generator().manual_seed(0)
    started = time.perf_counter()
    for _ in range(FRAMES):
        if env.step(harness.random_actions(env.spec, 1, generator)).done.any():
            env.reset(episodes)
    return FRAMES / (time.perf_counter() - started)

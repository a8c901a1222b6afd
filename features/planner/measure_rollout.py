"""Profile the simulators: costs of steps and resets, episode lengths, contention for cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rlinf_vla.config.recipe import Recipe, RewardConfig
from rlinf_vla.core.devices import synchronise
from rlinf_vla.core.protocols import Policy, PolicySpec, VectorEnv, WrappedEnv
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation, StepResult, Trajectory
from rlinf_vla.features.planner import synthetic
from rlinf_vla.features.planner.profile import CPU, GPU, SIMULATOR, Cost, Profile, fit
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.collector import collect, rollout_calls
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.fit import fitted
from rlinf_vla.runtime.machines import this_machine
from rlinf_vla.telemetry.measurement import usage
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import merged_lora

FEW = 4
"""Environments of a short measurement, beside a single one."""
SECONDS = 2.0
"""A short measurement repeats so long: core-seconds are counted in hundredths."""
TURNS = 3
"""Repeats of a single environment's steps, and of policy calls alone and beside simulators."""

Seen = TypeVar("Seen", StepResult, Observation)


class TimedCommand(NamedTuple):
    """One step or reset of ``environments`` environments.

    ``simulators``, ``own``: core-seconds of the simulator processes and of this process.
    ``wall``: elapsed seconds. ``processes``: simulators that it used; 0: it ran in this process.
    """

    name: str
    environments: int
    simulators: float
    own: float
    wall: float
    processes: int = 0


class InstrumentedEnv(WrappedEnv):
    """Wrap an environment group and record each step and reset with its cost."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.commands: list[TimedCommand] = []

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._begin(
            "reset",
            len(episodes) if mask is None else int(mask.sum()),
            partial(super().reset_async, episodes, mask),
        )

    def reset_wait(self) -> Observation:
        return self._end(super().reset_wait)

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self._begin("simulate", len(actions), partial(super().step_async, actions, skip_ended))

    def step_wait(self) -> StepResult:
        return self._end(super().step_wait)

    def _begin(self, name: str, environments: int, call: Callable[[], None]) -> None:
        synchronise(self.spec.device)
        self._under_way = name, environments, usage().cpu, time.process_time(), time.perf_counter()
        call()

    def _end(self, call: Callable[[], Seen]) -> Seen:
        result = call()
        synchronise(self.spec.device)
        name, environments, simulators, own, wall = self._under_way
        wall, own = time.perf_counter() - wall, time.process_time() - own
        self.commands.append(TimedCommand(name, environments, usage().cpu - simulators, own, wall))
        return result


class InstrumentedActor(Actor):
    """Sum the core-seconds of policy calls in this process, and their expected core-seconds.

    ``own``: measured. ``foreseen``: expected by the ``Cost`` of each operation.
    """

    def __init__(self, actor: Actor, expected: Mapping[str, Cost]) -> None:
        super().__init__(actor.policy, actor.settings)
        self._expected = expected
        self.own = self.foreseen = 0.0

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        started = time.process_time()
        sample = super().act(inputs, episodes, step)
        self._note("act", len(step), started)
        return sample

    def values(self, inputs: Inputs) -> Tensor:
        started = time.process_time()
        values = super().values(inputs)
        self._note("value", len(values), started)
        return values

    def _note(self, name: str, rows: int, started: float) -> None:
        self.own += time.process_time() - started
        self.foreseen += self._expected[name].of(rows)


def measure_rollout(
    recipe: Recipe, policy: Policy, outside: Profile, say: Callable[[str], None]
) -> Profile:
    """Run an episode on one group after the other, and complete the profile of the policy alone.

    Adds simulate, reset, and reward if there is one; on a CPU also replaces act and value, which
    were measured ``outside`` of rollouts.
    """
    acting = outside.operations
    actor = InstrumentedActor(
        Actor(policy, builders.actor_settings(recipe, recipe.rollout.temperature)), acting
    )
    samples: list[TimedCommand] = []
    episodes: list[tuple[int, bool]] = []
    before = usage()
    with (
        builders.open_envs(recipe, policy, recipe.rollout.pipeline_depth) as groups,
        merged_lora(policy),
    ):
        watched = [InstrumentedEnv(env) for env in groups]
        outer = [
            InstrumentedEnv(env) for env in builders.rewarded(recipe, watched, policy.spec.chunk)
        ]
        limit = groups[0].spec.episode_limit
        first = 0
        calls = rollout_calls(limit, limit, policy.spec.chunk)
        for number, env in enumerate(outer):
            say(f"measuring episodes, environment group {number + 1} of {len(outer)}")
            rollouts = collect(actor, [env], 0, 0, calls, Timeline(), first=first)
            first += env.spec.num_envs
            episodes += first_episodes(rollouts)
        after = usage()
        processes = after.processes - before.processes
        most = processes // len(groups)
        samples += [
            command._replace(processes=min(most, command.environments))
            for env in watched
            for command in env.commands
        ]
        pairs = [
            pair
            for both in zip(outer, watched, strict=True)
            for pair in zip(*(env.commands for env in both), strict=True)
        ]
        say("measuring the policy beside busy simulators")
        crowding = _crowding(recipe, actor, policy, groups, processes) if processes else 0.0
    on_gpu = outer[0].spec.device.type != "cpu"
    if on_gpu or not processes:
        # a batched step may cost as much for many environments as for one: measure one alone, too
        with builders.open_envs(recipe, policy, 1, number=1) as groups:
            say("measuring a single environment")
            single = InstrumentedEnv(groups[0])
            _few_steps(single, policy.spec.chunk)
            samples += single.commands
    operations = {
        name: _fitted([sample for sample in samples if sample.name == name], on_gpu)
        for name in SIMULATOR
    }
    if recipe.reward != RewardConfig():
        steps = [(rewarded, plain) for rewarded, plain in pairs if plain.name == "simulate"]
        seconds = sum(rewarded.own - plain.own for rewarded, plain in steps)
        operations["reward"] = Cost(
            per_item=max(0.0, seconds / sum(plain.environments for _, plain in steps))
        )
    if not on_gpu:
        # in rollouts caches are colder, and images are copied
        factor = max(1.0, actor.own / actor.foreseen)
        handling = sum(sample.own for sample in samples if sample.processes) / max(
            1, sum(sample.environments for sample in samples)
        )
        operations |= {name: acting[name].times(factor) for name in ("act", "value")}
        operations["act"] = replace(
            operations["act"], per_item=operations["act"].per_item + handling
        )
    return replace(
        outside,
        operations=acting | operations,
        bytes=replace(
            outside.bytes, process=(after.resident - before.resident) / max(1, processes)
        ),
        episode_limit=limit,
        episodes=tuple(episodes),
        crowding=crowding,
        inline=not processes and not on_gpu,
    )


def _fitted(samples: Sequence[TimedCommand], on_gpu: bool) -> Cost:
    """Fit the cost of a command in one process to its number of environments.

    Commands of one size are averaged, because the system counts core-seconds in hundredths.
    """
    alike: dict[tuple[int, int], list[TimedCommand]] = {}
    for sample in samples:
        alike.setdefault((sample.environments, sample.processes), []).append(sample)
    sizes = []
    costs = []
    cores = 1.0
    for (environments, processes), group in alike.items():
        spent = sum(
            sample.wall if on_gpu else sample.simulators if processes else sample.own
            for sample in group
        ) / len(group)
        sizes.append(environments / max(1, processes))
        costs.append(spent / max(1, processes))
        cores = max(
            cores, spent / max(1, processes) / (sum(sample.wall for sample in group) / len(group))
        )
    return Cost(*fit(sizes, costs), *((1.0, GPU) if on_gpu else (cores, CPU)))


def first_episodes(rollouts: Trajectory) -> list[tuple[int, bool]]:
    """Return each environment's first episode: its policy calls, and whether it was cut off.

    Later episodes are not counted, because they would favour short ones.
    """
    ended = ((rollouts.terminated | rollouts.truncated) & rollouts.valid).any(-1)
    terminated = (rollouts.terminated & rollouts.valid).any(-1)
    episodes = []
    for environment in range(ended.shape[1]):
        calls = (
            int(ended[:, environment].nonzero()[0]) + 1
            if ended[:, environment].any()
            else len(ended)
        )
        episodes.append((calls, not bool(terminated[calls - 1, environment])))
    return episodes


def _crowding(
    recipe: Recipe, actor: Actor, policy: Policy, groups: Sequence[VectorEnv], processes: int
) -> float:
    """Measure ``Profile.crowding``: policy calls alone and beside all busy simulators, in turns."""
    cores = this_machine().cpus
    rows = groups[0].spec.num_envs
    if cores == 1:
        return 0.0
    inputs = policy.prepare(synthetic.observation(policy.spec, rows))
    numbers = torch.arange(rows)
    episodes = Episodes(0 * numbers, numbers, 0 * numbers)
    alone, crowded = list[float](), list[float]()

    def cost() -> float:
        started = time.process_time()
        actor.act(inputs, episodes, 0 * numbers)
        return time.process_time() - started

    for _ in range(TURNS):
        for env in groups:
            env.reset_async(numbered_episodes(EVALUATION_SEEDS, 0, rows, len(env.spec.tasks)))
        crowded.append(cost())
        for env in groups:
            env.reset_wait()
        alone.append(cost())
    slower = max(0.0, statistics.median(crowded) / statistics.median(alone) - 1)
    return slower * (cores - 1) / (min(cores, 1 + processes) - 1)


def measure_simulator(recipe: Recipe, spec: PolicySpec) -> tuple[dict[str, Cost], int, bool]:
    """Measure steps and resets of a few of the recipe's environments, without a policy.

    ``spec``: of the recipe's policy. Returns the costs, the time limit of episodes in control
    steps, and whether the environments were simulated on a GPU. Raises UserError if the simulator
    cannot run here.
    """
    fitting = replace(recipe, env=fitted(recipe.env, spec))
    samples: list[TimedCommand] = []
    for number in sorted({1, min(FEW, recipe.env.num_envs)}):
        before = usage()
        with builders.open_envs(fitting, None, 1, number) as (env,):
            watched = InstrumentedEnv(env)
            processes = usage().processes - before.processes
            end = time.perf_counter() + SECONDS
            while not watched.commands or time.perf_counter() < end:
                _few_steps(watched, spec.chunk)
        samples += [
            command._replace(processes=min(processes, command.environments))
            for command in watched.commands
        ]
    on_gpu = env.spec.device.type != "cpu"
    costs = {
        name: _fitted([sample for sample in samples if sample.name == name], on_gpu)
        for name in SIMULATOR
    }
    return costs, env.spec.episode_limit, on_gpu


def _few_steps(env: VectorEnv, chunk: int) -> None:
    """Run resets of all environments and of one, and steps with zero actions."""
    size = env.spec.num_envs
    episodes = numbered_episodes(EVALUATION_SEEDS, 0, size, len(env.spec.tasks))
    first = torch.arange(size) == 0
    env.reset(episodes)
    for _ in range(TURNS):
        if env.step(
            torch.zeros(size, chunk, env.spec.action_dim, device=env.spec.device)
        ).done.any():
            env.reset(episodes)
        env.reset(episodes, first)

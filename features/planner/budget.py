"""Memory of each device under a recipe.

A role's peak is what it always holds and the largest of its phases, which follow one another. The
roles of a device add up, unless they take turns (``cluster.offload``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from rlinf_vla.config.cluster import CUDA, IN_PROCESS, MEASURED, ClusterConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import OFF_POLICY, Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.devices import accelerator
from rlinf_vla.core.protocols import HasBackends, TakesGPU
from rlinf_vla.features.planner.memory import (
    MemoryModel,
    Weights,
    estimate,
    exactly,
    gathered_bytes,
    packed_bytes,
)
from rlinf_vla.features.planner.plan import SLACK
from rlinf_vla.rollout.collector import rollout_calls
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.fit import fitted
from rlinf_vla.runtime.machines import assign, broadcasts, describe, this_machine
from rlinf_vla.training.ranks import BUCKET

ALWAYS = "always"
ROLLOUT = "rollout"
REFERENCE = "reference"
UPDATE = "update"
STEP = "optimiser step"
PUBLISH = "publishing weights"
LOADING, LOADED = "loading", "once loaded"
SIMULATORS, NCCL, MAIN = "simulators", "NCCL", "main memory"
STAYING = (SIMULATORS, NCCL)
"""Roles that do not leave the device while another works (``cluster.offload``)."""
COMMUNICATOR = 1.6e9
"""Bytes that NCCL takes on a GPU for each group of processes: github.com/NVIDIA/nccl/issues/864."""
PROCESS = 1.0e9
"""Assumed main memory of a simulator process. LIBERO's take 0.9 GB, ManiSkill's less."""


@dataclass(frozen=True)
class Setting:
    """The recipe keys that memory depends on and that change no result but for rounding."""

    micro_batch_size: int
    batch_size: int
    gradient_checkpointing: bool
    offload: bool = False
    whole: bool = False
    """The trainer computes whole batches, without micro-batches."""

    def overrides(self) -> str:
        keys = (
            f"cluster.micro_batch_size={self.micro_batch_size} " * (not self.whole)
            + f"rollout.batch_size={self.batch_size}"
        )
        keys += f" cluster.gradient_checkpointing={str(self.gradient_checkpointing).lower()}"
        return keys + " cluster.offload=true" * self.offload


@dataclass(frozen=True)
class Part:
    """Memory of one component, and when it is held. ``without``: recipe key that avoids it."""

    role: str
    name: str
    phase: str
    size: float
    without: str | None = None


@dataclass(frozen=True)
class Budget:
    """Memory of the busiest device. ``turns``: its roles free their memory for each other."""

    device: str
    memory: float
    parts: tuple[Part, ...]
    turns: bool
    host: tuple[Part, ...] = ()

    def role_peak(self, role: str) -> float:
        return peak_of([part for part in self.parts if part.role == role])

    @property
    def peak(self) -> float:
        roles = dict.fromkeys(part.role for part in self.parts)
        staying = sum(self.role_peak(role) for role in roles if role in STAYING)
        others = [self.role_peak(role) for role in roles if role not in STAYING]
        return staying + (max(others) if self.turns else sum(others))

    @property
    def fits(self) -> bool:
        return self.peak <= SLACK * self.memory

    @property
    def host_peak(self) -> float:
        """Bytes of main memory that a GPU machine with a trainer rank needs."""
        return peak_of(self.host)

    def check_host(self, memory: float) -> None:
        """Raise UserError unless ``memory`` bytes of main memory have room beside a GPU's."""
        needed = self.host_peak
        avoidable = [part for part in self.host if part.without]
        if needed > SLACK * memory:
            largest = max(avoidable, key=lambda part: part.size, default=None)
            fix = "use fewer episodes or environments"
            if largest is not None:
                fix = f"set {largest.without}, which saves {largest.size / 1e9:.1f} GB"
            raise UserError(f"main memory: {needed / 1e9:.1f} GB needed, {room_in(memory)}: {fix}")

    def table(self) -> Table:
        table = Table(title="memory per device", title_justify="left")
        for name in ("role", "component", "held"):
            table.add_column(name)
        table.add_column("GB", justify="right")
        for part in self.parts:
            table.add_row(part.role, part.name, part.phase, f"{part.size / 1e9:.3f}")
        table.add_section()
        share = f"{100 * self.peak / self.memory:.0f} % of {self.memory / 1e9:.1f} GB"
        table.add_row(
            "",
            f"peak: {share} ({100 * SLACK:.0f} % may be filled)",
            self.device,
            f"{self.peak / 1e9:.3f}",
        )
        for part in self.host:
            table.add_row(part.role, part.name, part.phase, f"{part.size / 1e9:.3f}")
        if self.host:
            table.add_row("", "peak", "main memory", f"{self.host_peak / 1e9:.3f}")
        return table

    def show(self) -> None:
        Console(width=120).print(self.table())


def peak_of(parts: Sequence[Part]) -> float:
    """Return what is always held, and the largest of the phases, which follow one another: that of
    loading, or one of those with what is held once all is loaded."""
    phases: dict[str, float] = {}
    for part in parts:
        phases[part.phase] = phases.get(part.phase, 0.0) + part.size
    always, loading, loaded = (phases.pop(name, 0.0) for name in (ALWAYS, LOADING, LOADED))
    return always + max(loading, loaded + max(phases.values(), default=0.0))


def room_in(memory: float) -> str:
    return f"{SLACK * memory / 1e9:.1f} GB of {memory / 1e9:.1f} GB may be filled"


def setting_of(recipe: Recipe) -> Setting:
    cluster = recipe.cluster
    whole = recipe.algorithm.family == OFF_POLICY
    return Setting(
        cluster.rows,
        recipe.rollout.batch_size,
        cluster.gradient_checkpointing,
        cluster.offload,
        whole,
    )


def budget(model: MemoryModel, setting: Setting, memory: float, exact: bool = True) -> Budget:
    """Return the memory of a device on which a trainer rank runs, and what it shares it with.

    ``exact``: count calls and micro-batches at their size, not on the line through two small ones.
    A micro-batch of 0 rows is left out.
    """
    cluster = model.recipe.cluster
    if cluster.runtime == IN_PROCESS:
        parts = [
            *_trainer(model, setting, "process", exact),
            *_acting(model, setting, "process", exact),
        ]
    else:
        parts = _trainer(model, setting, "trainer", exact)
        if share_a_device(model.recipe):
            weights = model.weights()
            parts += [
                Part("rollout worker", "weights", ALWAYS, weights.all),
                *_acting(model, setting, "rollout worker", exact),
            ]
    if cluster.device == CUDA:
        parts += _communication(model, setting)
        if cluster.runtime == IN_PROCESS or share_a_device(model.recipe):
            parts += _simulators(model)
    host = tuple(part for part in _host(model, setting) if part.size)
    if not cluster.on_accelerator:  # the rollout is in the same memory
        parts = [*parts, *host]
        host = ()
    held = tuple(part for part in parts if part.size)
    return Budget(cluster.device, memory, held, setting.offload, host)


def share_a_device(recipe: Recipe) -> bool:
    """Return whether a trainer rank and a rollout worker share a device."""
    cluster = recipe.cluster
    rollouts, trainers = assign(
        cluster.placement, cluster.rollout_workers, cluster.trainer_ranks, describe(cluster)
    )
    return not set(rollouts).isdisjoint(trainers)


def _trainer(model: MemoryModel, setting: Setting, role: str, exact: bool) -> list[Part]:
    cluster = model.recipe.cluster
    policy = model.policy
    sharded = cluster.trainer_sharding != "none"
    weights = model.weights(cluster.trainer_ranks if sharded else 1)
    always = {
        "frozen weights": weights.frozen,
        "adapters": weights.adapters,
        "weights trained in full": weights.full,
        "critic": weights.critic,
        "gradients": weights.gradients,
        "Adam's moments": weights.moments,
        "float32 copies of trained weights": weights.master,
        "reference copy of trained weights": weights.trained * model.algorithm.keeps_reference,
        "copy of trained weights at the start of an iteration": weights.trained
        * model.algorithm.keeps_proximal,
        "moving averages": _average_bytes(model, weights),
        "teacher": 0 if model.replay is None else model.replay.teacher_bytes,
    }
    rows = most_rows_of(model)
    if model.replay is None or not setting.micro_batch_size:
        rows = min(setting.micro_batch_size, rows)
    parts = [Part(role, name, ALWAYS, size) for name, size in always.items()]
    parts += [
        replace(part, size=min(part.size, BUCKET))
        for part in _broadcast(model, setting, role, "bucket of weights to broadcast")
    ]
    count = exactly if exact else estimate
    what = "micro-batch" if model.replay is None else "batch"
    update = {
        f"{what}, activations": count(model.update, rows, setting.gradient_checkpointing)
        if rows
        else 0.0
    }
    if sharded:
        update |= {
            "blocks gathered from all ranks": gathered_bytes(policy),
            "gradients packed to be summed": packed_bytes(policy),
        }
    parts += [Part(role, name, UPDATE, size) for name, size in update.items()]
    if cluster.trainer_ranks > 1 and not sharded:
        parts.append(
            Part(role, "gradients packed to be summed", STEP, min(weights.gradients, BUCKET))
        )
    if model.algorithm.ema_decay is not None:
        if cluster.runtime == IN_PROCESS:
            parts.append(Part(role, "present weights, set aside", ROLLOUT, weights.trained))
        rounded = weights.trained * bool(weights.master)
        parts.append(Part(role, "rounded moving averages", PUBLISH, rounded))
    if model.algorithm.keeps_reference and not cluster.reference_workers:
        parts.append(Part(role, "present weights, set aside", REFERENCE, weights.trained))
        parts.append(
            Part(
                role,
                "log-probabilities",
                REFERENCE,
                count(model.reference_bytes, rows) if rows else 0.0,
            )
        )
    return parts


def _average_bytes(model: MemoryModel, weights: Weights) -> int:
    """Return the bytes of moving averages: of critics, or in float32 of all trained weights."""
    if model.replay is not None:
        return model.replay.average_bytes
    return weights.gradients if model.algorithm.ema_decay is not None else 0


def _acting(model: MemoryModel, setting: Setting, role: str, exact: bool) -> list[Part]:
    recipe = model.recipe
    weights = model.weights()
    rows = min(setting.batch_size, recipe.env.num_envs)
    graphs = recipe.cluster.device == CUDA and recipe.cluster.cuda_graphs
    count = exactly if exact else estimate
    call = count(model.rollout, rows)
    parts = [
        Part(
            role,
            "weights before merging",
            ROLLOUT,
            weights.merged * (not recipe.cluster.on_accelerator),
        ),
        Part(
            role,
            "exact copy of rounded weights",
            ROLLOUT,
            weights.trained * recipe.rollout.rounded_weights,
        ),
        # a recorded call keeps its memory: one of act and, for a critic, one of value
        Part(
            role,
            "recorded policy calls",
            ALWAYS,
            call + (count(model.value_bytes, rows) if model.on_policy else 0.0) if graphs else 0.0,
        ),
        Part(role, "policy call", ROLLOUT, call * (not graphs)),
        *_broadcast(model, setting, role, "broadcast weights that arrive"),
    ]
    return parts


def _broadcast(model: MemoryModel, setting: Setting, role: str, name: str) -> list[Part]:
    """Return the second copy of trained weights that a broadcast takes; only with staleness is it
    there during updates and rollouts."""
    cluster = model.recipe.cluster
    staleness = getattr(model.recipe.algorithm, "staleness", 0)
    if cluster.runtime == IN_PROCESS or not broadcasts(replace(cluster, offload=setting.offload)):
        return []
    return [
        Part(
            role,
            name,
            ALWAYS if staleness else PUBLISH,
            model.weights().trained * max(1, staleness),
        )
    ]


def _communication(model: MemoryModel, setting: Setting) -> list[Part]:
    """Return the buffers of NCCL: of the trainer ranks' group, and of that which gets weights."""
    cluster = model.recipe.cluster
    groups = (cluster.trainer_ranks > 1) + bool(_broadcast(model, setting, "", ""))
    return [Part(NCCL, "buffers", ALWAYS, groups * COMMUNICATOR)]


def _simulators(model: MemoryModel) -> Iterator[Part]:
    """Yield what the simulators of a rollout worker take on its GPU, as estimated."""
    recipe = model.recipe
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    if not _simulates(recipe) or not isinstance(plugin, TakesGPU):
        return
    env = fitted(recipe.env, model.policy.spec)
    environments = -(-env.num_envs // _workers(recipe))
    processes = simulator_processes(recipe)
    least = min(processes, recipe.rollout.pipeline_depth)
    needed = plugin.gpu_bytes(env, environments, least)
    more = plugin.gpu_bytes(env, environments, processes) - needed
    yield Part(SIMULATORS, "estimated", ALWAYS, needed)
    yield Part(SIMULATORS, "more processes that draw", ALWAYS, more, _fewest_processes(recipe))


def _simulates(recipe: Recipe) -> bool:
    return recipe.robot is None and builders.needs_environments(recipe)


def _workers(recipe: Recipe) -> int:
    return 1 if recipe.cluster.runtime == IN_PROCESS else recipe.cluster.rollout_workers


def _fewest_processes(recipe: Recipe) -> str:
    return f"env.processes={_workers(recipe) * recipe.rollout.pipeline_depth}"


def fewer_processes(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with fewer simulator processes, if their number is left open: ever half."""
    if not _simulates(recipe) or getattr(recipe.env, "processes", 0) is not None:
        return
    groups = _workers(recipe) * recipe.rollout.pipeline_depth
    processes = _workers(recipe) * simulator_processes(recipe)
    while processes > groups:
        processes = max(1, processes // 2 // groups) * groups
        yield replace(recipe, env=replace(recipe.env, processes=processes))


def simulator_processes(recipe: Recipe) -> int:
    """Return the most simulator processes of a rollout worker: on a GPU, one per group."""
    cluster = recipe.cluster
    env = recipe.env
    plugin = plugins.choose("env", env.name, plugins.envs())
    if isinstance(plugin, HasBackends) and plugin.backend(env, here=False) == "gpu":
        return recipe.rollout.pipeline_depth
    workers = _workers(recipe)
    given = getattr(env, "processes", None)
    node = cluster.nodes[0] if cluster.nodes else this_machine()
    of_a_worker = (given or node.cpus * node.count) // workers
    return min(-(-env.num_envs // workers), max(recipe.rollout.pipeline_depth, of_a_worker))


def _on_a_machine(recipe: Recipe) -> tuple[int, int]:
    """Return how many rollout workers and trainer ranks are on the first trainer's machine."""
    cluster = recipe.cluster
    if cluster.runtime == IN_PROCESS:
        return 1, 0
    rollouts, trainers = assign(
        cluster.placement, cluster.rollout_workers, cluster.trainer_ranks, describe(cluster)
    )
    machine = trainers[0].machine
    return sum(slot.machine == machine for slot in rollouts), sum(
        slot.machine == machine for slot in trainers
    )


def _host(model: MemoryModel, setting: Setting) -> Iterator[Part]:
    """Yield the main memory of all workers of the first trainer's machine: of weights, of
    simulators, and of the rollout if its size is known before the simulator starts."""
    recipe = model.recipe
    cluster = recipe.cluster
    config = recipe.algorithm
    weights = model.weights()
    on_ray = cluster.runtime != IN_PROCESS
    rollouts, ranks = _on_a_machine(recipe)
    if cluster.on_accelerator:
        processes = rollouts + ranks
        what = f"weights while they load, {processes} times"
        yield Part(MAIN, what, LOADING, processes * weights.all)
        merged = "weights before merging, of each rollout worker"
        yield Part(MAIN, merged, LOADED, rollouts * weights.merged, "model.lora.merge=false")
        published = 2 * weights.trained * on_ray
        yield Part(MAIN, "trained weights of two versions", LOADED, published)
        if setting.offload:
            pieces = ranks if cluster.trainer_sharding != "none" else 1
            rank = model.weights(pieces)
            held = rank.all + rank.gradients + rank.moments + rank.master
            yield Part(MAIN, "trainer ranks, off the GPU", ROLLOUT, ranks * held)
            yield Part(MAIN, "rollout workers, off the GPU", UPDATE, rollouts * weights.all)
        if _simulates(recipe):
            count = rollouts * simulator_processes(recipe)
            least = min(count, rollouts * recipe.rollout.pipeline_depth)
            more = (count - least) * PROCESS
            fewer = _fewest_processes(recipe)
            yield Part(MAIN, f"{least} simulator processes", ALWAYS, least * PROCESS)
            yield Part(MAIN, f"{count - least} more of them", ALWAYS, more, fewer)
    limit = recipe.env.episode_limit
    if not model.on_policy or not limit:
        return
    if hasattr(config, "horizon"):
        rows = recipe.env.num_envs * rollout_calls(config.horizon, limit, _steps(model))
    else:
        rows = config.episodes * -(-limit // _steps(model))
    call, prefix = model.host_bytes_per_call()
    copies = 1 + ranks  # in the object store, and in each rank
    what = f"{rows} policy calls of a rollout" + f", {copies} times" * on_ray
    yield Part(MAIN, what, LOADED, copies * rows * call)
    share = min(1.0, max(1, ranks) / _sharing(cluster))
    yield Part(MAIN, "their prefixes", LOADED, share * rows * prefix, "cluster.reuse_frozen=false")


def _sharing(cluster: ClusterConfig) -> int:
    """Return how many ranks divide rows evenly; 1 if they do not: one may get nearly all."""
    return 1 if cluster.trainer_split == MEASURED else cluster.trainer_ranks


def _steps(model: MemoryModel) -> int:
    """Return the control steps of a policy call."""
    deadline, chunk = model.recipe.rollout.deadline, model.policy.spec.chunk
    return deadline.execution_horizon or max(1, chunk - max(deadline.delays, default=0))


def device_memory(recipe: Recipe) -> float:
    """Return the bytes of a device: ``cluster.nodes``, this machine's GPU, or its main memory.

    Raises UserError if a GPU is wanted and there is none.
    """
    if not recipe.cluster.nodes and recipe.cluster.on_accelerator:
        properties = accelerator(recipe.cluster.device).get_device_properties(0)
        return float(properties.total_memory)
    return min(node.memory for node in describe(recipe.cluster).nodes)


def main_memory(recipe: Recipe) -> float:
    """Return the bytes of main memory of the smallest of ``cluster.nodes``, or of this machine."""
    return 1e9 * min(node.memory_gb for node in recipe.cluster.nodes or [this_machine()])


def most_rows_of(model: MemoryModel) -> int:
    """Return the most rows of a minibatch that a trainer rank computes.

    Of an off-policy batch, whose rows are drawn at random: the mean of a rank and six standard
    deviations. Of whole groups of episodes whose length only the simulator knows: any number.
    """
    recipe = model.recipe
    config = model.recipe.algorithm
    limit = model.recipe.env.episode_limit
    groups = getattr(config, "groups_per_step", None)
    minibatch = getattr(config, "minibatch_size", None) or config.batch_size
    if groups is not None and limit is None:
        return recipe.cluster.rows
    if groups is not None:
        minibatch = min(groups * config.group_size, config.episodes) * -(-limit // _steps(model))
    share = minibatch / _sharing(recipe.cluster)
    drawn = config.family == OFF_POLICY
    return min(minibatch, math.ceil(share + 6 * math.sqrt(share) * drawn))

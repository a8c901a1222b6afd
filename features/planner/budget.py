"""Memory of each device under a recipe.

A role's peak is what it always holds and the largest of its phases, which follow one another. The
roles of a device add up, unless they take turns (``cluster.offload``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from rlinf_vla.config.cluster import CUDA, IN_PROCESS
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import OFF_POLICY, Recipe
from rlinf_vla.features.planner.memory import (
    MemoryModel,
    estimate,
    exactly,
    gathered_bytes,
    packed_bytes,
)
from rlinf_vla.features.planner.plan import SLACK
from rlinf_vla.rollout.collector import rollout_calls
from rlinf_vla.runtime.machines import assign, broadcasts, describe, this_machine
from rlinf_vla.training.ranks import BUCKET

ALWAYS = "always"
ROLLOUT = "rollout"
REFERENCE = "reference"
UPDATE = "update"
STEP = "optimiser step"
PUBLISH = "publishing weights"


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
        phases: dict[str, float] = {}
        for part in self.parts:
            if part.role == role:
                phases[part.phase] = phases.get(part.phase, 0.0) + part.size
        return phases.pop(ALWAYS, 0.0) + max(phases.values(), default=0.0)

    @property
    def peak(self) -> float:
        peaks = [self.role_peak(role) for role in dict.fromkeys(part.role for part in self.parts)]
        return max(peaks) if self.turns else sum(peaks)

    @property
    def fits(self) -> bool:
        return self.peak <= SLACK * self.memory

    def check_host(self, memory: float) -> None:
        """Raise UserError unless ``memory`` bytes of main memory have room beside a GPU's."""
        needed = sum(part.size for part in self.host)
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
        return table

    def show(self) -> None:
        Console(width=120).print(self.table())


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
    host = tuple(_host(model))
    if cluster.device != CUDA:  # the rollout is in the same memory
        parts = [*parts, *host]
        host = ()
    return Budget(cluster.device, memory, tuple(parts), setting.offload, host)


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
        "moving averages": 0 if model.replay is None else model.replay.average_bytes,
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
    return [part for part in parts if part.size]


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
            weights.merged * (recipe.cluster.device != CUDA),
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
    return [part for part in parts if part.size]


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


def _host(model: MemoryModel) -> Iterator[Part]:
    """Yield the main memory of adapted weights, and of the rollout if its size is known before the
    simulator starts."""
    recipe = model.recipe
    config = model.recipe.algorithm
    limit = recipe.env.episode_limit
    steps = _steps(model)
    merged = model.weights().merged * (recipe.cluster.device == CUDA)
    if merged:
        yield Part(
            "main memory", "weights before merging", ROLLOUT, merged, "model.lora.merge=false"
        )
    if not model.on_policy or not limit:
        return
    if hasattr(config, "horizon"):
        rows = recipe.env.num_envs * rollout_calls(config.horizon, limit, steps)
    else:
        rows = config.episodes * -(-limit // steps)
    call, prefix = model.host_bytes_per_call()
    yield Part("main memory", f"{rows} policy calls of a rollout", ALWAYS, rows * call)
    if prefix:
        yield Part(
            "main memory", "their prefixes", ALWAYS, rows * prefix, "cluster.reuse_frozen=false"
        )


def _steps(model: MemoryModel) -> int:
    """Return the control steps of a policy call."""
    deadline, chunk = model.recipe.rollout.deadline, model.policy.spec.chunk
    return deadline.execution_horizon or max(1, chunk - max(deadline.delays, default=0))


def device_memory(recipe: Recipe) -> float:
    """Return the bytes of a device: ``cluster.nodes``, this machine's GPU, or its main memory.

    Raises UserError if a GPU is wanted and there is none.
    """
    if not recipe.cluster.nodes and recipe.cluster.device == CUDA and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return min(node.memory for node in describe(recipe.cluster).nodes)


def main_memory(recipe: Recipe) -> float:
    """Return the bytes of main memory of the smallest of ``cluster.nodes``, or of this machine."""
    return 1e9 * min(node.memory_gb for node in recipe.cluster.nodes or [this_machine(gpu=False)])


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
    share = minibatch / recipe.cluster.trainer_ranks
    drawn = config.family == OFF_POLICY
    return min(minibatch, math.ceil(share + 6 * math.sqrt(share) * drawn))

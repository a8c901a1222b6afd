"""Execution plan of a macro flow, its placement on machines, and the memory that it needs there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlinf_vla.config.cluster import COLLOCATED, GIVEN, IN_PROCESS, NodeConfig, streams
from rlinf_vla.config.errors import UserError
from rlinf_vla.features.planner.graph import Graph
from rlinf_vla.features.planner.profile import Bytes, Profile
from rlinf_vla.features.planner.workload import Workload
from rlinf_vla.runtime.machines import Cluster, assign

SLACK = 0.9
"""Share of a device's memory that a plan may fill by this estimate; allocators waste some."""
IN_CLUSTER = (
    *(
        "runtime",
        "placement",
        "rollout_workers",
        "reward_workers",
        "reference_workers",
        "trainer_ranks",
    ),
    *("streaming", "micro_batch_size", "offload"),
)
"""Fields of a plan that are keys of recipe node ``cluster``."""
IN_ROLLOUT = ("pipeline_depth", "split")
"""Fields of a plan that are keys of recipe node ``rollout``."""


@dataclass(frozen=True)
class Plan:
    """How a run executes its macro flow; it never changes the result.

    The recipe's keys are checked before a plan is made.
    """

    runtime: str = IN_PROCESS
    placement: str = COLLOCATED
    rollout_workers: int = 1
    reward_workers: int = 0
    """0: the rollout workers compute the recipe's reward."""
    reference_workers: int = 0
    """0: the trainer computes the reference policy's log-probabilities."""
    trainer_ranks: int = 1
    pipeline_depth: int = 1
    """Environment groups per rollout worker, which take turns."""
    micro_batch_size: int = 320
    """Largest number of policy calls in one forward and backward pass of a trainer rank."""
    streaming: bool = True
    """Pass each shard on when it is finished; false: every operation waits for all shards."""
    split: str = "none"
    """head: the backbone runs next to the trainer, the action head in the rollout worker."""
    offload: bool = False
    """Move idle weights out of the memory of a device that roles share."""

    @property
    def streams(self) -> bool:
        """Whether an operation may begin before the one before it has ended."""
        return self.runtime != IN_PROCESS and streams(self.streaming, self.offload)

    def keys(self) -> dict[str, Any]:
        """Return the recipe keys that make a run follow this plan."""
        keys = {f"cluster.{key}": getattr(self, key) for key in IN_CLUSTER}
        return (
            {"cluster.plan": GIVEN}
            | keys
            | {f"rollout.{key}": getattr(self, key) for key in IN_ROLLOUT}
        )

    def overrides(self) -> list[str]:
        """Return ``keys`` as overrides (``key=value``)."""
        return [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in self.keys().items()]

    def __str__(self) -> str:
        groups = (
            f"{self.pipeline_depth} environment group{'s' * (self.pipeline_depth > 1)}"
            + " taking turns" * (self.pipeline_depth > 1)
        )
        if self.runtime == IN_PROCESS:
            return f"in process, {groups}, micro-batches of {self.micro_batch_size}"
        parts = [
            f"Ray, {self.placement}",
            f"{_count(self.rollout_workers, 'rollout worker')} of {groups}",
        ]
        parts += [
            _count(n, f"{kind} worker")
            for kind, n in (("reward", self.reward_workers), ("reference", self.reference_workers))
            if n
        ]
        parts += [
            _count(self.trainer_ranks, "trainer rank"),
            f"micro-batches of {self.micro_batch_size}",
        ]
        parts += ["streaming" if self.streams else "without streaming"]
        parts += ["backbone with the trainer"] * (self.split == "head") + [
            "idle weights off-loaded"
        ] * self.offload
        return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


@dataclass(frozen=True)
class Problem:
    """What a plan is sought for. ``profiles``: by device type of the cluster's machines."""

    graph: Graph
    workload: Workload
    cluster: Cluster
    profiles: Mapping[str, Profile]
    micro_batch_size: int
    """The largest to try."""
    refuse: Callable[[Plan], None] = lambda plan: None
    """Raises UserError if a plan needs more memory, counted in more detail than in a profile."""

    @property
    def assumed(self) -> bool:
        """Whether a profile is predicted from published numbers."""
        return any(profile.assumed for profile in self.profiles.values())

    @property
    def kind(self) -> str:
        """What to call its predictions."""
        return "PREDICTED from published numbers" if self.assumed else "predicted"


@dataclass(frozen=True)
class Machine:
    """``copies`` machines with the same use.

    ``rollout``, ``trainers``: device of each worker, a GPU index, or 0 for the cores without GPUs.
    ``numbers``: of each of its workers, its number among all of the plan on each of the machines.
    """

    node: NodeConfig
    copies: int
    rollout: tuple[int, ...]
    trainers: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]


def device_hours(plan: Plan, cluster: Cluster, hours: float) -> dict[str, float]:
    """Return GPU hours (without GPUs: core hours) by role, for ``hours`` of a run under ``plan``.

    A GPU that both roles use counts as ``rollout and trainer``; one that nobody uses, as ``idle``:
    the machine is there for the run.
    """
    if not cluster.gpus:
        cores = sum(node.count * node.cpus for node in cluster.nodes)
        return {"all roles": cores * hours}
    rollout, trainers = map(
        set, assign(plan.placement, plan.rollout_workers, plan.trainer_ranks, cluster)
    )
    numbers = {
        "rollout and trainer": len(rollout & trainers),
        "rollout": len(rollout - trainers),
        "trainer": len(trainers - rollout),
        "idle": cluster.gpus - len(rollout | trainers),
    }
    return {role: number * hours for role, number in numbers.items() if number}


def place(plan: Plan, cluster: Cluster) -> tuple[Machine, ...]:
    """Return the machines in use, the trainers' first. Raises UserError as ``assign`` does."""
    roles = assign(plan.placement, plan.rollout_workers, plan.trainer_ranks, cluster)
    machines: list[Machine] = []
    for index, node in enumerate(cluster.each):
        rollout, trainers = (
            tuple(slot.device for slot in role if slot.machine == index) for role in roles
        )
        if not rollout and not trainers:
            continue
        numbers: tuple[tuple[int, ...], ...] = tuple(
            (number,) for number, slot in enumerate(roles[0]) if slot.machine == index
        )
        if machines and (machines[-1].node, machines[-1].rollout, machines[-1].trainers) == (
            node,
            rollout,
            trainers,
        ):
            numbers = tuple(
                (*others, *this) for others, this in zip(machines[-1].numbers, numbers, strict=True)
            )
            machines[-1] = replace(machines[-1], copies=machines[-1].copies + 1, numbers=numbers)
        else:
            machines.append(Machine(node, 1, rollout, trainers, numbers))
    return tuple(machines)


def rollout_bytes(stored: Bytes, plan: Plan, workload: Workload) -> float:
    """Bytes of one rollout worker on its device: weights, trained weights again, one batch."""
    weights = stored.weights if plan.split == "none" else stored.head
    return weights + stored.trained + workload.batch_size * (stored.inputs + stored.features)


def trainer_bytes(stored: Bytes, plan: Plan, workload: Workload) -> float:
    """Bytes of one trainer rank: weights, gradients, Adam's moments, masters, activations.

    Without reference workers, the reference policy's copy of the trained weights is added. If
    sharded, ranks share all but the activations; the block at work is not counted.
    """
    ranks = 1 if workload.measured else plan.trainer_ranks  # one may get nearly all rows
    rows = min(plan.micro_batch_size, -(-workload.most_rows // ranks))
    reference = stored.trained if workload.reference and not plan.reference_workers else 0.0
    held = stored.weights + stored.gradients + stored.moments + reference
    return held / (plan.trainer_ranks if workload.sharded else 1) + rows * (
        stored.activations + stored.call
    )


def check_memory(problem: Problem, plan: Plan) -> None:
    """Raise UserError, with the figures, for the first device whose memory does not suffice."""
    workload = problem.workload
    if workload.sharded and plan.runtime == IN_PROCESS:
        raise UserError(
            "cluster.trainer_sharding=full needs trainer ranks: it is not possible in one process"
        )
    for machine in place(plan, problem.cluster):
        node = machine.node
        profile = problem.profiles[machine.node.device]
        rollout = rollout_bytes(profile.bytes, plan, workload)
        trainer = trainer_bytes(profile.bytes, plan, workload)
        if plan.runtime == IN_PROCESS:
            rollout = 0.0  # rollouts use the trainer's weights
        reference = profile.bytes.weights if plan.reference_workers and machine.trainers else 0.0
        for device in range(node.devices):
            here = [
                machine.rollout.count(device) * rollout,
                machine.trainers.count(device) * (trainer + reference),
            ]
            needed = max(here) if plan.offload and node.gpus else sum(here)
            if not node.gpus:
                needed += len(machine.rollout) * (
                    processes(plan, workload, machine) * plan.pipeline_depth * profile.bytes.process
                )
                needed += workload.rows * profile.bytes.call * bool(machine.trainers)
            if needed > SLACK * node.memory:
                what = f"a GPU of {node.name}" if node.gpus else node.name
                raise UserError(
                    f"{needed / 1e9:.1f} GB wanted in {what}, which has {node.memory / 1e9:.1f} GB ({100 * SLACK:.0f} % may be filled)"
                )
    problem.refuse(plan)


def processes(plan: Plan, workload: Workload, machine: Machine) -> int:
    """Number of simulator processes per environment group of a rollout worker on ``machine``."""
    size = workload.envs // (plan.rollout_workers * plan.pipeline_depth)
    if workload.processes is None:
        of_a_worker = machine.node.cpus // len(machine.rollout)
    else:
        of_a_worker = workload.processes // plan.rollout_workers
    return min(size, max(1, of_a_worker // plan.pipeline_depth))

"""Machines of a cluster, the placement of a plan's workers on them, and the memory they need.

The recipe's ``cluster.nodes`` describes the machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlinf_vla.config.cluster import IN_PROCESS, ClusterConfig, NodeConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.planner.graph import Graph
from rlinf_vla.planner.plan import COLLOCATED, DISAGGREGATED, Plan
from rlinf_vla.planner.profile import Bytes, Profile
from rlinf_vla.planner.workload import Workload

SLACK = 0.9
"""Share of a device's memory that a plan may fill by this estimate; allocators waste some."""


@dataclass(frozen=True)
class Cluster:
    """A named set of machines."""

    name: str
    nodes: tuple[NodeConfig, ...]

    @property
    def devices(self) -> int:
        return sum(node.count * node.devices for node in self.nodes)

    @property
    def machines(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def price_per_hour(self) -> float | None:
        """Total price of all machines per hour; None unless every price is known."""
        prices = [node.price_per_hour for node in self.nodes]
        return (
            None if None in prices else sum(node.count * price for node, price in zip(self.nodes, prices, strict=True) if price is not None)
        )

    def __str__(self) -> str:
        return ", ".join(_describe(node) for node in self.nodes)


def _describe(node: NodeConfig) -> str:
    gpus = f"{node.gpus} x {node.gpu or 'GPU'} of {node.gpu_memory_gb:g} GB, " if node.gpus else ""
    spot = ", spot" if node.spot else ""
    return f"{node.count} x {node.name} ({gpus}{node.cpus} cores, {node.memory_gb:g} GB, {node.network_gbps:g} Gbit/s{spot})"


def describe(config: ClusterConfig) -> Cluster:
    """Return the cluster of ``cluster.nodes``, or of this machine if the recipe lists none.

    If the policy runs on GPUs, nodes without any are left out. Raises UserError if two nodes share
    a name, all are spot, or no node has a required GPU.
    """
    name, gpu = config.name, config.device == "cuda"
    found = tuple(config.nodes) or (this_machine(gpu),)
    if len({node.name for node in found}) < len(found):
        raise UserError(f"cluster={name}: two of cluster.nodes have the same name")
    if gpu and not any(node.gpus for node in found):
        raise UserError(f"cluster={name} needs GPUs (cluster.device=cuda), but none of cluster.nodes has any: set their gpus")
    if all(node.spot for node in found):
        raise UserError(
            f"cluster={name}: every machine is spot, but the trainer needs an on-demand one: set spot: false for one of cluster.nodes"
        )
    # spot nodes come last, so that trainers get the first places
    kept = found if not gpu else tuple(node for node in found if node.gpus)
    return Cluster(name, tuple(sorted(kept, key=lambda node: node.spot)))


def this_machine(gpu: bool) -> NodeConfig:
    """Describe this machine. Raises UserError if ``gpu`` and PyTorch finds no CUDA device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    node = NodeConfig(cpus=cores, memory_gb=round(memory, 1))
    if not gpu:
        return node
    import torch

    if not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device that PyTorch sees: use cluster=laptop, or describe your machines in cluster.nodes")
    properties = torch.cuda.get_device_properties(0)
    return replace(
        node, gpus=torch.cuda.device_count(), gpu=gpu_type(properties.name), gpu_memory_gb=round(properties.total_memory / 1e9, 1)
    )


def gpu_type(name: str) -> str:
    """Turn the driver's GPU name into a spelling for file names: nvidia-h100-80gb-hbm3."""
    return "-".join(name.lower().split())


@dataclass(frozen=True)
class Problem:
    """What a plan is sought for. ``profiles``: by device type of the cluster's machines."""

    graph: Graph
    workload: Workload
    cluster: Cluster
    profiles: Mapping[str, Profile]
    micro_batch_size: int
    """The largest to try."""


@dataclass(frozen=True)
class Machine:
    """``copies`` machines with the same use.

    ``rollout``, ``trainers``: device of each worker, a GPU index, or 0 for the cores without GPUs.
    """

    node: NodeConfig
    copies: int
    rollout: tuple[int, ...]
    trainers: tuple[int, ...]


def place(plan: Plan, cluster: Cluster) -> tuple[Machine, ...]:
    """Return the machines in use, the trainers' first.

    Raises UserError if there are too few devices, or a trainer would be on a spot machine.
    """
    gpu = any(node.gpus for node in cluster.nodes)
    slots = [(machine, device) for machine, node in enumerate(_machines(cluster)) for device in range(node.devices)]
    ranks, workers = plan.trainer_ranks, plan.rollout_workers
    trainers = slots[:ranks] if gpu else [slots[rank % len(slots)] for rank in range(ranks)]
    if plan.placement == DISAGGREGATED:
        free = slots[ranks:] if gpu else [slot for slot in slots if slot not in trainers]
    else:
        free = slots
    needed = {COLLOCATED: max(ranks, workers), DISAGGREGATED: ranks + workers}.get(plan.placement, workers)
    if gpu and needed > len(slots):
        raise UserError(f"{needed} GPUs wanted, cluster={cluster.name} has {len(slots)}")
    if not free:
        raise UserError(f"disaggregated needs a machine for rollouts besides the trainer's, cluster={cluster.name} has {len(slots)}")
    rollout = [free[worker % len(free)] for worker in range(workers)]
    nodes = _machines(cluster)
    if any(nodes[machine].spot for machine, _ in trainers):
        raise UserError(f"a trainer would be on a spot machine of cluster={cluster.name}, which may be preempted")
    found: list[Machine] = []
    for index, node in enumerate(nodes):
        used = [tuple(device for machine, device in group if machine == index) for group in (rollout, trainers)]
        if not any(used):
            continue
        if found and (found[-1].node, found[-1].rollout, found[-1].trainers) == (node, *used):
            found[-1] = Machine(node, found[-1].copies + 1, *used)
        else:
            found.append(Machine(node, 1, *used))
    return tuple(found)


def _machines(cluster: Cluster) -> list[NodeConfig]:
    return [node for node in cluster.nodes for _ in range(node.count)]


def rollout_bytes(stored: Bytes, plan: Plan, workload: Workload) -> float:
    """Bytes of one rollout worker on its device: weights, trained weights again, one batch."""
    weights = stored.weights if plan.split == "none" else stored.head
    return weights + stored.trained + workload.batch_size * (stored.inputs + stored.features)


def trainer_bytes(stored: Bytes, plan: Plan, workload: Workload) -> float:
    """Bytes of one trainer rank: weights, gradients, Adam's two moments, activations.

    Without reference workers, the reference policy's copy of the trained weights is added.
    """
    rows = min(plan.micro_batch_size, -(-workload.minibatch_size // plan.trainer_ranks))
    copies = 3 + (workload.reference and not plan.reference_workers)
    return stored.weights + copies * stored.trained + rows * (stored.activations + stored.call)


def check_memory(problem: Problem, plan: Plan) -> None:
    """Raise UserError, with the figures, for the first device whose memory does not suffice."""
    workload = problem.workload
    for machine in place(plan, problem.cluster):
        node, profile = machine.node, problem.profiles[machine.node.device]
        rollout, trainer = rollout_bytes(profile.bytes, plan, workload), trainer_bytes(profile.bytes, plan, workload)
        if plan.runtime == IN_PROCESS:
            rollout = 0.0  # rollouts use the trainer's weights
        reference = profile.bytes.weights if plan.reference_workers and machine.trainers else 0.0
        for device in range(node.devices):
            here = [machine.rollout.count(device) * rollout, machine.trainers.count(device) * (trainer + reference)]
            wanted = max(here) if plan.offload and node.gpus else sum(here)
            if not node.gpus:
                wanted += len(machine.rollout) * (processes(plan, workload, node) * plan.pipeline_depth * profile.bytes.process)
                wanted += workload.rows * profile.bytes.call * bool(machine.trainers)
            if wanted > SLACK * node.memory:
                what = f"a GPU of {node.name}" if node.gpus else node.name
                raise UserError(
                    f"{wanted / 1e9:.1f} GB wanted in {what}, which has {node.memory / 1e9:.1f} GB ({100 * SLACK:.0f} % may be filled)"
                )


def processes(plan: Plan, workload: Workload, node: NodeConfig) -> int:
    """Number of simulator processes per environment group."""
    size = workload.envs // (plan.rollout_workers * plan.pipeline_depth)
    return min(size, max(1, (workload.processes or node.cpus) // plan.pipeline_depth))

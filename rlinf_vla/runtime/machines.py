"""Machines of a cluster, and which of their devices each worker of a plan takes.

The planner and the runtime both read this, so that the plan that is printed is the one that runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlinf_vla.config.cluster import (
    AUTO,
    BROADCAST,
    CPU,
    CUDA,
    DISAGGREGATED,
    FAKE_GPU,
    ClusterConfig,
    NodeConfig,
)
from rlinf_vla.config.errors import UserError

ROUNDING = 0.05
"""A machine of "80 GB" may have up to this share less."""


class Slot(NamedTuple):
    """A device of a cluster: a GPU of a machine, or all cores of one without GPUs."""

    machine: int
    """Index of the machine; ``Cluster.each`` lists them."""
    device: int


@dataclass(frozen=True)
class Cluster:
    """A named set of machines."""

    name: str
    nodes: tuple[NodeConfig, ...]

    @property
    def each(self) -> list[NodeConfig]:
        """One entry per machine."""
        return [node for node in self.nodes for _ in range(node.count)]

    @property
    def gpus(self) -> int:
        return sum(node.count * node.gpus for node in self.nodes)

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
            None
            if None in prices
            else sum(
                node.count * price
                for node, price in zip(self.nodes, prices, strict=True)
                if price is not None
            )
        )

    def __str__(self) -> str:
        return ", ".join(_describe(node) for node in self.nodes)


def _describe(node: NodeConfig) -> str:
    gpus = f"{node.gpus} x {node.gpu or 'GPU'} of {node.gpu_memory_gb:g} GB, " if node.gpus else ""
    spot = ", spot" if node.spot else ""
    return f"{node.count} x {node.name} ({gpus}{node.cpus} cores, {node.memory_gb:g} GB, {node.network_gbps:g} Gbit/s{spot})"


def broadcasts(config: ClusterConfig) -> bool:
    """Return whether trained weights are broadcast to rollout workers (``cluster.weights``).

    On the CPUs of one machine the object store's shared memory is two to four times faster.
    """
    return not config.offload and (
        config.weights == BROADCAST or (config.weights == AUTO and config.device == CUDA)
    )


def describe(config: ClusterConfig) -> Cluster:
    """Return the cluster of ``cluster.nodes``, or of this machine if the recipe lists none.

    If the policy runs on GPUs, nodes without any are left out. Raises UserError if two nodes share
    a name, all are spot, or no node has a required GPU.
    """
    name, gpu = config.name, config.on_gpus
    if config.device == FAKE_GPU and not config.nodes:
        raise UserError(
            "cluster.device=fake_gpu needs machines with GPUs to imitate: set cluster.nodes, or use cluster=8gpu"
        )
    nodes = tuple(config.nodes) or (this_machine(config.torch_device),)
    if len({node.name for node in nodes}) < len(nodes):
        raise UserError(f"cluster={name}: two of cluster.nodes have the same name")
    if gpu and not any(node.gpus for node in nodes):
        raise UserError(
            f"cluster={name} needs GPUs (cluster.device={config.device}), but none of cluster.nodes has any: set their gpus"
        )
    if all(node.spot for node in nodes):
        raise UserError(
            f"cluster={name}: every machine is spot, but the trainer needs an on-demand one: set spot: false for one of cluster.nodes"
        )
    # spot nodes come last, so that trainers get the first places
    usable_nodes = nodes if not gpu else tuple(node for node in nodes if node.gpus)
    return Cluster(name, tuple(sorted(usable_nodes, key=lambda node: node.spot)))


def assign(
    placement: str, workers: int, ranks: int, cluster: Cluster
) -> tuple[list[Slot], list[Slot]]:
    """Return the slots of the rollout workers and of the trainer ranks.

    A GPU has one worker of each role at most. Without GPUs, workers share the machines' cores.
    Raises UserError if there are too few devices, or a trainer would be on a spot machine.
    """
    gpu = cluster.gpus > 0
    nodes = cluster.each
    slots = [
        Slot(machine, device)
        for machine, node in enumerate(nodes)
        for device in range(node.devices)
    ]
    trainers = slots[:ranks] if gpu else [slots[rank % len(slots)] for rank in range(ranks)]
    if placement == DISAGGREGATED:
        free = slots[ranks:] if gpu else [slot for slot in slots if slot not in trainers]
    else:
        free = slots
    needed = ranks + workers if placement == DISAGGREGATED else max(ranks, workers)
    if gpu and needed > len(slots):
        raise UserError(
            f"{needed} GPUs wanted, cluster={cluster.name} has {len(slots)} (cluster.placement={placement}): "
            "lower cluster.rollout_workers or cluster.trainer_ranks"
        )
    if not free:
        raise UserError(
            f"disaggregated needs a machine for rollouts besides the trainer's, cluster={cluster.name} has {len(slots)}"
        )
    if any(nodes[slot.machine].spot for slot in trainers):
        raise UserError(
            f"a trainer would be on a spot machine of cluster={cluster.name}, which may be preempted"
        )
    return [free[worker % len(free)] for worker in range(workers)], trainers


def machines_of_ray(
    name: str, nodes: Sequence[Mapping[str, Any]], resource: str = "GPU"
) -> Cluster:
    """Return the machines with GPUs among the nodes of a Ray cluster (``ray.nodes()``).

    ``resource``: the name by which Ray counts them.

    Raises UserError if there is none.
    """
    alive = sorted(
        (node["NodeManagerAddress"], int(node["Resources"].get(resource, 0)))
        for node in nodes
        if node["Alive"]
    )
    gpu_nodes = tuple(NodeConfig(address, gpus=gpus) for address, gpus in alive if gpus)
    if not gpu_nodes:
        raise UserError(
            f"no node of the Ray cluster has a {resource}, as cluster.device needs: start Ray where PyTorch sees one"
        )
    return Cluster(name, gpu_nodes)


def this_machine(device: str = CPU) -> NodeConfig:
    """Describe this machine, with its accelerators of type ``device``. Raises UserError if PyTorch
    finds none."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    node = NodeConfig(cpus=cores, memory_gb=round(memory, 1))
    if device == CPU:
        return node
    from rlinf_vla.core.devices import accelerator

    module = accelerator(device)
    properties = module.get_device_properties(0)
    return replace(
        node,
        gpus=module.device_count(),
        gpu=gpu_type(properties.name),
        gpu_memory_gb=round(properties.total_memory / 1e9, 1),
    )


def compare_with_assumed(config: ClusterConfig) -> list[str]:
    """Return lines on what this machine has less of than its description in ``cluster.nodes``.

    The plan and the counted memory rest on the description. Raises UserError if a GPU has less
    memory than it says. Machines of another cluster (``cluster.address``) are not compared.
    """
    if not config.on_accelerator or config.address is not None or not config.nodes:
        return []
    assumed = config.nodes[0]
    actual = this_machine(config.device)
    if actual.gpu_memory_gb < (1 - ROUNDING) * assumed.gpu_memory_gb:
        raise UserError(
            f"cluster={config.name} assumes GPUs of {assumed.gpu_memory_gb:g} GB, this machine's have "
            f"{actual.gpu_memory_gb:g} GB ({actual.gpu}): describe it in a file of your own (docs/plan.md)"
        )
    lines = []
    if assumed.gpu != actual.gpu:
        lines.append(f"GPUs of type {assumed.gpu}, this machine's are {actual.gpu}")
    if actual.cpus < (1 - ROUNDING) * assumed.cpus:
        lines.append(f"{assumed.cpus} cores, this machine has {actual.cpus}")
    if actual.memory_gb < (1 - ROUNDING) * assumed.memory_gb:
        lines.append(
            f"{assumed.memory_gb:g} GB of main memory, this machine has {actual.memory_gb:g} GB"
        )
    return [f"cluster={config.name} assumes {line}: predictions are off" for line in lines]


def gpu_type(name: str) -> str:
    """Turn the driver's GPU name into a spelling for file names: nvidia-h100-80gb-hbm3."""
    return "-".join(name.lower().split())

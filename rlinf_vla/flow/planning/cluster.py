"""The machines that a plan may use, as a recipe's ``cluster.nodes`` describes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from rlinf_vla.ranges import Label, Name, NonNegative, Positive, Range, Size
from rlinf_vla.types import UserError

THIS = "this machine"


@dataclass
class NodeConfig:
    """One type of machine of a cluster, in recipe node ``cluster.nodes``."""

    name: Name = THIS
    count: Size = 1
    gpus: Annotated[int, Range(0, 1024)] = 0
    """Of each machine."""
    gpu: Label | None = None
    """Type of its GPUs."""
    gpu_memory_gb: Positive = 80.0
    """Of each GPU; a GB is 10⁹ bytes."""
    cpus: Size = 8
    """Cores of each machine."""
    memory_gb: Positive = 32.0
    network_gbps: Positive = 10.0
    """Gigabits per second between this machine and others."""
    gpu_link_gbps: Positive = 100.0
    """Gigabits per second between GPUs of one machine, and between a GPU and its host's memory."""
    latency_ms: NonNegative = 1.0
    """Of one message between machines or between workers of one."""
    spot: bool = False
    """May be taken away at any time: no trainer is put there."""
    price_per_hour: NonNegative | None = None
    """Of one machine; null: not known."""
    profile: Name | None = None
    """Device type of the measured profile that holds here; null: ``gpu``, or cpu where there is none."""

    @property
    def device(self) -> str:
        return self.profile or self.gpu or "cpu"

    @property
    def devices(self) -> int:
        """Places for a policy: GPUs, or the machine's cores as one."""
        return self.gpus or 1

    @property
    def memory(self) -> float:
        """Bytes of one such place."""
        return 1e9 * (self.gpu_memory_gb if self.gpus else self.memory_gb)


@dataclass(frozen=True)
class Cluster:
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
        """Of all machines; None: not all prices are known."""
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


def describe(name: str, nodes: Sequence[NodeConfig], gpu: bool) -> Cluster:
    """``gpu``: the policy is to run on GPUs. Without ``nodes``, this machine is the cluster. Raises UserError."""
    found = tuple(nodes) or (this_machine(gpu),)
    if len({node.name for node in found}) < len(found):
        raise UserError(f"cluster={name}: two of cluster.nodes have one name")
    if gpu and not any(node.gpus for node in found):
        raise UserError(f"cluster={name} wants GPUs (cluster.device=cuda) and none of cluster.nodes has any: set their gpus")
    if all(node.spot for node in found):
        raise UserError(
            f"cluster={name}: every machine is spot, and the trainer must stay: make one of cluster.nodes on-demand (spot: false)"
        )
    # what rollouts may lose comes last, so that trainers get the first places
    kept = found if not gpu else tuple(node for node in found if node.gpus)
    return Cluster(name, tuple(sorted(kept, key=lambda node: node.spot)))


def this_machine(gpu: bool) -> NodeConfig:
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
    """As the driver calls it, in a spelling for file names: nvidia-h100-80gb-hbm3."""
    return "-".join(name.lower().split())

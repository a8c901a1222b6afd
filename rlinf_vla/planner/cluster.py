"""Machines of a cluster, as the recipe's ``cluster.nodes`` describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from rlinf_vla.config.cluster import ClusterConfig, NodeConfig
from rlinf_vla.config.errors import UserError


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
        raise UserError(
            "this machine has no CUDA device that PyTorch sees (cluster.device=cuda): use cluster=laptop with cluster.device=cpu, "
            "cluster=1gpu where there is a GPU, or describe your machines in cluster.nodes"
        )
    properties = torch.cuda.get_device_properties(0)
    return replace(
        node, gpus=torch.cuda.device_count(), gpu=gpu_type(properties.name), gpu_memory_gb=round(properties.total_memory / 1e9, 1)
    )


def gpu_type(name: str) -> str:
    """Turn the driver's GPU name into a spelling for file names: nvidia-h100-80gb-hbm3."""
    return "-".join(name.lower().split())

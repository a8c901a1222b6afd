"""Profiles, clusters and workloads with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.config.cluster import NodeConfig
from rlinf_vla.features.planner.graph import Graph, trace
from rlinf_vla.features.planner.plan import Problem
from rlinf_vla.features.planner.profile import GPU, POLICY, Bytes, Cost, Profile
from rlinf_vla.features.planner.workload import Workload
from rlinf_vla.runtime.machines import Cluster

COSTS = {
    "act": Cost(0.1, 0.05),
    "value": Cost(0.05, 0.025),
    "encode": Cost(0.05, 0.02),
    "merge": Cost(0.5),
    "simulate": Cost(0.0, 0.2),
    "reset": Cost(0.0, 0.5),
    "update": Cost(0.25, 0.01, cores=2.0),
    "optimise": Cost(0.125),
    "publish": Cost(0.25),
    "reference": Cost(0.0, 0.01, cores=2.0),
}
BYTES = Bytes(weights=4e9, trained=1e9, activations=1e6, call=1e4, inputs=1e4, process=1e9)


def profile(device: str = "cpu", **changes: Any) -> Profile:
    return replace(
        Profile(device, 2, dict(COSTS), BYTES, chunk=2, episode_limit=8, note="made up"), **changes
    )


def on_gpu(device: str, factor: float = 1.0, **changes: Any) -> Profile:
    """A GPU that runs the policy ``factor`` times as fast as the CPU."""
    made = profile(device, **changes)
    policy = {
        name: replace(cost.times(1 / factor), on=GPU, cores=1.0)
        for name, cost in made.operations.items()
        if name in POLICY
    }
    return replace(made, operations=made.operations | policy)


def cluster(count: int = 1, **node: Any) -> Cluster:
    machine = NodeConfig(
        **{"name": "node", "cpus": 64, "memory_gb": 1000.0, "latency_ms": 0.0} | node
    )
    return Cluster("made_up", (replace(machine, count=count),))


def workload(**changes: Any) -> Workload:
    """PPO: 8 environments, two episodes of 4 policy calls each, one epoch of two minibatches."""
    plain = Workload(
        envs=8, batch_size=8, minibatch_size=32, epochs=1, episode_calls=4, chunk=2, calls=8
    )
    return replace(plain, **changes)


def ppo(**config: Any) -> Graph:
    return trace(PPO(PPOConfig(**config), 1.0))


def problem(
    load: Workload | None = None,
    machines: Cluster | None = None,
    profiles: dict[str, Profile] | None = None,
    graph: Graph | None = None,
    micro_batch_size: int = 320,
) -> Problem:
    return Problem(
        graph or ppo(),
        load or workload(),
        machines or cluster(),
        profiles or {"cpu": profile()},
        micro_batch_size,
    )

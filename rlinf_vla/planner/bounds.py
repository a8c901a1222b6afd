"""Lower bounds on a plan's iteration time, which let the planner skip simulations."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf_vla.config.cluster import IN_PROCESS
from rlinf_vla.planner.cluster import Cluster
from rlinf_vla.planner.graph import Graph
from rlinf_vla.planner.placement import Machine, place, processes
from rlinf_vla.planner.plan import Plan
from rlinf_vla.planner.profile import CPU, Cost, Profile
from rlinf_vla.planner.simulate import update_seconds
from rlinf_vla.planner.workload import Workload


def least_seconds(graph: Graph, plan: Plan, workload: Workload, cluster: Cluster, profiles: Mapping[str, Profile]) -> float:
    """Lower bound on the seconds of one iteration, whatever work overlaps.

    It leaves out rewards, resets, values, transfers and waiting for turns.
    """
    rollout = least_rollout_seconds(plan, workload, cluster, profiles)
    update = max(_update(plan, workload, machine, profiles[machine.node.device]) for machine in place(plan, cluster))
    overlaps = plan.runtime != IN_PROCESS and any(edge.source == "publish" and edge.lag > 1 for edge in graph.edges)
    streams = plan.runtime != IN_PROCESS and plan.streaming and graph.streams_into("update")
    return max(rollout, update) if overlaps or streams else rollout + update


def least_rollout_seconds(plan: Plan, workload: Workload, cluster: Cluster, profiles: Mapping[str, Profile]) -> float:
    """Lower bound on the seconds of one iteration's rollout, on the slowest machine."""
    return max(_rollout(plan, workload, machine, profiles[machine.node.device]) for machine in place(plan, cluster))


def _rollout(plan: Plan, workload: Workload, machine: Machine, profile: Profile) -> float:
    if not machine.rollout:
        return 0.0
    depth, size = plan.pipeline_depth, workload.envs // (plan.rollout_workers * plan.pipeline_depth)
    calls = workload.calls or workload.rows // workload.envs
    count = 1 if profile.cost("simulate").on != CPU else processes(plan, workload, machine.node)
    act, simulate = profile.cost("act"), profile.cost("simulate")
    step = _alone(profile, simulate, simulate.of(-(-size // count)))
    acting = 0.0 if plan.split == "head" else _alone(profile, act, act.of(size))
    taking_turns = max(depth * acting, acting + step) if not profile.inline else depth * (acting + step)
    work = simulate.of(size / count) * count * (simulate.on == CPU) + act.of(size) * (act.on == CPU and plan.split == "none")
    cores = len(machine.rollout) * depth * work / profile.crowded(max(act.cores, simulate.cores), profile.cores) / machine.node.cpus
    return calls * max(taking_turns, cores)


def _update(plan: Plan, workload: Workload, machine: Machine, profile: Profile) -> float:
    if not machine.trainers:
        return 0.0
    cost = profile.cost("update")
    work = update_seconds(profile, plan, workload, workload.rows, workload.groups_per_step is not None)
    alone = _alone(profile, cost, work)
    if cost.on != CPU:
        return alone * max(machine.trainers.count(device) for device in machine.trainers)
    return max(alone, alone * cost.cores * len(machine.trainers) / machine.node.cpus)


def _alone(profile: Profile, cost: Cost, work: float) -> float:
    """Seconds on an otherwise idle machine."""
    if cost.on != CPU:
        return work
    return work / profile.crowded(cost.cores, profile.cores) / cost.cores

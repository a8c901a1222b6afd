"""Places of workers: the resources that each of them gets, on which machine and GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf_vla.config.cluster import ClusterConfig, RoleConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.machines import Cluster, Slot, assign, describe, machines_of_ray
from rlinf_vla.runtime.ray.pool import HEALTH

TRAINER = "trainer"
ROLLOUT = "rollout"
FEATURE = "feature"
REFERENCE = "reference"
REWARD = "reward"
BESIDE = {FEATURE: TRAINER, REFERENCE: TRAINER, REWARD: ROLLOUT}
"""Roles whose workers share the GPUs of another role."""
RAYS_OWN = ("CPU", "GPU", "NPU")
_RAYS_UNIT = 10_000
"""Ray counts fractions of a resource in these parts."""


@dataclass(kw_only=True)
class Role(RoleConfig):
    """``count`` workers, with the resources that each of them takes."""

    count: int
    gpus: float = 0.0
    """GPUs of each worker of a role that has no ``slots``."""
    slots: tuple[Slot, ...] = ()
    """GPU of each worker; empty: any machine."""
    resource: str = "GPU"
    """The name by which Ray counts these GPUs."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker, without the GPU of its slot."""
        amounts = {"CPU": self.cpus, self.resource: self.gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def one_more(self) -> Role:
        """Return the role of an additional worker: on any machine, with a GPU of its own if the
        others have one."""
        return replace(self, count=1, slots=(), gpus=1.0 if self.slots else self.gpus)

    def options(self, share: float | None = None) -> dict[str, Any]:
        """Return the same resources as options of a Ray actor, with this ``share`` of a GPU."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "resources": dict(self.resources)}
        gpus = self.gpus if share is None else share
        if self.resource == "GPU":
            return options | {"num_gpus": gpus}
        return options | {"resources": options["resources"] | {self.resource: gpus}}


@dataclass
class Bundle:
    """Resources that are reserved together on one machine.

    ``slot``: the GPU that all its workers share; None: the bundle of one worker, on any machine.
    """

    slot: Slot | None
    resources: dict[str, float]
    labels: dict[str, str]
    workers: list[tuple[str, int]] = field(default_factory=list)
    """(role, number of the worker)"""

    @property
    def share(self) -> float:
        """GPU of each of its workers: equal parts, rounded down to what Ray resolves."""
        return (
            1.0
            if len(self.workers) == 1
            else math.floor(_RAYS_UNIT / len(self.workers)) / _RAYS_UNIT
        )


def roles_of(
    config: ClusterConfig, counts: Mapping[str, int], cluster: Cluster | None = None
) -> dict[str, Role]:
    """Return the roles with their ``counts`` of workers; with a ``cluster``, each on a GPU of it.

    Raises UserError if the cluster has too few GPUs.
    """
    roles = {
        name: Role(**vars(getattr(config.roles, name)), count=count, resource=config.ray_resource)
        for name, count in counts.items()
    }
    if cluster is None:
        return roles
    rollouts, trainers = assign(config.placement, counts[ROLLOUT], counts[TRAINER], cluster)
    own = {ROLLOUT: rollouts, TRAINER: trainers}
    placed_roles = {}
    for name, role in roles.items():
        slots = own.get(BESIDE.get(name, name)) or rollouts
        placed_roles[name] = replace(
            role, slots=tuple(slots[number % len(slots)] for number in range(role.count))
        )
    return placed_roles


def bundles_of(roles: Mapping[str, Role], cluster: Cluster | None = None) -> list[Bundle]:
    """Return the bundles of the workers: one per GPU, and one per worker without a GPU.

    Feature workers share the bundles of trainer ranks in both cases. ``cluster``: machines of the
    slots, whose labels the bundles get.
    """
    bundles: dict[object, Bundle] = {}
    for name in sorted(roles, key=lambda name: name == FEATURE):
        role = roles[name]
        for number in range(role.count):
            slot = role.slots[number] if role.slots else None
            host_role = TRAINER if name == FEATURE else name
            key = slot or (host_role, number % roles[host_role].count)
            if key not in bundles:
                labels = dict(cluster.each[slot.machine].labels) if slot and cluster else {}
                bundles[key] = Bundle(slot, {role.resource: 1.0} if slot else {}, labels)
            bundle = bundles[key]
            bundle.resources = sum_of(bundle.resources, role.bundle)
            bundle.labels |= role.labels
            bundle.workers.append((name, number))
    return list(bundles.values())


@contextmanager
def reserve_places(
    roles: Mapping[str, Role],
    patience_s: float,
    spread: bool = False,
    cluster: Cluster | None = None,
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Reserve places; yield, for each worker of each role, the options of a Ray actor in its place.

    The GPUs of one machine of ``cluster`` are reserved on one machine. Bundles without a GPU are on
    as few machines as possible, or as many with ``spread``. Raises UserError if there is no room
    within ``patience_s``.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    bundles = bundles_of(roles, cluster)
    worker_options: dict[str, list[dict[str, Any]]] = {
        name: [{} for _ in range(role.count)] for name, role in roles.items()
    }
    with ExitStack() as stack:
        groups = []
        for machine in dict.fromkeys(
            bundle.slot.machine if bundle.slot else None for bundle in bundles
        ):
            here = [
                bundle
                for bundle in bundles
                if (bundle.slot.machine if bundle.slot else None) == machine
            ]
            strategy = ("SPREAD" if spread else "PACK") if machine is None else "STRICT_PACK"
            group, options = request(here, roles, strategy)
            stack.callback(remove_placement_group, group)
            groups.append(group)
            for (name, number), actor_options in options.items():
                worker_options[name][number] = actor_options
        try:
            ray.get([group.ready() for group in groups], timeout=patience_s)
        except ray.exceptions.GetTimeoutError:
            raise UserError(
                f"the cluster had no room within {patience_s:g} s for {_wanted(roles)}: lower cluster.*_workers"
            ) from None
        yield worker_options


def neighbours(options: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return, for each worker of a role, how many of the role are on its machine.

    ``options``: see ``nodes_of``.
    """
    nodes = nodes_of(options)
    return [nodes.count(node) for node in nodes]


def nodes_of(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the id of each worker's node. ``options``: of actors, of ``reserve_places``."""
    from ray.util.placement_group import placement_group_table

    places = [worker["scheduling_strategy"] for worker in options]
    groups = {place.placement_group.id: place.placement_group for place in places}
    nodes = {
        number: placement_group_table(group)["bundles_to_node_id"]
        for number, group in groups.items()
    }
    return [nodes[place.placement_group.id][place.placement_group_bundle_index] for place in places]


def request(
    bundles: Sequence[Bundle], roles: Mapping[str, Role], strategy: str
) -> tuple[Any, dict[tuple[str, int], dict[str, Any]]]:
    """Ask Ray for a placement group; return it, and each worker's options as an actor in it."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    labels = [dict(bundle.labels) for bundle in bundles]
    selectors = {"bundle_label_selector": labels} if any(labels) else {}
    group = placement_group(
        [bundle.resources or {"CPU": 0.001} for bundle in bundles], strategy=strategy, **selectors
    )
    options = {}
    for index, bundle in enumerate(bundles):
        scheduling = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        )
        for name, number in bundle.workers:
            resources = roles[name].options(bundle.share if bundle.slot else None)
            options[name, number] = resources | {"scheduling_strategy": scheduling}
    return group, options


def machines_for(config: ClusterConfig) -> Cluster | None:
    """Return the machines whose GPUs the workers of a run get; None if the run uses no GPUs.

    They are those of ``cluster.nodes``, else those of the connected Ray cluster. Raises UserError.
    """
    import ray

    if not config.on_gpus:
        return None
    if config.nodes or config.address is None:
        return describe(config)
    return machines_of_ray(config.name, ray.nodes(), config.ray_resource)


def ask_where(actors: Mapping[str, Sequence[Any]], patience_s: float) -> list[dict[str, Any]]:
    """Return role, number, machine, process and GPUs of each worker, as it says itself."""
    import ray

    asked = [
        (role, number, actor.where.options(concurrency_group=HEALTH).remote())
        for role in actors
        for number, actor in enumerate(actors[role])
    ]
    answers = ray.get([answer for *_, answer in asked], timeout=patience_s)
    return [
        {"role": role, "number": number} | answer
        for (role, number, _), answer in zip(asked, answers, strict=True)
    ]


def sum_of(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {
        name: first.get(name, 0.0) + second.get(name, 0.0) for name in first.keys() | second.keys()
    }


def total(bundles: Iterable[Bundle]) -> dict[str, float]:
    """Return the sum of the bundles' resources."""
    resources: dict[str, float] = {}
    for bundle in bundles:
        resources = sum_of(resources, bundle.resources)
    return resources


def require_room(
    nodes: Sequence[Mapping[str, Any]], roles: Mapping[str, Role], cluster: Cluster | None = None
) -> None:
    """Raise UserError at once for roles that can never fit the cluster's ``nodes``."""
    alive = [node for node in nodes if node["Alive"]]
    bundles = bundles_of(roles, cluster)
    for name, demand in sorted(total(bundles).items()):
        there = sum(node["Resources"].get(name, 0.0) for node in alive)
        if demand > there:
            fix = "lower cluster.*_workers"
            if name not in RAYS_OWN:
                fix = f"on the machine that has it, ray start --address=HOST:PORT --resources='{{\"{name}\": {demand:g}}}'"
            raise UserError(
                f"the cluster has {there:g} {name}, the plan wants {demand:g} ({_wanted(roles)}): {fix}"
            )
    for bundle in bundles:
        fits = [
            node
            for node in alive
            if all(
                node["Resources"].get(resource, 0.0) >= amount
                for resource, amount in bundle.resources.items()
            )
        ]
        fits = [
            node
            for node in fits
            if all(node.get("Labels", {}).get(key) == value for key, value in bundle.labels.items())
        ]
        if not fits:
            whom = " and ".join(dict.fromkeys(name for name, _ in bundle.workers))
            raise UserError(
                f"no node of the cluster can run a {whom} worker, which needs {bundle.resources} and labels {bundle.labels}"
            )


def _wanted(roles: Mapping[str, Role]) -> str:
    return ", ".join(f"{role.count} {name}" for name, role in roles.items() if role.count)

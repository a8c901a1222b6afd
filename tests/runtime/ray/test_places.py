"""Places of workers: which GPU each gets, in the plan, in Ray's bundles and in the processes that Ray starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_vla.config.cluster import FAKE_GPU, PLACEMENTS, ClusterConfig, NodeConfig, RoleConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.features.planner.plan import Plan, place
from rlinf_vla.runtime.machines import Cluster, Slot, assign, machines_of_ray
from rlinf_vla.runtime.ray.places import (
    bundles_of,
    neighbours,
    require_room,
    roles_of,
)

EIGHT = Cluster("made_up", (NodeConfig("node", 1, 8),))
TWO = Cluster("made_up", (NodeConfig("node", 2, 2, labels={"type": "fast"}),))
COUNTS = {"trainer": 2, "rollout": 4, "reference": 2, "reward": 1, "feature": 0}


def config(placement: str) -> ClusterConfig:
    return ClusterConfig("made_up", placement=placement, device=FAKE_GPU)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("workers", "ranks"), [(4, 4), (4, 2), (6, 2), (1, 1)])
def test_the_planner_and_the_runtime_place_workers_alike(
    placement: str, workers: int, ranks: int
) -> None:
    counts = COUNTS | {"rollout": workers, "trainer": ranks}
    roles = roles_of(config(placement), counts, EIGHT)
    (machine,) = place(Plan("ray", placement, workers, trainer_ranks=ranks), EIGHT)
    assert machine.rollout == tuple(slot.device for slot in roles["rollout"].slots)
    assert machine.trainers == tuple(slot.device for slot in roles["trainer"].slots)
    for role in ("rollout", "trainer"):
        assert len(set(roles[role].slots)) == roles[role].count, "a GPU has one worker of each role"
    shared = set(roles["rollout"].slots) & set(roles["trainer"].slots)
    assert bool(shared) == (placement != "disaggregated")
    assert set(roles["reference"].slots) <= set(roles["trainer"].slots) and set(
        roles["reward"].slots
    ) <= set(roles["rollout"].slots)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_workers_of_one_gpu_share_one_bundle(placement: str) -> None:
    roles = roles_of(config(placement), COUNTS, EIGHT)
    bundles = bundles_of(roles, EIGHT)
    assert Counter(worker for bundle in bundles for worker in bundle.workers) == Counter(
        (name, number) for name, role in roles.items() for number in range(role.count)
    )
    for bundle in bundles:
        assert bundle.resources == {"GPU": 1.0, "CPU": len(bundle.workers)}
        assert 1 - 1e-3 < bundle.share * len(bundle.workers) <= 1
        assert {roles[name].slots[number] for name, number in bundle.workers} == {bundle.slot}


def test_the_machines_labels_are_those_of_its_bundles() -> None:
    roles = roles_of(
        replace(
            config("collocated"),
            roles=replace(ClusterConfig("x").roles, rollout=RoleConfig(labels={"a": "b"})),
        ),
        COUNTS,
        TWO,
    )
    labels = [bundle.labels for bundle in bundles_of(roles, TWO)]
    assert labels == [{"type": "fast", "a": "b"}] * 4


def test_without_gpus_each_worker_has_its_own_bundle_and_features_share_the_trainers() -> None:
    roles = roles_of(ClusterConfig("made_up"), COUNTS | {"feature": 3})
    bundles = bundles_of(roles)
    assert [bundle.slot for bundle in bundles] == [None] * 9
    assert bundles[0].workers[1:] == [("feature", 0), ("feature", 2)] and bundles[0].resources == {
        "CPU": 3.0
    }


def test_npus_are_requested_by_the_name_by_which_ray_counts_them() -> None:
    npus = replace(config("collocated"), device="npu")
    roles = roles_of(npus, COUNTS, EIGHT)
    (bundle, *_) = bundles_of(roles, EIGHT)
    assert bundle.resources["NPU"] == 1 and "GPU" not in bundle.resources
    role = roles["trainer"]
    assert role.options(0.5) == {"num_cpus": 1.0, "resources": {"NPU": 0.5}}
    assert role.one_more().bundle == {"CPU": 1.0, "NPU": 1.0}
    node = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "NPU": 4.0}}
    assert machines_of_ray("mine", [node], npus.ray_resource).gpus == 4


def test_too_few_gpus() -> None:
    with pytest.raises(
        UserError,
        match=r"4 GPUs wanted, cluster=made_up has 2 \(cluster.placement=hybrid\): lower cluster.rollout_workers",
    ):
        assign("hybrid", 4, 1, Cluster("made_up", (NodeConfig("node", 1, 2),)))
    nodes = [{"Alive": True, "Resources": {"CPU": 64.0, "GPU": 1.0}, "Labels": {}}]
    with pytest.raises(UserError, match="the cluster has 1 GPU, the plan wants 4"):
        require_room(nodes, roles_of(config("collocated"), COUNTS, EIGHT), EIGHT)
    with pytest.raises(
        UserError, match="no node of the cluster can run a trainer and rollout and reference"
    ):
        require_room(
            [nodes[0] | {"Resources": {"CPU": 64.0, "GPU": 4.0}}],
            roles_of(config("collocated"), COUNTS, TWO),
            TWO,
        )


def test_machines_of_a_ray_cluster() -> None:
    def node(address: str, gpus: float, alive: bool = True) -> dict[str, Any]:
        return {
            "Alive": alive,
            "NodeManagerAddress": address,
            "Resources": {"CPU": 8.0} | ({"GPU": gpus} if gpus else {}),
        }

    found = machines_of_ray(
        "mine",
        [
            node("10.0.0.2", 4),
            node("10.0.0.1", 8),
            node("10.0.0.3", 0),
            node("10.0.0.4", 8, alive=False),
        ],
    )
    assert [(each.name, each.gpus) for each in found.nodes] == [("10.0.0.1", 8), ("10.0.0.2", 4)]
    assert assign("collocated", 9, 9, found)[0][8] == Slot(1, 0)
    with pytest.raises(UserError, match="no node of the Ray cluster has a GPU"):
        machines_of_ray("mine", [node("10.0.0.3", 0)])


def test_the_workers_of_a_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two placement groups, as of two machines of a plan, whose bundles Ray has put on nodes."""
    groups = [SimpleNamespace(id="first"), SimpleNamespace(id="second")]
    nodes = {"first": {0: "a", 1: "a"}, "second": {0: "b", 1: "a"}}
    module = import_module("ray.util.placement_group")
    monkeypatch.setattr(
        module, "placement_group_table", lambda group: {"bundles_to_node_id": nodes[group.id]}
    )
    options = [
        {
            "scheduling_strategy": SimpleNamespace(
                placement_group=group, placement_group_bundle_index=bundle
            )
        }
        for group in groups
        for bundle in (0, 1)
    ]
    assert neighbours(options) == [3, 3, 1, 3]


REAL = """
import json, sys
from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.runtime.machines import Cluster, NodeConfig
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.places import reserve_places, roles_of
from rlinf_vla.runtime.workers.base import gpus

device, placements, counts = json.loads(sys.argv[1])
cluster = Cluster("made_up", (NodeConfig("node", 1, 8),))
found = {}
import ray

with (
    connect_cluster(None, {}, lambda text: None, fake_gpus=8)
    if device == "fake_gpu"
    else ray.init(address="local", num_cpus=2, resources={"NPU": 8}, include_dashboard=False)
):

    class Asked:
        def gpus(self):
            return gpus()

    for placement in placements:
        config = ClusterConfig("made_up", placement=placement, device=device)
        for name in counts:
            getattr(config.roles, name).cpus = 0.05
        roles = roles_of(config, counts, cluster)
        with reserve_places(roles, 60, cluster=cluster) as places:
            actors = {name: [ray.remote(Asked).options(**place).remote() for place in places[name]] for name in places}
            given = {name: ray.get([actor.gpus.remote() for actor in of]) for name, of in actors.items()}
            found[placement] = [given, {name: [slot.device for slot in role.slots] for name, role in roles.items()}]
            for of in actors.values():
                for actor in of:
                    ray.kill(actor)
print(json.dumps(found))
"""


def same_groups(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two lists are equal up to the names of their values."""
    pairs = set(zip(first, second, strict=True))
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["fake_gpu", "npu"])
def test_ray_gives_workers_the_gpus_of_the_plan(device: str) -> None:
    """Real Ray, with eight GPUs or NPUs that it only claims to have."""
    import json
    import subprocess
    import sys

    command = [sys.executable, "-c", REAL, json.dumps([device, PLACEMENTS, COUNTS])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    for placement, (gpus, planned) in json.loads(run.stdout.splitlines()[-1]).items():
        given = [each for name in COUNTS for each in gpus[name]]
        assert all(len(each) == 1 for each in given), placement
        assert same_groups(
            [each for (each,) in given], [each for name in COUNTS for each in planned[name]]
        ), placement

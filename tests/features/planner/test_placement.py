from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf_vla.config.cluster import NodeConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.features.planner.plan import Machine, Plan, check_memory, place, processes
from rlinf_vla.features.planner.profile import Bytes
from rlinf_vla.features.planner.simulate import simulate
from rlinf_vla.runtime.machines import Cluster
from tests.features.planner.made_up import cluster, problem, profile, workload

GPUS = {"gpus": 2, "gpu": "fast", "gpu_memory_gb": 80.0}


def ray(placement: str, workers: int, ranks: int) -> Plan:
    return Plan("ray", placement, workers, trainer_ranks=ranks)


def used(
    plan: Plan, count: int, **node: object
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [
        (machine.copies, machine.rollout, machine.trainers)
        for machine in place(plan, cluster(count, **node))
    ]


def test_placement_of_roles_on_gpus() -> None:
    assert used(ray("collocated", 4, 4), 2, **GPUS) == [(2, (0, 1), (0, 1))], "equal"
    assert used(ray("hybrid", 4, 1), 2, **GPUS) == [(1, (0, 1), (0,)), (1, (0, 1), ())]
    assert used(ray("disaggregated", 2, 2), 2, **GPUS) == [(1, (), (0, 1)), (1, (0, 1), ())]
    assert used(ray("disaggregated", 2, 1), 4, **GPUS) == [(1, (1,), (0,)), (1, (0,), ())]


def test_workers_have_the_numbers_that_the_runtime_gives_them() -> None:
    machines = place(ray("hybrid", 6, 1), cluster(3, **GPUS))
    assert [(machine.copies, machine.numbers) for machine in machines] == [
        (1, ((0,), (1,))),
        (2, ((2, 4), (3, 5))),
    ]
    mixed = Cluster(
        "mixed", (NodeConfig("some", gpus=2, gpu="fast"), NodeConfig("others", gpus=2, gpu="other"))
    )
    known = {"fast": profile("fast"), "other": profile("other")}
    spans = simulate(problem(workload(), mixed, known), ray("hybrid", 4, 1)).spans
    assert {span.track for span in spans if "policy" in span.track} == {
        f"rollout {number} policy" for number in range(4)
    }


def test_a_machine_without_gpus_takes_several_workers() -> None:
    assert used(ray("collocated", 3, 2), 1) == [(1, (0, 0, 0), (0, 0))]
    assert used(ray("collocated", 4, 1), 2) == [(1, (0, 0), (0,)), (1, (0, 0), ())]
    assert used(ray("disaggregated", 2, 1), 3) == [(1, (), (0,)), (2, (0,), ())]
    assert used(Plan(), 3) == [(1, (0,), (0,))]


def test_a_cluster_that_is_too_small() -> None:
    for plan, wanted in (
        (ray("collocated", 5, 5), 5),
        (ray("disaggregated", 3, 2), 5),
        (ray("hybrid", 6, 1), 6),
    ):
        with pytest.raises(UserError, match=f"{wanted} GPUs wanted, cluster=made_up has 4"):
            place(plan, cluster(2, **GPUS))
    with pytest.raises(UserError, match="besides the trainer's"):
        place(ray("disaggregated", 1, 1), cluster(1))


def test_no_trainer_on_spot_nodes() -> None:
    machines = Cluster(
        "mixed", (NodeConfig("stays", gpus=1), NodeConfig("spot", gpus=2, spot=True))
    )
    assert [machine.node.name for machine in place(ray("disaggregated", 2, 1), machines)] == [
        "stays",
        "spot",
    ]
    with pytest.raises(UserError, match="spot"):
        place(ray("collocated", 2, 2), machines)


# memory: weights of 4 GB, of which 1 GB trains; 1 MB of activations per policy call

KNOWN = {"fast": profile("fast"), "cpu": profile()}


def fits(plan: Plan, gigabytes: float, **changes: object) -> bool:
    try:
        check_memory(
            problem(workload(**changes), cluster(**GPUS | {"gpu_memory_gb": gigabytes}), KNOWN),
            plan,
        )
        return True
    except UserError as error:
        assert "GB wanted in a GPU of node" in str(error) and "\n" not in str(error)
        return False


def test_memory_of_a_trainer_is_weights_gradients_and_moments() -> None:
    apart = ray("disaggregated", 1, 1)
    assert fits(apart, 7.1 / 0.9) and not fits(apart, 6.9 / 0.9)
    assert fits(apart, 8.1 / 0.9, reference=True) and not fits(apart, 7.9 / 0.9, reference=True), (
        "a copy of the initial trained weights"
    )


def test_two_roles_on_one_gpu_need_memory_for_both_unless_one_is_off_loaded() -> None:
    both = ray("collocated", 1, 1)
    assert not fits(both, 11.9 / 0.9) and fits(both, 12.1 / 0.9)
    assert fits(replace(both, offload=True), 7.1 / 0.9) and not fits(
        replace(both, offload=True), 6.9 / 0.9
    )
    assert fits(Plan(), 7.1 / 0.9), "in one process they share their weights"


def test_sharded_ranks_share_weights_gradients_and_moments() -> None:
    both = replace(ray("collocated", 2, 2), offload=True)
    assert fits(both, 7.1 / 0.9) and not fits(both, 6.9 / 0.9)
    assert fits(both, 5.1 / 0.9, sharded=True) and not fits(both, 4.9 / 0.9, sharded=True), (
        "a rollout worker has all weights"
    )
    apart = replace(both, offload=False)
    assert fits(apart, 8.6 / 0.9, sharded=True) and not fits(apart, 8.4 / 0.9, sharded=True)
    with pytest.raises(UserError, match=r"cluster\.trainer_sharding=full needs trainer ranks"):
        check_memory(problem(workload(sharded=True), cluster(**GPUS), KNOWN), Plan())


def test_activations_grow_with_the_micro_batch() -> None:
    large = Bytes(weights=1e9, activations=1e9)
    known = {"fast": profile("fast", bytes=large)}
    machines = cluster(**GPUS | {"gpu_memory_gb": 10.0})
    check_memory(problem(workload(), machines, known), replace(Plan(), micro_batch_size=7))
    with pytest.raises(UserError, match=r"33\.0 GB wanted"):
        check_memory(problem(workload(), machines, known), replace(Plan(), micro_batch_size=64))
    check_memory(
        problem(workload(minibatch_size=8), machines, known),
        replace(ray("collocated", 2, 2), micro_batch_size=64),
    )


def test_an_optimiser_step_of_whole_groups_needs_the_memory_of_their_calls() -> None:
    """Two groups of four episodes of four calls, on two ranks: 16 GB of activations each."""
    load = workload(
        calls=None, listed=64, attempts=4, groups_per_step=2, critic=False, minibatch_size=2
    )
    known = {"fast": profile("fast", bytes=Bytes(weights=1e9, activations=1e9))}
    roomy, small = (
        problem(load, cluster(2, **GPUS | {"gpu_memory_gb": memory / 0.9}), known)
        for memory in (17.1, 16.9)
    )
    check_memory(roomy, ray("disaggregated", 2, 2))
    with pytest.raises(UserError, match=r"17\.0 GB wanted"):
        check_memory(small, ray("disaggregated", 2, 2))


def test_simulators_need_memory_where_the_policy_has_no_gpu() -> None:
    small = {"memory_gb": 12.0}
    check_memory(problem(workload(processes=1), cluster(**small), KNOWN), Plan())
    with pytest.raises(UserError, match="wanted in node, which has 12"):
        check_memory(problem(workload(processes=8), cluster(**small), KNOWN), Plan())


def test_simulator_processes() -> None:
    """Of an environment group. Without a number, a machine's workers divide its cores."""
    one = Machine(NodeConfig(cpus=6), 1, (0,), (0,), ((0,),))
    two = replace(one, rollout=(0, 0), numbers=((0,), (1,)))
    assert processes(Plan(), workload(), one) == 6
    assert processes(Plan(), workload(envs=4), one) == 4
    assert processes(Plan(pipeline_depth=4), workload(), one) == 1
    assert processes(Plan(pipeline_depth=2), workload(processes=4), one) == 2
    assert processes(Plan(rollout_workers=2), workload(), two) == 3
    assert processes(Plan(rollout_workers=2), workload(processes=4), two) == 2
    assert processes(Plan(rollout_workers=2), workload(processes=1), two) == 1

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig
from rlinf_vla.config.cluster import NodeConfig
from rlinf_vla.features.planner.choice import least_seconds
from rlinf_vla.features.planner.graph import trace
from rlinf_vla.features.planner.plan import Plan, device_hours, place
from rlinf_vla.features.planner.prediction import Prediction
from rlinf_vla.features.planner.profile import Bytes, Cost, Profile
from rlinf_vla.features.planner.search import gain_of_measured
from rlinf_vla.features.planner.simulate import STORE, shares_of, simulate, update_seconds
from rlinf_vla.features.planner.workload import Workload, rounds
from rlinf_vla.runtime.machines import Cluster
from tests.features.planner.made_up import (
    BYTES,
    COSTS,
    cluster,
    on_gpu,
    ppo,
    problem,
    profile,
    workload,
)

RAY = Plan("ray")
LIGHT = Bytes(weights=4e9, trained=0.0, call=0.0)
"""Transfers that take no time."""


def played(
    plan: Plan,
    load: Workload | None = None,
    known: Profile | None = None,
    graph: Any = None,
    count: int = 1,
    **node: Any,
) -> Prediction:
    known = known or profile()
    machines = cluster(count, profile=known.device, **node)
    return simulate(
        problem(load or workload(processes=1), machines, {known.device: known}, graph), plan
    )


ROLLOUT = 0.5 + 4.0 + 8 * (0.5 + 1.6) + 0.25 + 4.0 + 0.25
"""Computed by hand: merged adapters, a reset of all, eight calls and steps, values and a second reset in the middle, values at the end."""
UPDATE = 2 * (0.25 + 32 * 0.01 + 0.125) / 2


def test_one_group_in_one_process_is_sequential() -> None:
    found = played(Plan())
    assert found.seconds == pytest.approx(ROLLOUT + UPDATE)
    assert sum(found.critical.values()) == pytest.approx(found.seconds), "all time is accounted for"
    assert found.critical["the simulators"] == pytest.approx(8 * 1.6) and found.critical[
        "resets in the simulators"
    ] == pytest.approx(8.0)
    assert found.bottleneck.startswith(
        f"an iteration of {found.seconds:.3g} s waits for the simulators"
    )
    assert found.steps == 128 and found.steps_per_s == pytest.approx(128 / found.seconds)


def test_two_groups_overlap_inference_with_simulation() -> None:
    """Each group's step takes 0.8 s, during which the other group's call of 0.3 s is made."""
    long = workload(processes=2, calls=40, episode_calls=40)
    serial, pipelined = (played(Plan(pipeline_depth=depth), long).seconds for depth in (1, 2))
    assert serial == pytest.approx(0.5 + 40 * (0.5 + 0.8) + 2.0 + 0.25 + 5 * UPDATE)
    assert pipelined == pytest.approx(0.5 + 40 * (0.3 + 0.8) + 2.0 + 5 * UPDATE, rel=0.03)


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(pipeline_depth=2), Plan("ray", pipeline_depth=2), Plan("ray", split="head")],
)
def test_a_long_rollout_takes_as_long_in_fewer_rounds(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several calls of a long rollout are simulated as one: neither resets nor values are lost."""
    long = workload(processes=2, calls=400, episode_calls=100)
    found = []
    for most in (400, 100):
        monkeypatch.setattr("rlinf_vla.features.planner.workload.MOST_ROUNDS", most)
        rounds.cache_clear()
        found.append(played(plan, long))
    rounds.cache_clear()
    whole, joined = found
    assert joined.seconds == pytest.approx(whole.seconds, rel=0.02) and joined.steps == whole.steps
    resets = "resets in the simulators"
    assert joined.critical.get(resets, 0) == pytest.approx(whole.critical.get(resets, 0))


def test_a_simulator_in_the_policys_process_does_not_overlap() -> None:
    inline = profile(inline=True)
    one, two = (
        played(Plan(pipeline_depth=depth), workload(processes=2), inline).seconds
        for depth in (1, 2)
    )
    assert two >= one


def test_busy_cores_are_shared() -> None:
    """Two rollout workers, each with two simulator processes, on two cores: no faster than one."""
    alone = played(RAY, workload(processes=2), cpus=2)
    together = played(replace(RAY, rollout_workers=2), workload(processes=4), cpus=2)
    assert together.seconds > 0.8 * alone.seconds
    assert (
        played(replace(RAY, rollout_workers=2), workload(processes=4), cpus=64).seconds
        < 0.7 * alone.seconds
    )


def test_crowding_is_slower() -> None:
    plan, load = Plan(pipeline_depth=2), workload(processes=2)
    assert (
        played(plan, load, profile(crowding=0.5), cpus=2).seconds
        > played(plan, load, cpus=2).seconds
    )


def test_ray_moves_trajectories_and_weights() -> None:
    fast, slow = (played(RAY, known=profile(bytes=stored)) for stored in (LIGHT, BYTES))
    moved = (64 * BYTES.call + BYTES.trained) / STORE
    assert slow.seconds == pytest.approx(fast.seconds + moved)
    assert fast.seconds == pytest.approx(ROLLOUT + UPDATE + 2 * 0.25), (
        "weights are copied out, and in"
    )


def test_weights_cross_the_network_once_per_machine() -> None:
    """Disaggregated over equal machines: the trainer's link sends the trained weights to each of the others."""
    apart = Plan("ray", "disaggregated", 4)
    stored = replace(LIGHT, trained=1e9)
    for gbps, seconds in ((8.0, 4.0), (80.0, 0.4)):
        slow, none = (
            played(apart, known=profile(bytes=each), count=5, network_gbps=gbps)
            for each in (stored, LIGHT)
        )
        assert slow.seconds == pytest.approx(none.seconds + seconds + 1e9 / STORE)
        assert slow.critical["publishing weights"] >= seconds


def test_a_broadcast_crosses_each_link_once() -> None:
    """However many machines there are; with roles that take turns, weights are fetched from the store."""
    apart = Plan("ray", "disaggregated", 4)
    load = workload(broadcast=True)
    stored = replace(LIGHT, trained=1e9)
    slow, none = (
        played(apart, load, profile(bytes=each), count=5, network_gbps=8.0)
        for each in (stored, LIGHT)
    )
    assert slow.seconds == pytest.approx(none.seconds + 1.0 + 1e9 / STORE)
    turns = replace(apart, offload=True)
    assert played(turns, load, profile(bytes=stored), count=5, network_gbps=8.0) == played(
        turns, workload(), profile(bytes=stored), count=5, network_gbps=8.0
    )


def test_ranks_share_an_update_and_add_their_gradients() -> None:
    one, four = (
        played(
            Plan("ray", "disaggregated", 1, trainer_ranks=ranks),
            workload(minibatch_size=64),
            count=5,
        )
        for ranks in (1, 4)
    )
    assert four.critical["summing gradients over trainer ranks"] == pytest.approx(
        2 * 0.75 * 1e9 / (10e9 / 8)
    )
    assert four.critical["the update"] == pytest.approx((0.25 + 16 * 0.01 + 0.125) / 2)
    assert one.critical["the update"] == pytest.approx((0.25 + 64 * 0.01 + 0.125) / 2)


def test_sharded_ranks_gather_weights_twice_per_micro_batch_and_each_reduces_its_share() -> None:
    """Over a link of 10 Gbit/s, four ranks: all 4 GB of weights for each of two micro-batches of 16 calls."""
    plan = Plan("ray", "disaggregated", 1, trainer_ranks=4, micro_batch_size=8)
    whole, shared = (
        played(plan, workload(minibatch_size=64, sharded=sharded), count=5)
        for sharded in (False, True)
    )
    once = 0.75 * 1e9 / (10e9 / 8)
    assert shared.critical["summing gradients over trainer ranks"] == pytest.approx(once)
    assert whole.critical["the update"] == pytest.approx((2 * 0.25 + 16 * 0.01 + 0.125) / 2)
    assert (
        shared.critical["gathering sharded weights"] == pytest.approx(2 * 2 * 4 * once)
        and "the update" not in shared.critical
    )
    assert shared.critical["publishing weights"] - whole.critical[
        "publishing weights"
    ] == pytest.approx(once)
    hidden = played(plan, workload(minibatch_size=64, sharded=True), count=5, network_gbps=1e6)
    assert (
        hidden.critical["the update"] == pytest.approx(whole.critical["the update"])
        and "gathering sharded weights" not in hidden.critical
    )


def test_every_minibatch_of_a_sharded_rank_gathers_weights() -> None:
    """Four minibatches of 16 calls on four ranks, two epochs: eight gathers forward, and eight backward."""
    plan = Plan("ray", "disaggregated", 1, trainer_ranks=4)
    load = workload(minibatch_size=16, epochs=2, sharded=True)
    found = played(plan, load, count=5)
    assert found.critical["gathering sharded weights"] == pytest.approx(
        2 * 8 * 0.75 * BYTES.weights / (10e9 / 8)
    )


def test_smaller_micro_batches_cost_their_fixed_part_again() -> None:
    whole, cut = (played(replace(Plan(), micro_batch_size=rows)) for rows in (32, 8))
    assert cut.seconds - whole.seconds == pytest.approx(2 * 3 * 0.25 / 2)


def test_an_idle_role_is_off_loaded_and_back() -> None:
    gpus = on_gpu("fast")
    node = {"gpus": 1, "gpu_link_gbps": 80.0}
    stays, leaves = (
        played(replace(RAY, offload=offload), known=gpus, **node) for offload in (False, True)
    )
    assert leaves.seconds > stays.seconds and leaves.critical["off-loading"] == pytest.approx(
        leaves.seconds - stays.seconds
    )


def test_stale_rollouts_run_while_the_trainer_works() -> None:
    heavy = profile(operations=COSTS | {"update": Cost(0.0, 0.5)})
    graphs = [ppo(), ppo(staleness=1, decoupled=True)]
    apart = Plan("ray", "disaggregated", 1)
    fresh, stale = (played(apart, known=heavy, graph=graph, count=2) for graph in graphs)
    assert fresh.seconds > ROLLOUT + 32 and stale.seconds < 1.05 * max(ROLLOUT, 32)
    here = [played(Plan(), known=heavy, graph=graph).seconds for graph in graphs]
    assert here[0] == pytest.approx(here[1]), "in one process nothing overlaps an update"


def test_groups_are_used_as_they_arrive() -> None:
    graph = trace(GRPO(GRPOConfig(groups_per_step=1), 1.0))
    load = workload(calls=None, listed=16, attempts=4, groups_per_step=1, critic=False, processes=1)
    heavy = profile(operations=COSTS | {"update": Cost(0.0, 0.2)}, bytes=LIGHT)
    plan = Plan("ray", "disaggregated", 1)
    streaming, waiting = (
        played(replace(plan, streaming=each), load, heavy, graph, 2).seconds
        for each in (True, False)
    )
    assert streaming < 0.9 * waiting


def test_an_off_loaded_plan_does_not_stream() -> None:
    """As in the runtime: roles that share a device by turns cannot work on one rollout together."""
    graph = trace(GRPO(GRPOConfig(groups_per_step=1, kl_coef=0.1), 1.0))
    known = on_gpu("fast")
    load = workload(
        calls=None,
        listed=16,
        attempts=4,
        groups_per_step=1,
        critic=False,
        processes=1,
        reference=True,
    )
    plans = [
        replace(RAY, rollout_workers=2, trainer_ranks=2, offload=True, streaming=streaming)
        for streaming in (True, False)
    ]
    streaming, waiting = (
        played(plan, load, known, graph, gpus=2, gpu_link_gbps=8.0) for plan in plans
    )
    assert streaming.seconds == waiting.seconds and streaming.critical == waiting.critical
    assert str(plans[0]) == str(plans[1])
    bounds = [
        least_seconds(problem(load, cluster(gpus=2, gpu="fast"), {"fast": known}, graph), plan)
        for plan in plans
    ]
    assert bounds[0] == bounds[1] <= waiting.seconds


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_optimiser_steps_are_of_whole_groups_however_shards_are_cut(
    workers: int, streaming: bool
) -> None:
    """Eight groups of four episodes, three per step: three steps, of 48, 48 and 32 policy calls."""
    graph = trace(GRPO(GRPOConfig(groups_per_step=3), 1.0))
    load = workload(calls=None, listed=32, attempts=4, groups_per_step=3, critic=False, processes=1)
    plan = Plan("ray", "disaggregated", workers, trainer_ranks=2, streaming=streaming)
    known = profile(operations=COSTS | {"optimise": Cost(100.0)}, bytes=LIGHT)
    found = played(plan, load, known, graph, workers + 2)
    spans = [span for span in found.spans if span.name == "update" and span.track == "trainer 0"]
    seconds = [
        (100.0 + 0.25 + 0.01 * rows / 2) / 2 for rows in (48, 48, 32)
    ]  # core-seconds, on two cores
    assert [span.end - span.start for span in spans] == pytest.approx(
        seconds if streaming else [sum(seconds)]
    )
    assert (
        least_seconds(problem(load, cluster(workers + 2), {"cpu": known}, graph), plan)
        <= found.seconds
    )


def test_a_rewards_time() -> None:
    known = profile(operations=COSTS | {"reward": Cost(per_item=0.1)})
    load = workload(processes=1)
    plain = played(RAY, load, known)
    inside = played(RAY, replace(load, rewarded=True), known)
    assert inside.seconds == pytest.approx(plain.seconds + 64 * 0.1)
    apart = played(replace(RAY, reward_workers=1), replace(load, rewarded=True), known)
    assert apart.seconds == pytest.approx(inside.seconds)


def test_reference_workers_work_during_rollouts() -> None:
    load = workload(reference=True, processes=1, calls=None, listed=16, critic=False)
    known = profile(operations=COSTS | {"reference": Cost(per_item=0.2)})
    graph = trace(GRPO(GRPOConfig(kl_coef=0.1), 1.0))
    trainer, worker = (
        played(replace(RAY, reference_workers=count), load, known, graph).seconds
        for count in (0, 1)
    )
    assert worker == pytest.approx(trainer), "either starts with the first shard"
    assert played(replace(RAY, streaming=False), load, known, graph).seconds > 1.1 * trainer


def test_a_split_policy_pays_for_its_features() -> None:
    known = profile(bytes=replace(LIGHT, inputs=1e6, features=1e6))
    whole, split = (
        played(Plan("ray", "disaggregated", 1, split=split), known=known, count=2, network_gbps=0.8)
        for split in ("none", "head")
    )
    assert split.seconds - whole.seconds == pytest.approx((8 + 2) * 8 * 2e6 / 1e8, rel=1e-3)
    assert split.critical["moving features"] > 0


def test_machines_with_the_same_use_are_simulated_once() -> None:
    """Four machines with a quarter of the work each take as long as one with its quarter, except for network transfers."""
    one = played(RAY, workload(envs=8), known=profile(bytes=LIGHT))
    four = played(
        replace(RAY, rollout_workers=4, trainer_ranks=4),
        workload(envs=32, minibatch_size=128),
        profile(bytes=LIGHT),
        count=4,
    )
    assert four.seconds == pytest.approx(one.seconds)
    assert len({span.track for span in four.spans}) <= len({span.track for span in one.spans}) + 1


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("listed", [8, 16, 24, 64, 88])
def test_only_listed_episodes_are_simulated(count: int, listed: int) -> None:
    """Also where some workers of a machine have fewer parts than its first ones, or none."""
    costs = COSTS | {"update": Cost(0.0, 0.01), "optimise": Cost()}
    load = workload(envs=32, calls=None, listed=listed, attempts=8, critic=False)
    plan = Plan("ray", "disaggregated", rollout_workers=2 * count, trainer_ranks=2)
    known = on_gpu("fast", operations=costs, bytes=replace(LIGHT, call=1e6))
    found = played(plan, load, known, count=count + 1, gpus=2, network_gbps=0.008)
    rows = 4 * listed
    assert found.critical["the update"] == pytest.approx(rows * 0.01 / 2)
    assert found.utilisation["node 0: network"] * found.seconds == pytest.approx(rows * 1.0), (
        "trajectories, a second each"
    )


# properties of every plan

NUMBERS = st.floats(0.0, 1.0)
PROFILES = st.builds(
    lambda values, crowding: profile(
        operations={
            name: Cost(fixed, per_item, cores, "cpu")
            for name, (fixed, per_item, cores) in zip(COSTS, values, strict=True)
        },
        crowding=crowding,
    ),
    st.lists(
        st.tuples(NUMBERS, NUMBERS, st.floats(1.0, 2.0)), min_size=len(COSTS), max_size=len(COSTS)
    ),
    st.sampled_from([0.0, 0.3]),
)
PLANS = st.sampled_from(
    [
        Plan(),
        Plan(pipeline_depth=2),
        Plan("ray", rollout_workers=2),
        Plan("ray", rollout_workers=2, pipeline_depth=2, trainer_ranks=2),
        Plan("ray", rollout_workers=4, streaming=False),
    ]
)
LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=4)


@settings(max_examples=40)
@given(PROFILES, PLANS, LENGTHS, st.sampled_from([1, 2, 64]))
def test_no_resource_exceeds_its_capacity(
    known: Profile, plan: Plan, lengths: list[tuple[int, bool]], cpus: int
) -> None:
    load = workload(lengths=tuple(lengths))
    found = played(plan, load, known, cpus=cpus)
    assert all(share <= 1 + 1e-6 for share in found.utilisation.values())
    assert (
        least_seconds(problem(load, cluster(cpus=cpus), {"cpu": known}), plan)
        <= found.seconds * (1 + 1e-6) + 1e-6
    )
    tracks = {span.track for span in found.spans if span.track != "network"}
    for track in tracks:
        spans = sorted(
            (span for span in found.spans if span.track == track), key=lambda span: span.start
        )
        assert all(later.start >= earlier.end - 1e-6 for earlier, later in pairwise(spans)), (
            "one thing at a time"
        )


@settings(max_examples=40)
@given(PROFILES, st.sampled_from(sorted(COSTS)), st.floats(1.0, 5.0), st.sampled_from([1, 2, 64]))
def test_a_sequential_plan_is_never_slower_with_less_work(
    known: Profile, name: str, factor: float, cpus: int
) -> None:
    """For a plan that is a chain: faster operations, a faster network, fewer policy calls."""
    slow = played(RAY, workload(processes=1), known, cpus=cpus).seconds
    faster = replace(
        known, operations=known.operations | {name: known.cost(name).times(1 / factor)}
    )
    assert played(RAY, workload(processes=1), faster, cpus=cpus).seconds <= slow + 1e-6
    assert played(RAY, workload(processes=1, calls=7), known, cpus=cpus).seconds <= slow + 1e-6
    remote = Plan("ray", "disaggregated", 1)
    times = [
        played(remote, workload(processes=1), known, count=2, network_gbps=10 * speed).seconds
        for speed in (1.0, factor)
    ]
    assert times[1] <= times[0] + 1e-6


@settings(max_examples=30)
@given(PROFILES, st.sampled_from([1, 2]))
def test_more_workers_are_never_slower_without_shared_resources(known: Profile, depth: int) -> None:
    known = replace(known, bytes=LIGHT)
    times = [
        played(
            Plan("ray", "disaggregated", workers, pipeline_depth=depth),
            workload(processes=2),
            known,
            count=9,
        ).seconds
        for workers in (1, 2, 4)
    ]
    assert times[1] <= times[0] + 1e-6 and times[2] <= times[1] + 1e-6


def test_timelines_and_traces(tmp_path: Path) -> None:
    found = played(replace(RAY, rollout_workers=2), workload(processes=2))
    picture = found.picture(60).splitlines()
    assert all(row.count("|") == 2 and len(row.split("|")[1]) == 60 for row in picture[:-2])
    assert {"rollout 0 policy", "rollout 1 simulator 0", "trainer", "network"} <= {
        row.split("|")[0].strip() for row in picture[:-2]
    }
    simulator = next(row for row in picture if row.startswith("rollout 0 simulator 0")).split("|")[
        1
    ]
    assert set(simulator) == {"r", "s", "."} and simulator.strip(".").startswith("r")
    found.timeline().write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert max(
        event["ts"] + event["dur"] for event in events if event["ph"] == "X"
    ) == pytest.approx(1e6 * found.seconds, rel=1e-3)
    json.dumps(found.document())


@pytest.mark.parametrize(
    ("placement", "workers", "ranks", "hours"),
    [
        ("collocated", 8, 8, {"rollout and trainer": 16.0}),
        ("collocated", 4, 4, {"rollout and trainer": 8.0, "idle": 8.0}),
        ("hybrid", 8, 2, {"rollout and trainer": 4.0, "rollout": 12.0}),
        ("disaggregated", 5, 2, {"rollout": 10.0, "trainer": 4.0, "idle": 2.0}),
    ],
)
def test_gpu_hours_by_role(
    placement: str, workers: int, ranks: int, hours: dict[str, float]
) -> None:
    cluster = Cluster("made_up", (NodeConfig("node", 2, 4),))
    plan = Plan("ray", placement, workers, trainer_ranks=ranks)
    assert device_hours(plan, cluster, 2.0) == hours
    assert sum(hours.values()) == 2 * cluster.gpus, "every GPU of the machines counts once"


def test_core_hours_without_gpus() -> None:
    cluster = Cluster("made_up", (NodeConfig("node", 2, cpus=16),))
    assert device_hours(Plan(), cluster, 2.0) == {"all roles": 64.0}


def test_a_price() -> None:
    found = played(Plan(), price_per_hour=36.0)
    assert found.price == pytest.approx(0.01 * found.seconds) and played(Plan()).price is None


@pytest.mark.parametrize("fixed", [0.0, 0.5])
def test_measured_shares_end_where_unlike_ranks_take_equally_long(fixed: float) -> None:
    costs = COSTS | {"update": Cost(fixed, 1.0, cores=1.0), "optimise": Cost()}
    profiles = {
        "new": on_gpu("new", 4.0, operations=costs, bytes=LIGHT),
        "old": on_gpu("old", 1.0, operations=costs, bytes=LIGHT),
    }
    nodes = tuple(
        NodeConfig(device, gpus=1, gpu=device, cpus=64, memory_gb=1000.0, latency_ms=0.0)
        for device in profiles
    )
    machines = Cluster("mixed", nodes)
    plan = Plan("ray", rollout_workers=2, trainer_ranks=2)
    even, measured = (
        problem(workload(measured=chosen, processes=2), machines, profiles)
        for chosen in (False, True)
    )
    assert shares_of(profiles, plan, even.workload, place(plan, machines)) == {}
    shares = shares_of(profiles, plan, measured.workload, place(plan, machines))
    assert sum(shares.values()) == pytest.approx(1)
    load = measured.workload
    new, old = (
        update_seconds(profiles[device], plan, load, load.minibatches, shares[device])
        for device in ("new", "old")
    )
    assert new == pytest.approx(old, rel=0.01)
    if not fixed:
        assert shares == pytest.approx({"new": 0.8, "old": 0.2})
    slowest = update_seconds(profiles["old"], plan, load, load.minibatches)
    before, after = (simulate(each, plan) for each in (even, measured))
    assert before.seconds - after.seconds == pytest.approx(slowest - old, rel=0.05)
    assert least_seconds(measured, plan) <= after.seconds
    assert "cluster.trainer_split=measured" in gain_of_measured(even, before)
    assert not gain_of_measured(measured, after), "it is set already"
    alike = problem(workload(processes=2), cluster(2), {"cpu": profile()})
    assert not gain_of_measured(alike, simulate(alike, plan)), "ranks are alike"


def test_ranks_share_what_an_update_computes_once() -> None:
    """Reference and first log-probabilities of every row; the frozen part of the rows of all epochs."""
    known = profile(
        operations=COSTS
        | {
            "precompute": Cost(0.5, 0.02),
            "reference": Cost(0.25, 0.01),
            "update": Cost(),
            "optimise": Cost(),
        }
    )
    load = workload(proximal=True, fixes=True, epochs=2)
    for ranks in (1, 4):
        plan = Plan("ray", trainer_ranks=ranks, micro_batch_size=16)
        mine = 64 * (1 - (1 - 1 / ranks) ** 2)
        first = 0.25 * (64 / ranks / 16) + 0.01 * 64 / ranks
        assert update_seconds(known, plan, load, load.minibatches) == pytest.approx(
            0.5 * ceil(mine / 16) + 0.02 * mine + first
        )
    for groups, shares in (
        (8, 1.0),
        (6, 1.5),
        (3, 1.75),
    ):  # rows of all four ranks; of pairs of ranks; of any rank
        plan = Plan("ray", trainer_ranks=4, micro_batch_size=1)
        seconds = update_seconds(
            known, plan, replace(load, proximal=False, row_groups=groups), load.minibatches
        )
        assert seconds == pytest.approx((0.5 + 0.02) * shares * 16)
    graph = trace(GRPO(GRPOConfig(kl_coef=0.1), 1.0))
    known = replace(
        known, operations=known.operations | {"reference": Cost(per_item=0.2)}, bytes=LIGHT
    )
    load = workload(reference=True, processes=1, calls=None, listed=16, critic=False)
    one, four = (
        played(Plan("ray", trainer_ranks=ranks, streaming=False), load, known, graph).critical[
            "the reference policy"
        ]
        for ranks in (1, 4)
    )
    assert one == pytest.approx(64 * 0.2) and four == pytest.approx(one / 4)


def test_gpus_of_one_machine_sum_gradients_over_their_own_link() -> None:
    node = {"gpus": 2, "gpu_link_gbps": 8.0, "network_gbps": 80.0}
    plan = Plan("ray", rollout_workers=4, trainer_ranks=4)
    found = [
        played(
            replace(plan, rollout_workers=2 * count, trainer_ranks=2 * count),
            known=on_gpu("fast", bus=bus),
            count=count,
            **node,
        )
        for count, bus in ((1, 0.0), (1, 4e9), (2, 4e9), (2, 40e9))
    ]
    seconds = [each.critical["summing gradients over trainer ranks"] for each in found]
    shares = [2 * (1 - 1 / ranks) * 2 * 1e9 for ranks in (2, 2, 4, 4)]
    assert seconds == pytest.approx(
        [share / rate for share, rate in zip(shares, (1e9, 4e9, 4e9, 10e9), strict=True)]
    )

"""Workers may be killed, told to leave, hang or join at any moment: the run ends in the weights of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.runtime.ray import publisher
from rlinf_vla.runtime.ray.broadcast import Order
from rlinf_vla.runtime.ray.pool import HEALTH, Pool, wait
from rlinf_vla.runtime.ray.trainers import TrainerLost, Trainers
from tests.runtime.ray.counting import (
    CLUSTER,
    GRPO_CONFIG,
    PPO_CONFIG,
    Apart,
    Rank,
    Recipe,
    Resting,
    algorithm,
    in_process,
    iterate,
    on_ray,
    trained,
)

EVENTS = int(os.environ.get("CHAOS_EVENTS", "8"))
"""``make chaos`` makes it 200."""
RECIPES = {
    "ppo": Recipe(
        PPO_CONFIG,
        rollout_workers=2,
        reference_workers=1,
        shaped=True,
        reward_workers=1,
        weights="broadcast",
    ),
    "ppo, workers join": Recipe(
        PPO_CONFIG, rollout_workers=1, shards_per_worker=4, weights="broadcast"
    ),
    "grpo": Recipe(GRPO_CONFIG, rollout_workers=2, feature_workers=1),
}


def disturb(flow: OnPolicyFlow, events: int, seed: int, done: threading.Event) -> None:
    """SIGKILL to random workers, some of them still starting, others at work. They block SIGTERM (``runtime/ray/cluster.py``)."""
    every = (flow.rollouts, flow.rewards, flow.references, flow.features)
    pools: list[Pool] = [pool for pool in every if pool is not None]
    chance = random.Random(seed)
    for _ in range(events):
        time.sleep(chance.uniform(0.0, 0.4))
        while not (
            alive := [each.pid for pool in pools for each in list(pool.introduced.values())]
        ):
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.kill(chance.choice(alive), signal.SIGKILL)
    done.set()


Metrics = list[dict[str, float]]


def run_until(
    flow: OnPolicyFlow, recipe: Recipe, done: Callable[[], bool], before: Metrics | None = None
) -> Metrics:
    """Run at least two iterations, and add their metrics to ``before``; return the metrics of all."""
    subject = algorithm(recipe.config)
    found = [] if before is None else before
    first = len(found)
    while len(found) < first + 2 or not done():
        flow.begin(len(found))
        subject.iteration(flow)
        found.append(flow.metrics)
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "ppo" else pytest.mark.nightly)
        for name in RECIPES
    ],
)
def test_lost_workers_do_not_change_the_weights(name: str, cluster: None) -> None:
    recipe = RECIPES[name]
    done = threading.Event()
    said = list[str]()
    joins = "join" in name
    with on_ray(
        recipe, said.append, replace(CLUSTER, most_rollout_workers=4 if joins else None)
    ) as flow:
        threading.Thread(
            target=disturb, args=(flow, -(-EVENTS // len(RECIPES)), 1, done), daemon=True
        ).start()
        metrics = run_until(
            flow,
            recipe,
            lambda: done.is_set() and (not joins or any("joins" in line for line in said)),
        )
        found = trained(flow)
    undisturbed = in_process(recipe)
    iterate(undisturbed, recipe, len(metrics))
    for key, value in trained(undisturbed).items():
        assert torch.equal(found[key], value), key
    lost = sum(
        each.get(f"faults/{role}", 0)
        for each in metrics
        for role in ("rollout", "reward", "reference", "feature")
    )
    assert joins or (lost >= 1 and max(each["faults/recovery_s"] for each in metrics) > 0)


@pytest.mark.nightly
def test_a_worker_that_hangs_is_replaced(cluster: None) -> None:
    recipe = Recipe(PPO_CONFIG, rollout_workers=2, weights="broadcast")
    said = list[str]()
    with on_ray(recipe, said.append, replace(CLUSTER, heartbeat_s=4.0)) as flow:
        while len(flow.rollouts.introduced) < 2:
            time.sleep(0.05)
        stopped = flow.rollouts.introduced[1].pid
        os.kill(stopped, signal.SIGSTOP)
        iterate(flow, recipe)
        found = trained(flow)
        assert "rollout 1 did not answer for 4 s: replaced, its work is repeated" in said
        deadline = time.monotonic() + 60
        while Path(f"/proc/{stopped}").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not Path(f"/proc/{stopped}").exists()
    undisturbed = in_process(recipe)
    iterate(undisturbed, recipe)
    assert all(torch.equal(found[key], value) for key, value in trained(undisturbed).items())


@pytest.mark.slow
def test_workers_that_join_and_leave(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is room, and without counting as faults."""
    monkeypatch.setattr(
        publisher, "Order", partial(Order, timeout_s=20.0)
    )  # a busy machine needs it to form a group
    monkeypatch.setattr(publisher, "TIMEOUT_S", 20.0)
    recipe = Recipe(PPO_CONFIG, rollout_workers=1, shards_per_worker=4, weights="broadcast")
    said = list[str]()
    with on_ray(
        recipe, said.append, replace(CLUSTER, most_rollout_workers=3, max_restarts=0)
    ) as flow:
        pool = flow.rollouts
        deadline = time.monotonic() + 250

        def joined(workers: int) -> Callable[[], bool]:
            def now() -> bool:
                assert time.monotonic() < deadline, said
                time.sleep(0.05)
                return sum("joins" in line for line in said) >= workers

            return now

        def received() -> bool:
            assert time.monotonic() < deadline, (said, metrics[-1])
            return (
                metrics[-1].get("weights/received") == 3
            )  # a broadcast that is late on a busy machine is left out

        metrics = run_until(flow, recipe, joined(2))
        assert pool.size == 3
        os.kill(pool.introduced[1].pid, signal.SIGKILL)
        run_until(flow, recipe, joined(3), metrics)
        run_until(flow, recipe, received, metrics)  # workers that joined get a broadcast
        found = trained(flow)
    assert any("rollout 1" in line and "it leaves, its work is repeated" in line for line in said)
    assert not any(each["faults/rollout"] for each in metrics)
    undisturbed = in_process(recipe)
    iterate(undisturbed, recipe, len(metrics))
    assert all(torch.equal(found[key], value) for key, value in trained(undisturbed).items())


@pytest.mark.slow
def test_a_role_that_keeps_dying_ends_the_run(cluster: None) -> None:
    recipe = Recipe(PPO_CONFIG)
    with on_ray(recipe, cluster=replace(CLUSTER, max_restarts=0)) as flow:
        os.kill(flow.rollouts.introduced[0].pid, signal.SIGKILL)
        with pytest.raises(
            RuntimeError,
            match="rollout workers were lost 1 times, the last time because rollout 0 was lost",
        ):
            iterate(flow, recipe)


@pytest.mark.slow
def test_a_lost_trainer_is_reported(cluster: None) -> None:
    recipe = Recipe(PPO_CONFIG)
    with on_ray(recipe) as flow:
        iterate(flow, recipe, 1)
        os.kill(flow.trainers.worker_info.pid, signal.SIGKILL)
        with pytest.raises(TrainerLost, match="trainer 0 was lost"):
            iterate(flow, recipe)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_lost_rank_is_noticed_while_the_first_waits_for_it(cluster: None) -> None:
    import ray

    actors = [
        ray.remote(num_cpus=0, concurrency_groups={"health": 1})(Rank).remote() for _ in range(2)
    ]
    trainers = Trainers(actors, CLUSTER)
    (_,), (second,) = trainers.call("ready")
    with pytest.raises(TrainerLost, match="trainer 1 was lost"):
        trainers.call("update", second.pid)
    trainers.close()


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_without_end_are_named(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for them, which is longer than ``start_timeout_s``, is shortened here."""
    import ray

    def impatient(
        actor: Any, refs: Sequence[Any], times: ClusterConfig, what: str, unless: Sequence[Any] = ()
    ) -> list[Any]:
        if times.call_timeout_s > CLUSTER.start_timeout_s:
            times = replace(times, heartbeat_s=4.0, call_timeout_s=0.0)
        return wait(actor, refs, times, what, unless)

    monkeypatch.setattr("rlinf_vla.runtime.ray.trainers.wait", impatient)
    kind = ray.remote(num_cpus=0, concurrency_groups={HEALTH: 1})(Apart)
    actors = [kind.remote() for _ in range(2)]
    with pytest.raises(UserError) as caught:
        Trainers(actors, CLUSTER)
    for actor in actors:
        ray.kill(actor)
    line = str(caught.value)
    assert "rank 0 at 10.0.0.1, rank 1 at 10.0.0.1 did not connect within 320 s" in line
    assert "set GLOO_SOCKET_IFNAME" in line


@pytest.mark.slow
def test_the_gpu_is_free_only_when_all_workers_have_left_it(cluster: None, tmp_path: Path) -> None:
    """Also those that take longer than ``heartbeat_s``, and the replacement of a lost one."""
    import ray

    kind = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={HEALTH: 1})(Resting)
    said = list[str]()
    pool = Pool(
        "rollout",
        lambda place: kind.remote(tmp_path, place),
        3,
        replace(CLUSTER, heartbeat_s=0.5),
        said.append,
    )
    with closing(pool):
        pool.rest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "died"]
    assert len(said) == 1 and "rollout 1 was lost" in said[0]


@pytest.mark.slow
def test_a_replacement_that_cannot_be_made_ends_the_work(cluster: None, tmp_path: Path) -> None:
    """As when the feature worker that it would ask cannot start."""
    import ray

    kind = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={HEALTH: 1})(Resting)
    made = []

    def spawn(place: int) -> object:
        if made:
            raise UserError("no backbone")
        made.append(kind.remote(tmp_path, 1))
        return made[0]

    with (
        closing(Pool("rollout", spawn, 1, CLUSTER, lambda text: None)) as pool,
        pytest.raises(UserError, match="no backbone"),
    ):
        pool.call("rest")

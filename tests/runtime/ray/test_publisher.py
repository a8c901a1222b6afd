"""What a rollout worker loads: what was broadcast to it, else what is in the object store."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import ray
import torch
from torch import Tensor

from rlinf_vla.runtime.ray import publisher
from rlinf_vla.runtime.ray.broadcast import Order, Outbox
from rlinf_vla.runtime.workers.base import node_address
from rlinf_vla.runtime.workers.rollout import RolloutWorker, Weights
from rlinf_vla.runtime.workers.shards import Packed
from tests.runtime.ray.counting import (
    PPO_CONFIG,
    Recipe,
    builders,
    in_process,
    iterate,
    on_ray,
    trained,
    with_staleness,
)

BROADCAST = Recipe(PPO_CONFIG, rollout_workers=2, weights="broadcast")


def filled(worker: RolloutWorker, value: float) -> dict[str, Tensor]:
    return {
        name: torch.full_like(weight.detach(), value)
        for name, weight in worker.policy.named_parameters()
    }


def loaded(worker: RolloutWorker, weights: Weights) -> float:
    """The value of all of its weights after a rollout with these."""
    worker.collect(weights, 0, 0, 1)
    worker.unmerge()
    (value,) = (
        torch.cat([weight.detach().flatten() for weight in worker.policy.parameters()])
        .unique()
        .tolist()
    )
    return float(value)


def test_a_worker_loads_what_was_broadcast_to_it(cluster: None) -> None:
    worker = RolloutWorker(builders(BROADCAST)["rollout"], 0)
    info = worker.ready()
    outbox = Outbox("cpu", node_address())
    host = node_address()
    me = frozenset({(info.node, info.pid)})

    def published(version: int, generation: int, size: int = 2) -> Weights:
        """1 + version in the store; 101 + version is broadcast."""
        layout = outbox.hold(version, filled(worker, 101.0 + version))
        order = Order(
            outbox.address(), generation, size, version, timeout_s=60.0 if size == 2 else 1.0
        )
        sending = threading.Thread(target=outbox.send, args=(order,))
        sending.start()
        worker.receive(1, order, layout, version)
        sending.join()
        stored = ray.put(Packed.of(filled(worker, 1.0 + version)))
        return Weights(version, None, stored, me)

    assert outbox.address()[0] == host
    first = published(0, 1)
    assert (
        loaded(worker, replace(first, receivers=frozenset({(info.node, info.pid + 1)}))) == 1.0
    ), "it went to another worker"
    assert loaded(worker, first) == 101.0
    assert loaded(worker, first) == 1.0, "as after a rest, when the buffer is used up"
    assert loaded(worker, published(1, 2, size=3)) == 2.0, (
        "a member is missing, so it does not arrive"
    )
    assert loaded(worker, published(2, 3)) == 103.0


@pytest.mark.parametrize(
    ("recipe", "receivers"),
    [
        pytest.param(BROADCAST, 2, id="between rollouts"),
        pytest.param(
            with_staleness(BROADCAST, 1), 2, id="with staleness", marks=pytest.mark.nightly
        ),
        pytest.param(
            replace(BROADCAST, placement="collocated"),
            1,
            id="not to the worker on the trainer's GPU",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_each_broadcast_arrives_and_is_measured(
    recipe: Recipe, receivers: int, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "Order", partial(Order, timeout_s=60.0))
    monkeypatch.setattr(publisher, "TIMEOUT_S", 60.0)
    with on_ray(recipe) as flow:
        while flow.rollouts.size < 2:
            time.sleep(0.05)
        metrics = iterate(flow, recipe)
        found = trained(flow)
    undisturbed = in_process(recipe)
    iterate(undisturbed, recipe)
    assert all(torch.equal(found[key], value) for key, value in trained(undisturbed).items())
    for each in metrics:
        assert (each["weights/received"], each["weights/missed"]) == (receivers, 0)
        assert each["weights/broadcast_s"] > 0 and 0 <= each["weights/overlap"] <= 1


@pytest.mark.slow
def test_weights_arrive_while_rollouts_go_on(cluster: None) -> None:
    """Slow rollouts of a stale version last longer than the update that makes the next one."""
    recipe = replace(with_staleness(BROADCAST, 1), slow=True)
    with on_ray(recipe) as flow:
        while flow.rollouts.size < 2:
            time.sleep(0.05)
        metrics = iterate(flow, recipe)
    assert any(each["weights/overlap"] > 0 for each in metrics)

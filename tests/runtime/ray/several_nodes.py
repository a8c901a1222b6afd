"""A run on several Ray nodes of this machine, of which some leave after a notice: for test_leaving.py.

python -m tests.runtime.ray.several_nodes prints what happened and a digest of the weights, as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.open import launch_workers
from rlinf_vla.runtime.ray.places import Role
from tests.runtime.ray.counting import (
    CLUSTER,
    NUM_ENVS,
    PPO_CONFIG,
    SETTINGS,
    Recipe,
    algorithm,
    builders,
    one_thread,
    roles,
    trained,
)
from tests.runtime.ray.two_nodes import digest

RECIPE = Recipe(PPO_CONFIG, rollout_workers=2, shards_per_worker=2)
TRAIN, ROLL = "train", "roll"


def tell_to_leave(node: Any) -> None:
    """Send the notice that Ray's autoscaler sends before a preemption."""
    import ray
    from ray.core.generated import autoscaler_pb2

    why = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(1000 * (time.time() + 300))
    accepted, problem = ray._private.worker.global_worker.gcs_client.drain_node(
        node.node_id, why, "preempted", deadline_ms
    )
    assert accepted, problem


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {ROLL: 1}, "include_dashboard": False},
    )
    training = cluster.add_node(num_cpus=1, resources={TRAIN: 1})
    leaving = cluster.add_node(num_cpus=1, resources={ROLL: 1})
    wanted = roles(RECIPE) | {
        "trainer": Role(count=1, cpus=0.1, resources={TRAIN: 1.0}),
        "rollout": Role(count=2, cpus=0.1, resources={ROLL: 1.0}),
    }
    config = replace(
        CLUSTER,
        shards_per_worker=RECIPE.shards_per_worker,
        max_restarts=0,
        spread=True,
        most_rollout_workers=3,
    )
    said = list[str]()
    found = dict[str, Any]()
    with (
        connect_cluster(cluster.address, wanted, said.append),
        launch_workers(builders(RECIPE), wanted, config, said.append) as workers,
        closing(OnPolicyFlow(workers, NUM_ENVS, SETTINGS)) as flow,
        one_thread(),
    ):
        subject = algorithm(RECIPE.config)
        iterations = 0

        def iterate_until(done: Callable[[], bool]) -> None:
            nonlocal iterations
            while not done():
                flow.begin(iterations)
                subject.iteration(flow)
                iterations += 1

        def nodes() -> set[str]:
            return {each.node_id for each in flow.rollouts.introduced.copy().values()}

        iterate_until(lambda: iterations >= 1 and len(nodes()) == 2)
        assert leaving.node_id in nodes()
        tell_to_leave(leaving)
        before = iterations
        iterate_until(lambda: leaving.node_id not in nodes() and iterations >= before + 2)
        found["workers after the notice"] = len(nodes())
        cluster.remove_node(leaving, allow_graceful=False)
        joined = cluster.add_node(num_cpus=1, resources={ROLL: 1})
        iterate_until(lambda: joined.node_id in nodes())
        another = cluster.add_node(num_cpus=1, resources={ROLL: 1})
        iterate_until(lambda: {joined.node_id, another.node_id} <= nodes())
        found["workers after others joined"] = len(nodes())
        tell_to_leave(another)
        iterate_until(lambda: another.node_id not in nodes())
        found["trainer leaves"] = [flow.will_leave()]
        tell_to_leave(training)
        found["trainer leaves"].append(flow.will_leave())
        before = iterations
        iterate_until(lambda: iterations > before)
        found |= {
            "said": said,
            "faults": flow.rollouts.faults,
            "iterations": iterations,
            "digest": digest(trained(flow)),
        }
    print(json.dumps(found))
    cluster.shutdown()


if __name__ == "__main__":
    main()

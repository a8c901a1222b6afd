"""A run on the Ray cluster at ADDRESS, for test_two_nodes.py: prints events, and finally a digest of its weights, as JSON lines.

python -m tests.runtime.ray.two_nodes ADDRESS ITERATIONS RESOURCE CPUS

CPUS: of each rollout worker. ITERATIONS=0: until its standard input ends.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

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
    roles,
    trained,
)

RECIPE = Recipe(PPO_CONFIG, rollout_workers=2)
QUICK = replace(CLUSTER, heartbeat_s=5.0, start_timeout_s=90.0, spread=True, weights="broadcast")


def tell(**event: Any) -> None:
    # One system call, because several threads write, and print() writes the end of the line separately.
    os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")


def digest(weights: dict[str, Tensor]) -> str:
    return hashlib.sha256(
        b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    ).hexdigest()


def main(address: str, iterations: int, resource: str, cpus: float) -> None:
    """``resource``: custom resource of each rollout worker; "" for none."""
    ended = threading.Event()
    if not iterations:
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    wanted = roles(RECIPE)
    wanted["trainer"] = Role(count=1, cpus=0.5, resources={"near": 1.0})
    if resource or cpus:
        wanted["rollout"] = Role(
            count=2, cpus=cpus or 0.5, resources={resource: 1.0} if resource else {}
        )
    say = partial(tell, kind="said")
    with (
        connect_cluster(address, wanted, lambda text: say(text=text)),
        launch_workers(builders(RECIPE), wanted, QUICK, lambda text: say(text=text)) as workers,
        closing(OnPolicyFlow(workers, NUM_ENVS, SETTINGS, iterations=iterations or None)) as flow,
    ):
        subject = algorithm(RECIPE.config)
        while len(flow.rollouts.introduced) < RECIPE.rollout_workers:
            time.sleep(0.1)
        for iteration in itertools.count() if not iterations else range(iterations):
            if ended.is_set():
                break
            started = time.monotonic()
            flow.begin(iteration)
            subject.iteration(flow)
            workers_now = flow.rollouts.introduced.copy().values()
            nodes = sorted({each.node for each in workers_now})
            pids = [each.pid for each in workers_now]
            ids = {each.node: each.node_id for each in workers_now}
            sent = {
                name.partition("/")[2]: flow.metrics[name]
                for name in ("weights/received", "weights/missed")
            }
            tell(
                kind="iteration",
                number=iteration,
                seconds=time.monotonic() - started,
                nodes=nodes,
                pids=pids,
                ids=ids,
                **sent,
            )
        tell(kind="weights", digest=digest(trained(flow)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))

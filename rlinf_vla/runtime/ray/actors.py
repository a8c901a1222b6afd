"""What the actors of a cluster have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEALTH, WEIGHTS = "health", "weights"
"""Concurrency groups in which a worker answers ``ping`` and moves weights while it works."""
START_S = 60.0
"""Seconds for a process to start before it must answer."""


def call_with_restart(
    actor: Any, method: str, arguments: tuple[Any, ...], heartbeat_s: float
) -> Any:
    """Call ``method`` of an actor that Ray restarts itself; kill one that hangs, and retry."""
    import ray
    from ray import exceptions

    while True:
        ref = getattr(actor, method).remote(*arguments)
        try:
            while not ray.wait([ref], timeout=heartbeat_s)[0]:
                ray.get(
                    actor.ping.options(concurrency_group=HEALTH).remote(),
                    timeout=heartbeat_s + START_S,
                )
            return ray.get(ref)
        except exceptions.GetTimeoutError:
            ray.kill(actor, no_restart=False)
        except exceptions.ActorUnavailableError:
            continue


def rest(actors: Sequence[Any], heartbeat_s: float) -> None:
    """Move idle workers off the GPU; the replacement of a lost one starts independently."""
    import ray

    waiting = [actor.rest.remote() for actor in actors]
    ray.wait(waiting, num_returns=len(waiting), timeout=heartbeat_s)


def restarted(actors: Sequence[Any], pids: dict[int, int], heartbeat_s: float) -> int:
    """Count actors that Ray restarted since the last call, which left their process ids in
    ``pids``; those that are starting count later."""
    import ray
    from ray import exceptions

    lost = 0
    for number, actor in enumerate(actors):
        try:
            pid = ray.get(actor.pid.options(concurrency_group=HEALTH).remote(), timeout=heartbeat_s)
        except (exceptions.RayActorError, exceptions.GetTimeoutError):
            continue
        lost += pids.setdefault(number, pid) != pid
        pids[number] = pid
    return lost

"""Machines of a Ray cluster that will leave it soon."""

from __future__ import annotations

from collections.abc import Collection


def leaving_nodes() -> Collection[str]:
    """Return the ids of the nodes that were told to leave (Ray's drain).

    The autoscaler tells them before a preemption, and SIGTERM tells one that was started with `ray
    start --block`. Ray places nothing new on them, and their workers work on until they end.
    """
    from ray._private.state import state  # Ray has no public function for it

    draining_nodes: dict[str, int] = state.get_draining_nodes()
    return draining_nodes.keys()

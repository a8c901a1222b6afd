"""Add rollout workers to a run while the cluster has room for more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlinf_vla.runtime.ray.places import Role, bundles_of, request
from rlinf_vla.runtime.ray.pool import Pool


class Growth:
    """A standing request for the place of one more worker, which Ray's autoscaler sees, too."""

    def __init__(self, pool: Pool, role: Role, most: int, spawn: Callable[..., Any]) -> None:
        """``most``: workers in all. ``spawn(place, options=...)``: new actor with these options."""
        self._pool = pool
        self._roles = {pool.role: role.one_more()}
        self._spawn = spawn
        self._additional = most - role.count
        self._request: Any = None

    def look(self) -> None:
        """Start workers for which there is room now; their start is not waited for."""
        import ray
        from ray.util.placement_group import remove_placement_group

        while self._pool.additional < self._additional:
            if self._request is None:
                self._request = request(bundles_of(self._roles), self._roles, "PACK")
            group, places = self._request
            if not ray.wait([group.ready()], timeout=0)[0]:
                return
            self._request = None
            (options,) = places.values()
            self._pool.add(
                partial(self._spawn, options=options), partial(remove_placement_group, group)
            )

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._request is not None:
            remove_placement_group(self._request[0])

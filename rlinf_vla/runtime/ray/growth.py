"""Add rollout workers to a run while the cluster has room for more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlinf_vla.runtime.ray.places import Role
from rlinf_vla.runtime.ray.pool import Pool


class Growth:
    """A standing request for the place of one more worker, which Ray's autoscaler sees, too."""

    def __init__(self, pool: Pool, role: Role, most: int, spawn: Callable[..., Any]) -> None:
        """``most``: workers in all. ``spawn(place, options=...)``: new actor with these options."""
        self._pool, self._role, self._spawn = pool, role, spawn
        self._additional = most - role.count
        self._request: Any = None

    def look(self) -> None:
        """Start workers for which there is room now; their start is not waited for."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        while self._pool.additional < self._additional:
            if self._request is None:
                labels = {"bundle_label_selector": [dict(self._role.labels)]} if self._role.labels else {}
                self._request = placement_group([self._role.alone], **labels)
            if not ray.wait([self._request.ready()], timeout=0)[0]:
                return
            group, self._request = self._request, None
            place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
            options = self._role.options | {"num_gpus": self._role.alone.get("GPU", 0.0), "scheduling_strategy": place}
            self._pool.add(partial(self._spawn, options=options), partial(remove_placement_group, group))

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._request is not None:
            remove_placement_group(self._request)

"""Download what workers load from the Hub, once per machine, before any of them starts.

Otherwise all workers of a machine would ask the Hub at once and wait for each other, within the
time that they have to start, and a line about it would be in their logs only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.base import Say
from rlinf_vla.runtime.ray.places import FEATURE, REWARD, ROLLOUT, nodes_of
from rlinf_vla.runtime.ray.pool import raised_there
from rlinf_vla.runtime.recipes import asset_path

REPORT_S = 60.0
"""Seconds between lines about machines that are not done."""

Places = Mapping[str, Sequence[Mapping[str, Any]]]
"""Role -> options of each of its actors, of ``reserve_places``."""


def download(locations: Sequence[str]) -> None:
    """Download ``locations`` to this machine. Raises UserError."""
    for location in locations:
        asset_path(location)


def download_on_machines(
    locations: Sequence[str], places: Places, limit_s: float, say: Say
) -> None:
    """Download ``locations`` (``hf://ORG/NAME``) on each machine of ``places`` that loads weights.

    Raises UserError if one cannot be downloaded, or not within ``limit_s``.
    """
    import ray
    from ray import exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not locations:
        return
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(download)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    pending = {
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(locations): addresses[node_id]
        for node_id in _machines(places)
    }
    what = " and ".join(locations)
    say(f"downloading {what} to {', '.join(pending.values())}, unless it is there")
    started = time.monotonic()
    while pending:
        ready, _ = ray.wait(list(pending), timeout=min(REPORT_S, limit_s))
        seconds = time.monotonic() - started
        if not ready:
            machines = ", ".join(pending.values())
            if seconds >= limit_s:
                raise UserError(
                    f"{what} was not downloaded to {machines} within {limit_s:g} s "
                    "(cluster.call_timeout_s): start the run again, which continues the download"
                )
            say(f"{machines}: not downloaded yet, after {seconds:.0f} s")
        for ref in ready:
            address = pending.pop(ref)
            try:
                ray.get(ref)
            except exceptions.RayTaskError as error:
                cause = raised_there(error)
                raise UserError(f"{address}: {cause}") from cause
            except exceptions.RayError as error:  # with its machine, whose workers are replaced
                say(f"{address}: the download was lost ({type(error).__name__})")
            else:
                say(f"{address}: downloaded after {seconds:.0f} s")


def _machines(places: Places) -> list[str]:
    """Return the ids of the nodes whose workers load weights."""
    without = {REWARD, ROLLOUT} if places.get(FEATURE) else {REWARD}  # a head gets them by message
    loading = [
        options for role, every in places.items() if role not in without for options in every
    ]
    return list(dict.fromkeys(nodes_of(loading)))

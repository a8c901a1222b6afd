"""Form the process group of the trainer ranks, or say in one line which of them do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.errors import UserError

dist: Any = torch.distributed
"""Its annotations lack the stores."""


def join(
    meeting_point: tuple[str, int],
    place: int,
    size: int,
    address: str,
    cluster: ClusterConfig,
    store: Any = None,
) -> Any:
    """Join the group of ``size`` trainer ranks as rank ``place``; return the store where they met.

    ``meeting_point``: of the first rank's ``store``, which only that rank has. ``address``: of this
    machine. Raises UserError if a rank does not come within ``cluster.start_timeout_s``, or if they
    cannot connect to each other.
    """
    backend = _backend(cluster)
    host, port = meeting_point
    patience = timedelta(seconds=cluster.start_timeout_s)
    limit = f"within {cluster.start_timeout_s:g} s (cluster.start_timeout_s)"
    try:
        if store is None:
            store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=patience
            )
        store.set(_here(place), address)
        store.wait([_here(rank) for rank in range(size)], patience)
    except dist.DistNetworkError:
        why = f"rank {place} at {address} did not reach rank 0 at {host}:{port} {limit}"
        raise not_formed(why, cluster) from None
    except dist.DistStoreError:
        missing = [rank for rank in range(size) if not store.check([_here(rank)])]
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {size}"
        raise not_formed(f"{who} did not come to {host}:{port} {limit}", cluster) from None
    every = located([store.get(_here(rank)).decode() for rank in range(size)])
    timeout = timedelta(seconds=cluster.call_timeout_s)
    store.set_timeout(timeout)  # of each wait for another rank
    try:
        dist.init_process_group(backend, store=store, rank=place, world_size=size, timeout=timeout)
        # NCCL connects its ranks in their first collective
        dist.all_reduce(torch.zeros(1, device=cluster.torch_device))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise not_formed(f"{every} do not connect over {backend} ({reason})", cluster) from None
    return store


def not_formed(why: str, cluster: ClusterConfig) -> UserError:
    variable = f"{_backend(cluster).upper()}_SOCKET_IFNAME"
    return UserError(
        f"the trainer ranks formed no process group: {why}: open all ports between their machines, or set {variable} "
        "in this shell to the network interface that connects them (docs/training_ranks.md)"
    )


def located(addresses: Sequence[str]) -> str:
    """Return the ranks with the addresses of their machines, for messages."""
    return ", ".join(f"rank {rank} at {address}" for rank, address in enumerate(addresses))


def _backend(cluster: ClusterConfig) -> str:
    return str(dist.get_default_backend_for_device(cluster.torch_device))


def _here(rank: int) -> str:
    return f"here/{rank}"

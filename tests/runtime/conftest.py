from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from rlinf_vla.runtime.ray.cluster import connect_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray cluster, shared because its start is slow; no process can be in two clusters."""
    before = signal.getsignal(signal.SIGTERM)  # signal handlers that Ray replaces
    with connect_cluster(None, {}, lambda text: None, fake_gpus=8):
        yield
    signal.signal(signal.SIGTERM, before)

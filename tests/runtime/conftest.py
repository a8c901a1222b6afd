from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from rlinf_vla.runtime.ray.cluster import connect_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine's own; its start takes longer than most tests, and no process can be in two clusters."""
    before = signal.getsignal(signal.SIGTERM)  # which Ray takes over
    with connect_cluster(None, {}, lambda text: None):
        yield
    signal.signal(signal.SIGTERM, before)

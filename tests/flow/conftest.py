from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlinf_vla.flow.on_ray.cluster import connected


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine's own; its start takes longer than most tests."""
    with connected(None, {}, lambda text: None):
        yield

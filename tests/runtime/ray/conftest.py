"""A cluster of two nodes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.runtime.ray.namespaces import Nodes, namespaces

dist.TCPStore(
    "127.0.0.1", 0, is_master=True, wait_for_workers=False
)  # PyTorch keeps a pipe open from the first one on: no test's leak


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Skips if namespaces cannot be created."""
    if "RLINF_VLA_CLUSTER_TEST" not in os.environ:
        pytest.skip("takes minutes and root's rights: make cluster-test")
    with ExitStack() as stack:
        try:
            stack.enter_context(namespaces())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        made = Nodes(tmp_path)
        stack.callback(made.close)
        for name in ("rlinf_near", "rlinf_far"):
            stack.callback(made.kill, name)
        made.start_near()
        made.start_far()
        yield made

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch is imported anywhere: one thread is the fastest for tiny tensors, and what subprocesses inherit.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# As flow/on_ray/cluster.py does for the process that first connects to a cluster.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.conformance and the other helpers, however pytest is started

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.conformance.policy", "tests.conformance.vector_env")

from tests.leaks import nothing_is_left_behind, pytest_fixture_setup, temporary_folder  # noqa: E402, F401

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")

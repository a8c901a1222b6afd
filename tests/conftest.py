from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: one thread is the fastest for tiny tensors, and subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# As runtime/ray/cluster.py does for the process that first connects to a cluster.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # for the helpers in tests, however pytest is started
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (sys.path[0], os.environ.get("PYTHONPATH")))
)  # for child processes

import pytest
from hypothesis import Phase, settings

from rlinf_vla.core.channel import Channel
from tests import leaks
from tests.forked import Forked
from tests.purity import Lanes
from tests.record import Costs, Record
from tests.skips import SkipCheck

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.register_profile(
    "without shrinking", settings.get_profile("repeatable"), phases=(Phase.explicit, Phase.generate)
)
"""For tests/mutate.py, which only needs to know that a test fails."""
settings.register_profile("new", deadline=None, max_examples=300)
"""For make test-values: other values with each --hypothesis-seed."""
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-extras",
        action="store_true",
        help="a test that is skipped for want of an extra fails the run",
    )
    parser.addoption(
        "--all-peers",
        action="store_true",
        help="so does a test that is skipped for want of another project's environment",
    )
    parser.addoption(
        "--record", type=Path, metavar="FILE", help="write what was found, for tests/run.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(
        50_000, 20, 50
    )  # a tenth of the time went into looking at the libraries' objects again and again
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # ignored below nohup, also by the commands that tests start
    config.pluginmanager.register(
        leaks, "leaks"
    )  # a hook of this file would not hear of session fixtures
    config.pluginmanager.register(Lanes(), "lanes")
    config.pluginmanager.register(Costs(), "costs")
    if not hasattr(config, "workerinput"):
        record = Record(config, config.getoption("--record"))
        config.pluginmanager.register(record, "record")
        check = SkipCheck(
            config.getoption("--all-extras"), config.getoption("--all-peers"), record.found.refused
        )
        config.pluginmanager.register(check, "skip-check")


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs ``rlinf-vla`` in a process of its own, until it ends."""
    yield (starts := Forked())
    starts.close()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel."""
    ours, theirs = Channel.pair()
    yield (ends := (ours, Channel(theirs)))
    for end in ends:
        end.close()

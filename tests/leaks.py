"""What a test module leaves behind in its process, apart from files in its tmp_path."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Hashable, Iterator
from itertools import chain
from multiprocessing import resource_tracker
from pathlib import Path
from time import sleep  # of a pure test's module, too: tests/lanes.py replaces time.sleep
from typing import Any

import pytest

LASTING = {"cell", "wall_clock_off", "forked"}
"""Session fixtures that keep what they start until the end."""
SET_BY_LIBRARIES = {
    "OpenCV, when it is imported": (
        "LD_LIBRARY_PATH",
        "QT_QPA_FONTDIR",
        "QT_QPA_PLATFORM_PLUGIN_PATH",
    ),
    "Ray, when it is imported or started": ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE"),
    "runtime/ray/cluster.py, before it imports Ray": ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"),
}
"""Environment variables that other libraries change permanently."""
WARP = "wp_pch_"
"""Prefix of the temporary files that Warp's compiler leaves where it has no cache."""
GRACE_S = 60.0
"""Seconds for threads and processes to end. Only a failure waits this long."""

State = dict[str, dict[Hashable, str]]
"""For each kind of resource, the present ones: an identity, and a readable name."""
ADDED = ("thread", "child process", "socket", "pipe", "temporary file")
"""Kinds of which only additions are leaks; of the others, also removals and changed values."""


def state() -> State:
    found: State = {kind: {} for kind in ADDED}
    found["thread"] = {
        thread: thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor"
    }  # one for all bars
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in _text(children).split():
            program = (
                _text(Path("/proc", pid, "cmdline")).replace("\0", " ").strip()
                or "ended, but nobody waited for it"
            )
            found["child process"][pid] = f"{pid} ({program[:100]})"
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # of the listing itself, or closed meanwhile by another thread
            continue
        if (kind := target.partition(":")[0]) in ("socket", "pipe"):
            found[kind][target] = f"{target} (file descriptor {descriptor.name})"
    if "ray" in sys.modules:
        del found["socket"]  # its gRPC keeps some after a shutdown
    found["temporary file"] = {
        path: str(path)
        for path in Path(tempfile.gettempdir()).iterdir()
        if not path.name.startswith(WARP)
    }
    changing = {"PYTEST_CURRENT_TEST", *chain.from_iterable(SET_BY_LIBRARIES.values())}
    found["environment variable"] = {
        pair: pair[0] for pair in os.environ.items() if pair[0] not in changing
    }
    found["current directory"] = {Path.cwd(): str(Path.cwd())}
    # but for Ray's own copies of packages
    found["sys.path"] = {
        tuple(each for each in sys.path if "/ray/" not in each): "order or entries"
    }
    handlers = {
        each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    found["signal handler"] = {(each, handler): each.name for each, handler in handlers.items()}
    if (torch := sys.modules.get("torch")) is not None:
        settings = {
            "default dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "gradients": torch.is_grad_enabled(),
        }
        found["setting of PyTorch"] = {pair: pair[0] for pair in settings.items()}
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread or process has just ended
        return ""


def left_behind(before: State, after: State) -> list[str]:
    """Each as ``kind name``, sorted. A kind that was not known before, as PyTorch's where it is imported later, is not judged."""
    found = set()
    for kind in before.keys() & after.keys():
        old, new = before[kind], after[kind]
        changed = new.keys() - old.keys() if kind in ADDED else new.keys() ^ old.keys()
        found |= {f"{kind} {new.get(each) or old[each]}" for each in changed}
    return sorted(found)


def left_behind_for_good(before: State) -> list[str]:
    """The same for what exists now and remains after garbage collection."""
    until = time.monotonic() + GRACE_S
    while found := left_behind(before, state()):
        if time.monotonic() > until:
            break
        gc.unfreeze()  # a control loop freezes the objects that existed before it
        gc.collect()
        sleep(0.05)
    return found


_BEFORE = pytest.StashKey[State]()


@pytest.fixture(autouse=True, scope="session")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of tests and their processes in a folder of this process's own, so that leaks are seen and removed."""
    tmp_path_factory.getbasetemp()  # remains where pytest has it
    resource_tracker.ensure_running()  # a process that the standard library keeps from the first spawned child or shared memory on
    # The path is short because names of Unix sockets are limited to 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        # PyTorch would make such a folder, and set the variable, when something first imports its compiler; Ray keeps its logs.
        compiled = Path(folder, "torchinductor")
        for kept in (compiled, Path(folder, "ray")):
            kept.mkdir()
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_behind(
    request: pytest.FixtureRequest, temporary_folder: None
) -> Iterator[None]:
    """Fails at the end of a module that leaves something behind."""
    stash = request.config.stash
    stash[_BEFORE] = state()
    yield
    if found := left_behind_for_good(stash[_BEFORE]):
        pytest.fail(f"{request.node.nodeid} leaves behind: {'; '.join(found)}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """What a lasting fixture starts is no leak of the module that happens to be the first to ask for it."""
    if fixturedef.argname not in LASTING or fixturedef.scope != "session":
        return (yield)
    started = state()
    try:
        return (yield)
    finally:
        before = request.config.stash.get(
            _BEFORE, {}
        )  # empty: it is started before the first module's check
        for kind, there in state().items():
            before.setdefault(kind, {}).update(
                {key: name for key, name in there.items() if key not in started.get(kind, {})}
            )

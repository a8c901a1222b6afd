"""Tests of the leak check: it detects each kind of leak and fails the module that leaks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from tests.leaks import left_behind, left_behind_for_good, state

ROOT = Path(__file__).parents[1]


@contextmanager
def a_thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def a_child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.kill()


@contextmanager
def a_zombie() -> Iterator[None]:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield
    os.waitpid(pid, 0)


@contextmanager
def a_socket() -> Iterator[None]:
    with socket.socket():
        yield


@contextmanager
def a_pipe() -> Iterator[None]:
    ends = os.pipe()
    yield
    for end in ends:
        os.close(end)


@contextmanager
def a_temporary_file() -> Iterator[None]:
    with tempfile.NamedTemporaryFile(prefix="forgotten"):
        yield


@contextmanager
def a_signal_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@contextmanager
def other_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@contextmanager
def patched(patch: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        yield


@contextmanager
def another_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def more_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (a_thread, "thread forgotten"),
        (a_child, "input()"),
        (a_zombie, "nobody waited for it"),
        (a_socket, "socket socket:["),
        (a_pipe, "pipe pipe:["),
        (a_temporary_file, "temporary file"),
        (
            lambda: patched(lambda patch: patch.setenv("FORGOTTEN", "1")),
            "environment variable FORGOTTEN",
        ),
        (lambda: patched(lambda patch: patch.delenv("TMPDIR")), "environment variable TMPDIR"),
        (lambda: patched(lambda patch: patch.chdir("/")), "current directory /"),
        (lambda: patched(lambda patch: patch.syspath_prepend("/forgotten")), "sys.path"),
        (a_signal_handler, "signal handler SIGTERM"),
        (another_dtype, "setting of PyTorch default dtype"),
        (more_threads, "setting of PyTorch threads"),
        (other_gradients, "setting of PyTorch gradients"),
    ],
)
def test_each_kind_of_leak_is_detected_and_named(
    leak: Callable[[], AbstractContextManager[object]], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # with it, sockets are not judged
    before = state()
    with leak():
        until = time.monotonic() + 60  # a child has its command line shortly after its start
        found = left_behind(before, state())
        while not any(named in each for each in found):
            assert time.monotonic() < until, found
            found = left_behind(before, state())
    assert left_behind_for_good(before) == []


def test_objects_in_a_reference_cycle_are_no_leak() -> None:
    class Holder:
        """Ends its thread when it is garbage-collected."""

        def __init__(self) -> None:
            self.itself = self
            end = threading.Event()
            threading.Thread(target=end.wait).start()
            weakref.finalize(self, end.set)

    before = state()
    Holder()
    assert left_behind_for_good(before) == []


CONFTEST = """
import os
import pytest
from tests import leaks
from tests.leaks import nothing_is_left_behind, pytest_fixture_setup, temporary_folder

leaks.GRACE_S = 1.0

@pytest.fixture(scope="session")
def cell():
    os.environ["OF_THE_CELL"] = "1"
    yield
    del os.environ["OF_THE_CELL"]
"""
MODULES = {
    "test_clean": "def test_it(monkeypatch): monkeypatch.setenv('CLEAN', '1')",
    "test_leaking": "import os\ndef test_it(): os.environ['FORGOTTEN'] = '1'",
    "test_lasting": "import os\ndef test_it(request): request.getfixturevalue('cell')\ndef test_again(cell): pass",
}


def test_a_module_that_leaks_fails_by_name(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    # Without -rN the summary repeats the message, truncated unless CI is set.
    options = [
        "-rN",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "--basetemp",
        "temporary",
    ]
    command = [sys.executable, "-m", "pytest", *options, "."]
    said = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    ).stdout
    assert "test_leaking.py leaves behind: environment variable FORGOTTEN\n" in said
    assert said.count(" leaves behind: environment") == 1 and "4 passed, 1 error" in said, said

"""Ctrl-C, SIGTERM and a closed terminal, at any moment of a command in a separate process."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Counting
from tests.cli.counting_plugins import announce
from tests.skips import needs

ROOT = Path(__file__).parents[2]
AT_AN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), {signum})
sys.meta_path.insert(0, Finder())
"""
"""A module during whose import the signal arrives, while the interpreter is at work."""
IN_A_DESTRUCTOR = """
import os, signal, sys
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), {signum})
        for _ in range(1000):
            pass
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            Dropped()
sys.meta_path.insert(0, Finder())
"""
"""A place where an exception would only be printed."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(counting: Counting, tmp_path: Path) -> Start:
    """Starts a command line as the installed program does; ``before`` runs first, and ``options`` are ``Popen``'s."""
    announce(tmp_path / "package")
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path / 'package'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(arguments: list[str], before: str = "", **options: object) -> subprocess.Popen[str]:
        (tmp_path / "program").write_text(before + "from rlinf_vla.cli.main import main\nmain()\n")
        command = options.pop("args", [sys.executable, str(tmp_path / "program"), *arguments])
        pipes: dict[str, object] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
        }
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, **(pipes | options)
        )  # type: ignore[call-overload]

    return run


@pytest.mark.parametrize("moment", [AT_AN_IMPORT, IN_A_DESTRUCTOR])
@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("torch", signal.SIGINT),
        ("hydra", signal.SIGHUP),
        ("rlinf_vla.config.recipe", signal.SIGTERM),
    ],
)
def test_a_signal_during_imports_is_one_line(
    start: Start, counting: Counting, moment: str, module: str, signum: signal.Signals
) -> None:
    program = start(
        counting.arguments("train", "counting_ppo"), moment.format(name=module, signum=int(signum))
    )
    out, err = program.communicate(timeout=250)
    assert (out, err, program.returncode) == (
        "",
        f"rlinf-vla: interrupted by {signum.name}\n",
        128 + signum,
    )


def test_few_modules_are_imported_before_signals_are_handled() -> None:
    """Until then, Ctrl-C prints Python's traceback."""
    code = "import sys\nbefore = set(sys.modules)\nimport rlinf_vla.cli.main\nprint(*set(sys.modules) - before)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.split(".")[0] for name in found} <= {"rlinf_vla", *sys.stdlib_module_names}


LONG = (
    "env=counter_processes",
    "run_dir=run",
    "iterations=100000",
    "evaluation.before_and_after=false",
    "checkpoints.every=100000",
)


def wait_for(condition: Callable[[], object], program: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 250
    while not condition():
        assert program.poll() is None and time.monotonic() < deadline, program.poll()
        time.sleep(0.02)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of one."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_closed_terminal_ends_with_a_checkpoint(
    start: Start, counting: Counting, tmp_path: Path, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    program = start(
        counting.arguments("train", "counting_ppo", *LONG),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    os.set_blocking(ours, False)

    def has_learnt() -> bool:
        with contextlib.suppress(OSError):
            os.read(ours, 1 << 16)  # without a reader the process would block
        metrics = tmp_path / "run" / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("\n") >= 2

    wait_for(has_learnt, program)
    os.close(ours)
    assert program.wait(timeout=250) == 128 + signal.SIGHUP
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (checkpoint / "COMPLETE").exists()


def _take_terminal() -> None:
    """In a separate session, which receives the hang-up of its terminal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.nightly
def test_below_nohup_a_closed_terminal_is_ignored(
    start: Start, counting: Counting, tmp_path: Path
) -> None:
    before = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    program = start(counting.arguments("train", "counting_ppo", *LONG), before)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(metrics.exists, program)
        program.send_signal(signal.SIGHUP)
        lines = metrics.read_text().count("\n")
        wait_for(lambda: metrics.read_text().count("\n") > lines + 1, program)
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=250) == 128 + signal.SIGTERM
    finally:
        program.kill()
        program.communicate()


@pytest.mark.slow
def test_a_signal_during_an_evaluation_keeps_the_iterations_before_it(
    start: Start, counting: Counting, tmp_path: Path
) -> None:
    """The evaluation is made again on resume."""
    keys = (
        "run_dir=run",
        "iterations=3",
        "evaluation.before_and_after=false",
        "evaluation.every=1",
        "checkpoints.every=100",
    )
    program = start(counting.arguments("train", "counting_ppo", *keys, "episodes=100000"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, program)
    program.send_signal(signal.SIGTERM)
    out, _ = program.communicate(timeout=250)
    assert program.returncode == 128 + signal.SIGTERM and "stopped after iteration 1" in out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    program = start(counting.arguments("train", "counting_ppo", *keys, "episodes=2", "resume=auto"))
    out, err = program.communicate(timeout=250)
    assert program.returncode == 0, err
    assert sorted(path.name for path in (tmp_path / "run" / "evaluation").iterdir()) == [
        "step_000001.json",
        "step_000002.json",
    ]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@needs("ray")
def test_sigterm_to_all_processes_of_a_run_on_ray_leaves_a_checkpoint(
    start: Start, counting: Counting, tmp_path: Path
) -> None:
    """As Slurm and systemd send it."""
    program = start(
        counting.arguments("train", "counting_ppo", *LONG, "cluster.runtime=ray"),
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, program)
        os.killpg(program.pid, signal.SIGTERM)
        out, err = program.communicate(timeout=250)
        assert program.returncode == 128 + signal.SIGTERM, out + err
        (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
        assert (checkpoint / "COMPLETE").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_documented_job_script_leaves_a_checkpoint(
    start: Start, counting: Counting, tmp_path: Path
) -> None:
    """The signal goes to its shell alone, as by Slurm's ``--signal=B:``."""
    (script,) = re.findall(
        r"```bash\n(#!/bin/bash\n#SBATCH.*?)```",
        (ROOT / "docs" / "guides" / "resume.md").read_text(),
        re.DOTALL,
    )
    words = " ".join(counting.arguments("train", "counting_ppo", *LONG, "resume=auto"))
    run = f"{sys.executable} {tmp_path / 'program'} {words}"
    documented = "rlinf-vla train recipe=maniskill_ppo run_dir=runs/a resume=auto"
    assert documented in script
    (tmp_path / "job").write_text(script.replace(documented, run))
    program = start([], args=["bash", str(tmp_path / "job")])
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, program)
    program.send_signal(signal.SIGTERM)
    assert program.wait(timeout=250) == 128 + signal.SIGTERM
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (checkpoint / "COMPLETE").exists()
    program.communicate()

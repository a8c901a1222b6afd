from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from rlinf_vla.telemetry.console import TrainingConsole, duration, progress_on, say, stages
from tests.unread import unread

METRICS = {
    "rollout/success_once": 0.4375,
    "rollout/reward_mean": 0.5,
    "throughput/steps_per_s": 1234.4,
    "timing_s/iteration": 20.0,
}


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingConsole(total_iterations=3) as console:
        console.resume(1)
        console.say("checkpoint [bold]step_000001[/bold]")
        console.stage("rollout", 0.5)
        console.update(2, METRICS)
        console.update(3, {})
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\r" not in output
    assert output.splitlines() == [
        "checkpoint [bold]step_000001[/bold]",
        "iteration 2/3  success 43.8 %  20 s left  reward 0.5  1,234 steps/s",
        "iteration 3/3",
    ]


def test_any_text_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A fault at a robot may contain whatever a policy's error contains."""
    say("fault: \ud800\x1b[31m")
    assert capsys.readouterr().out == "fault: \\ud800\\x1b[31m\n"


def test_stages_become_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with stages() as report:
        for stage in ("before (sampled)", "before (greedy)"):
            for index in range(250):
                report(stage, (index + 1) / 250)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert lines[0] == "before (sampled) 10%" and lines[-1] == "before (greedy) 100%"


def test_time_left_is_estimated_from_the_latest_iterations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TrainingConsole(total_iterations=200) as console:
        console.resume(100)
        console.update(101, {"timing_s/iteration": 1000.0})
        for iteration in range(102, 112):
            console.update(iteration, {"timing_s/iteration": 30.0})
    assert capsys.readouterr().out.splitlines()[-1] == "iteration 111/200  44 min left"


def test_time_left_is_no_longer_than_the_session(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingConsole(total_iterations=100_000, seconds=1800) as console:
        for iteration in range(1, 4):
            console.update(iteration, {"timing_s/iteration": 300.0})
    assert capsys.readouterr().out.splitlines()[-1] == "iteration 3/100000  15 min left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (99, "99 s"),
        (100, "2 min"),
        (5400, "90 min"),
        (11_100, "3 h 05 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


UNREAD = """
import sys
from rlinf_vla.telemetry.console import TrainingConsole, stages
print("not written yet")
sys.stdin.read()
with stages() as report:
    report("learning", 0.5)  # report
with TrainingConsole(10) as console:
    console.update(1, {})  # update
    console.say("stopped after iteration 1")
print("read by nobody either", flush=True)
print("the checkpoint is written", file=sys.stderr)
"""


@pytest.mark.parametrize("silent", [(), ("report",), ("report", "update")])
def test_work_continues_after_its_output_is_closed(silent: tuple[str, ...]) -> None:
    """As when Ctrl-C ends ``| tee log``, for any first writer."""
    program = UNREAD
    for name in silent:
        program = re.sub(rf"\S.*  # {name}\n", "pass\n", program)
    assert unread(program) == ("the checkpoint is written\n", 0)


CLOSED = """
import sys, time
from rlinf_vla.telemetry.console import TrainingConsole, stages
with stages() as report:
    report("learning", 0.5)
    with TrainingConsole(10) as console:
        console.update(1, {"rollout/success_once": 0.25})
        console.say("a line above")
        sys.stdin.read()
        console.say("stopped after iteration 1")
        print("a line of another module", flush=True)
        console.update(2, {})
    report("saving", 0.5)
print("a last line", flush=True)
print("said on the terminal", file=sys.stderr)
open(sys.argv[1], "w").write("the checkpoint is written")
"""


def test_work_continues_after_its_terminal_is_closed(tmp_path: Path) -> None:
    """No SIGHUP reaches a job that is not of the terminal's session, or a disowned one."""
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-c", CLOSED, str(tmp_path / "saved")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal, env=environment
    )
    assert process.stdin is not None
    os.close(terminal)
    try:
        output = _read_until(screen, "a line above")
        assert "\x1b[?25l" in output  # a live line
        os.close(screen)
        process.stdin.close()
        assert process.wait(timeout=HANG_S) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "saved").read_text() == "the checkpoint is written"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, "success 43.8 % · 3 h 05 min left · reward 0.123 · 1,234 steps/s"),
        (80, "success 43.8 % · 3 h 05 min left"),
        (60, "success 43.8 %"),
    ],
)
def test_a_live_line_fits_the_terminal(width: int, shown: str) -> None:
    """The status is cut off at its end."""
    terminal = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    display = progress_on(terminal)
    status = "success 43.8 % · 3 h 05 min left · reward 0.123 · 1,234 steps/s"
    display.add_task("train", total=100, completed=14, stage="before 45%", status=status)
    with terminal.capture() as captured:
        terminal.print(display.get_renderable())
    (line,) = captured.get().splitlines()
    assert len(line) <= width and "14/100 before 45%" in line and shown in line
    assert ("━" in line) == (width >= 80) and (status in line) == (width == 200)
    display.add_task(
        f"part 1 of 2, {'libero_object ' * 9}", total=100, completed=14, stage="", status=""
    )
    with terminal.capture() as captured:
        terminal.print(display.get_renderable())
    assert [len(line) <= width for line in captured.get().splitlines()] == [True, True]


PROGRAM = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and all below it, begins with it ignored
from rlinf_vla.telemetry.console import TrainingConsole
with TrainingConsole(10) as console:
    console.update(1, {"rollout/success_once": 0.25})
    console.stage("rollout", 0.5)
    console.say("a line above")
    time.sleep(1000)
"""
HANG_S = 200
"""Longer than a busy machine takes to start a program."""


def test_a_live_line_on_a_terminal_restores_the_cursor_on_interrupt() -> None:
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    try:
        output = _read_until(screen, "a line above", "1/10", "rollout 50%", "success 25.0 %")
        assert "\x1b[?25l" in output  # the cursor is hidden while the line is live
        process.send_signal(signal.SIGINT)
        output += _read_until(screen, "KeyboardInterrupt")
        assert process.wait(timeout=HANG_S) != 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def _read_until(screen: int, *texts: str) -> str:
    output = ""
    deadline = time.monotonic() + HANG_S
    while not all(text in output for text in texts):
        assert time.monotonic() < deadline, f"waited {HANG_S} s for {texts}; there was {output!r}"
        try:
            output += os.read(screen, 4096).decode(errors="replace")
        except OSError:  # Linux: the other side has closed
            break
    return output

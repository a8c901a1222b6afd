"""The arm's folder: one process per arm, faults that outlive processes, a journal."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlinf_vla.robot import RobotError
from rlinf_vla.robots import folder, orders
from rlinf_vla.robots.channel import Listener


@pytest.mark.parametrize("drives", [False, True])
def test_an_arm_has_one_process_and_a_dead_one_holds_nothing(tmp_path: Path, drives: bool) -> None:
    program = "import sys, pathlib; from rlinf_vla.robots.folder import Lock; lock = Lock(pathlib.Path(sys.argv[1]), 'arm');"
    program += f" {drives} and lock.drive(); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(RobotError, match=f"arm is driven by process {holder.pid} already"):
        folder.Lock(tmp_path, "arm")
    holder.kill()
    holder.wait()
    assert folder.Lock(tmp_path, "arm").killed == (str(holder.pid) if drives else None)


def test_who_let_an_arm_go_was_not_killed(tmp_path: Path) -> None:
    program = "import sys, pathlib; from rlinf_vla.robots.folder import Lock; lock = Lock(pathlib.Path(sys.argv[1]), 'arm');"
    subprocess.run([sys.executable, "-c", program + " lock.drive(); lock.release()", str(tmp_path)], check=True)
    assert folder.Lock(tmp_path, "arm").killed is None


def test_a_latch_is_kept_until_it_is_cleared(tmp_path: Path) -> None:
    assert folder.Latch(tmp_path).read() is None
    folder.Latch(tmp_path).write("reflex: joint_reflex")
    assert folder.Latch(tmp_path).read() == "reflex: joint_reflex"
    folder.Latch(tmp_path).clear()
    folder.Latch(tmp_path).clear()
    assert folder.Latch(tmp_path).read() is None


def test_a_latch_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "latched.json").write_text("{")
    assert "cannot be read" in str(folder.Latch(tmp_path).read())


def test_a_durable_event_is_on_disk_at_once_and_the_journal_only_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    folder.Journal(path).write("fault", fault="first", durable=True)
    folder.Journal(path).write("fault", fault="second", durable=True)
    assert [json.loads(line)["fault"] for line in path.read_text().splitlines()] == ["first", "second"]


def test_the_folders_are_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = folder.of_arm("172.16.0.2")
    assert folder.arms() == [made] and made.parent.stat().st_mode & 0o077 == 0
    assert folder.of_arm("../../etc").parent == made.parent
    made.parent.chmod(0o755)
    with pytest.raises(RobotError, match="open to other users"):
        folder.of_arm("172.16.0.2")


def test_stop_finds_every_arm_that_is_driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="nothing to stop"):
        orders.main()
    folder.of_arm("idle")
    listener = Listener(folder.of_arm("172.16.0.2") / folder.ORDERS)
    heard: list[dict[str, str]] = []

    def answer() -> None:
        while not heard:
            for caller, message in listener.messages():
                heard.append(message)
                caller.send({"host": "172.16.0.2", "pid": 7, "fault": message["stop"]})

    thread = threading.Thread(target=answer)
    thread.start()
    orders.main()
    thread.join()
    assert capsys.readouterr().out.startswith("172.16.0.2 (process 7): stopped by ")


def test_a_stop_that_is_not_answered_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(orders, "_ANSWER_S", 0.1)
    mute = Listener(folder.of_arm("172.16.0.2") / folder.ORDERS)
    with pytest.raises(SystemExit, match=r"172\.16\.0\.2: stop was delivered, but there is no answer within 0\.1 s: look at the arm"):
        orders.main()
    mute.close()

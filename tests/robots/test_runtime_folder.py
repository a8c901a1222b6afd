"""The arm's folder: one process per arm, faults that outlive processes, a journal."""

from __future__ import annotations

import getpass
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlinf_vla.core import user_dirs
from rlinf_vla.features.realworld import command
from rlinf_vla.features.realworld.listener import Listener
from rlinf_vla.features.realworld.robot import RobotError
from rlinf_vla.robots import runtime_folder, stop
from rlinf_vla.robots.franka.plugin import franka, franka_sim
from rlinf_vla.robots.lock import Lock
from rlinf_vla.robots.own_files import LOOK_S, OwnFiles


def process(folder: Path, then: str) -> list[str]:
    """The command of a process that takes the arm's ``lock``."""
    program = "import sys, pathlib; from rlinf_vla.robots.lock import Lock; lock = Lock(pathlib.Path(sys.argv[1]), 'arm')"
    return [sys.executable, "-c", f"{program}; {then}", str(folder)]


def killed(folder: Path, then: str = "pass") -> str:
    """Whom the next process finds killed; it then ends."""
    return subprocess.run(
        process(folder, f"{then}; print(lock.killed)"), check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("drives", [False, True])
def test_an_arm_has_one_process_and_a_dead_one_holds_nothing(tmp_path: Path, drives: bool) -> None:
    command = process(tmp_path, f"{drives} and lock.drive(); print('held', flush=True); input()")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(RobotError, match=f"arm is driven by process {holder.pid} already"):
            Lock(tmp_path, "arm")
        holder.kill()
    for then in ("pass", "lock.hold()"):
        assert killed(tmp_path, then) == str(holder.pid if drives else None), (
            "until somebody says that it is latched"
        )
    assert killed(tmp_path) == "None"


@pytest.mark.parametrize("released", [True, False])
def test_a_process_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    """A robot process that died is replaced at once, but its arm's process needs a moment to stop the arm."""
    monkeypatch.setattr(Lock, "ENDING_S", 120.0)  # only bounds a hang
    last = "lock.release()" if released else "pass"
    command = process(
        tmp_path,
        f"lock.drive(); lock.end(); print('ends', flush=True); input(); {last}; import time; time.sleep(0.3)",
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert (
            holder.stdout is not None
            and holder.stdin is not None
            and holder.stdout.readline() == b"ends\n"
        )
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        lock = Lock(tmp_path, "arm")
        assert lock.killed == (None if released else str(holder.pid))
        lock.socket.close()


def test_a_deleted_lock_neither_lets_a_second_process_in_nor_hides_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lock, "ENDING_S", 0.2)
    (tmp_path / runtime_folder.STATE).symlink_to("memory")
    with subprocess.Popen(
        process(tmp_path, "lock.drive(); print('held', flush=True); input()"), stdin=-1, stdout=-1
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        (tmp_path / runtime_folder.LOCK).unlink()
        with pytest.raises(RobotError, match="arm is driven by process unknown already"):
            Lock(tmp_path, "arm")
        (tmp_path / runtime_folder.LOCK).unlink()
        holder.kill()
    assert killed(tmp_path) == "with a deleted lock"


def test_a_process_that_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lock, "ENDING_S", 0.2)
    command = process(tmp_path, "lock.drive(); lock.end(); print('ends', flush=True); input()")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ends\n"
        with pytest.raises(RobotError, match=f"arm is driven by process {holder.pid} already"):
            Lock(tmp_path, "arm")
        holder.kill()


def test_who_let_an_arm_go_was_not_killed(tmp_path: Path) -> None:
    subprocess.run(process(tmp_path, "lock.drive(); lock.release()"), check=True)
    assert killed(tmp_path) == "None"


def test_a_latch_is_kept_until_it_is_cleared(tmp_path: Path) -> None:
    latch = runtime_folder.Latch
    assert latch(tmp_path).fault is None
    assert latch(tmp_path).add("reflex: joint_reflex") and not latch(tmp_path).add(
        "reflex: joint_reflex"
    )
    assert latch(tmp_path).add("stopped by Bob")
    for left in ("reflex: joint_reflex", "stopped by Bob", None, None):
        assert latch(tmp_path).fault == left
        latch(tmp_path).release()


def test_a_fault_that_is_being_acknowledged_can_occur_again(tmp_path: Path) -> None:
    latch = runtime_folder.Latch(tmp_path)
    assert latch.add("stopped by Bob") and latch.add("stopped by Bob", recovering=True)
    assert not latch.add("stopped by Bob", recovering=True)
    latch.release()
    assert latch.fault == "stopped by Bob"


def test_the_number_of_faults_is_bounded(tmp_path: Path) -> None:
    latch = runtime_folder.Latch(tmp_path)
    added = [latch.add(f"stopped by {number}") for number in range(latch.MOST + 1)]
    assert (
        added == [True] * latch.MOST + [False]
        and runtime_folder.Latch(tmp_path).faults == latch.faults
    )


@pytest.mark.parametrize(
    "found",
    [
        b"{",
        b"[]",
        b"3",
        b'{"fault": "reflex"}',
        b'{"faults": 3}',
        b'{"faults": [3]}',
        b'{"faults": "\xff"}',
        b"[" * 100_000,
        b"\xf6",
        None,
    ],
)
def test_a_latch_that_cannot_be_read_is_a_fault_that_can_be_acknowledged(
    tmp_path: Path, found: bytes | None
) -> None:
    if found is not None:
        (tmp_path / "latched.json").write_bytes(found)
    else:
        (tmp_path / "latched.json").symlink_to("latched.json")
    latch = runtime_folder.Latch(tmp_path)
    assert str(latch.fault).endswith("latched.json cannot be read")
    latch.release()
    assert latch.fault is None is runtime_folder.Latch(tmp_path).fault


def test_a_durable_event_is_on_disk_at_once_and_the_journal_only_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journals = [runtime_folder.Journal(path) for _ in range(2)]
    for journal, fault in zip(journals, ("first", "second"), strict=True):
        journal.write("fault", fault=fault, durable=True)
    assert [json.loads(line)["fault"] for line in path.read_text().splitlines()] == [
        "first",
        "second",
    ]
    for journal in journals:
        journal.close()


def test_a_removed_journal_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = runtime_folder.Journal(path)
    path.unlink()
    now = time.monotonic()
    monkeypatch.setattr(runtime_folder.time, "monotonic", lambda: now + 2)
    journal.flush()
    journal.write("fault", durable=True)
    journal.close()
    assert json.loads(path.read_text())["event"] == "fault"


def test_lost_faults_are_written_again_and_what_cannot_be_restored_is_said_each_time(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "arm"
    folder.mkdir()
    latch = runtime_folder.Latch(folder)
    files = OwnFiles(folder, {runtime_folder.LATCH: latch}, runtime_folder.at_once)
    latch.add("reflex: joint_reflex")
    assert files.look(0.0) is None
    shutil.rmtree(folder)
    assert files.look(0.5 * LOOK_S) is None, "not yet"
    assert files.look(LOOK_S) == f"files: latched.json in {folder} was deleted or replaced"
    assert (
        runtime_folder.Latch(folder).faults == ("reflex: joint_reflex",)
        and files.look(2 * LOOK_S) is None
    )
    shutil.rmtree(folder)
    folder.touch()
    for number in (3, 4):
        assert str(files.look(float(number))).endswith(
            "cannot be restored: File exists: make room for them there"
        )


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: a socket's has to be."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setenv("XDG_STATE_HOME", made)
        yield Path(made)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders wait for an answer on a busy machine, too: the limit only bounds a hang."""
    monkeypatch.setattr(stop, "ANSWER_S", 120.0)


@contextmanager
def answering(folder: Path, lock: Lock | None = None) -> Iterator[list[dict[str, str]]]:
    """A process that drives the arm of this folder, and the orders that it gets."""
    listener = Listener(folder / runtime_folder.ORDERS, lock and lock.socket)
    heard = list[dict[str, str]]()
    over = threading.Event()

    def answer() -> None:
        while not over.wait(0.005):
            for caller, message in listener.messages():
                heard.append(message)
                caller.send({"host": folder.name, "pid": 7, "fault": message.get("stop")})

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield heard
    finally:
        over.set()
        thread.join()
        listener.close()


def test_the_folders_are_this_users_alone(state: Path) -> None:
    made = runtime_folder.of_arm("172.16.0.2")
    assert made == state / "rlinf-vla/robots/172.16.0.2"
    assert runtime_folder.arms() == [made] and made.parent.stat().st_mode & 0o077 == 0
    assert runtime_folder.of_arm("../../etc").parent == made.parent
    made.parent.chmod(0o755)
    with pytest.raises(RobotError, match="open to other users"):
        runtime_folder.of_arm("172.16.0.2")


def test_a_latch_outlives_the_login_in_which_it_was_made(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(state / "login"))
    runtime_folder.Latch(runtime_folder.of_arm("172.16.0.2")).add("reflex: joint_reflex")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert (
        runtime_folder.Latch(runtime_folder.of_arm("172.16.0.2")).fault == "reflex: joint_reflex"
    ), "also for who has no login: cron, Ray, sudo"


def test_an_arm_has_one_folder_whatever_the_machine_is_called(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has a random name; a simulated cell, on the other hand, exists only on its machine."""
    real = franka.Config(host="172.16.0.2")
    simulated = franka_sim.Config()
    folders = []
    for name in ("3f2a", "9c1d"):
        monkeypatch.setattr(socket, "gethostname", lambda: name)  # noqa: B023
        folders.append((franka.folder(real), franka_sim.folder(simulated)))
    assert folders[0][0] == folders[1][0] and folders[0][1] != folders[1][1]


@pytest.mark.usefixtures("patient")
def test_an_order_to_all_reaches_an_arm_once(state: Path) -> None:
    """A second acknowledgement would clear the next fault."""
    with answering(runtime_folder.of_arm("172.16.0.2")) as heard:
        assert command.run(["acknowledge", "operator=Ada"]) == 0
    assert heard == [{"acknowledge": "Ada"}]


def test_an_arm_has_one_folder_by_whichever_of_its_names(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"fr3": "172.16.0.2", "172.16.0.2": "172.16.0.2"}

    def resolve(host: str) -> str:
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[host]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    named, numbered, unknown = (
        franka.folder(franka.Config(host=host)) for host in ("fr3", "172.16.0.2", "fr4")
    )
    assert named == numbered and named.name == "172.16.0.2" and unknown.name == "fr4"
    monkeypatch.undo()
    assert runtime_folder.address(f"{'x' * 70}.lab") == f"{'x' * 70}.lab", "no name can be that"


def test_a_path_that_is_too_long_for_a_socket_is_one_line(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = 107 - len(str(state / "rlinf-vla/robots" / runtime_folder.ORDERS)) - 1
    listener = Listener(runtime_folder.of_arm("x" * spare) / runtime_folder.ORDERS)
    listener.close()
    with pytest.raises(
        RobotError,
        match=r"arm\.socket: 1 bytes too long for a socket; XDG_STATE_HOME=FOLDER names a shorter place$",
    ):
        runtime_folder.of_arm("x" * (spare + 1))


def test_a_home_that_takes_nothing_is_one_line(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "rlinf-vla").write_text("")
    with pytest.raises(
        RobotError,
        match=r"no folder for locks and faults of arms: .*Not a directory.*; XDG_STATE_HOME=FOLDER names",
    ):
        runtime_folder.of_arm("172.16.0.2")
    monkeypatch.setattr(user_dirs, "state", lambda: Path("~nobody-of-that-name").expanduser())
    with pytest.raises(RobotError, match=r"no folder for locks and faults of arms: .*home"):
        runtime_folder.of_arm("172.16.0.2")


@pytest.mark.usefixtures("patient")
def test_stop_finds_every_arm_that_is_driven(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="nothing to stop"):
        stop.main([])
    runtime_folder.of_arm("idle")
    with answering(runtime_folder.of_arm("172.16.0.2")):
        stop.main([])
    assert capsys.readouterr().out.startswith("172.16.0.2 (process 7): stopped by ")


def test_a_stop_reaches_an_arm_without_a_folder(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its folder was deleted, lies elsewhere, or cannot be trusted: the process has an address that nobody can delete."""
    monkeypatch.setattr(stop, "ANSWER_S", 120.0)
    folder = runtime_folder.of_arm("172.16.0.2")
    with answering(folder, Lock(folder, "arm")), answering(state, Lock(state, "other")):
        shutil.rmtree(folder)
        stop.main([])
        assert capsys.readouterr().out.count("(process 7): stopped by ") == 2
        folder.parent.rmdir()
        folder.parent.touch()
        with pytest.raises(SystemExit, match=r"(?s)no folder for locks.*process 7.*process 7"):
            stop.main([])


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--all"], ["robot=franka"]])
def test_the_stop_program_prints_help_and_refuses_what_it_does_not_know(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] in ("--help", "-h"):
        stop.main(words)
        assert capsys.readouterr().out.startswith("Usage: rlinf-vla-stop\n")
        return
    with pytest.raises(SystemExit) as ended:
        stop.main(words)
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err
        == f"rlinf-vla-stop: {words[0]!r} is not known, and no arm was stopped: give no arguments, or --help\n"
    )


def test_a_user_without_a_name_can_stop(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", unknown)
    with pytest.raises(SystemExit, match="nothing to stop"):
        stop.main([])


def test_a_stop_that_is_not_answered_is_no_success(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "ANSWER_S", 0.1)
    mute = Listener(runtime_folder.of_arm("172.16.0.2") / runtime_folder.ORDERS)
    with pytest.raises(
        SystemExit,
        match=r"172\.16\.0\.2: stop was delivered, but there is no answer within 0\.1 s: look at the arm",
    ):
        stop.main([])
    mute.close()

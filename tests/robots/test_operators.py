from __future__ import annotations

import contextlib
import os
import pty
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.features.realworld.robot import (
    ACKNOWLEDGE,
    FAILURE,
    PAUSE,
    QUIT,
    RESUME,
    SUCCESS,
    WORDS,
    OperatorPlugin,
    RobotError,
)
from rlinf_vla.robots.operators import gamepad, keyboard, spacemouse
from rlinf_vla.robots.operators.device_reader import RELEASED, DeviceReader, Event


class Silent:
    name = "silent"

    def __init__(self) -> None:
        self._closed = threading.Event()

    def events(self) -> Iterator[Event]:
        self._closed.wait()
        yield from ()

    def close(self) -> None:
        self._closed.set()


def motions(device: object, *reports: bytes) -> list[tuple[float, ...] | None]:
    found = [device.parse(report) for report in reports]  # type: ignore[attr-defined]
    return [event and event.motion for event in found]


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """A device's thread may close its files later than ``close`` waits for it, and the next test
    looks at the open ones."""
    yield
    assert wait_for(lambda: all(map(ended, ("gamepad", "keyboard", "silent", "spacemouse"))))


@pytest.fixture
def mouse() -> Iterator[spacemouse.SpaceMouse]:
    with still_mouse() as made:
        yield made


@contextlib.contextmanager
def still_mouse() -> Iterator[spacemouse.SpaceMouse]:
    yield (made := spacemouse.SpaceMouse(Path(os.devnull)))
    made.close()
    assert list(made.events()) == []


@pytest.fixture
def pad() -> Iterator[gamepad.Gamepad]:
    yield (made := gamepad.Gamepad(Path(os.devnull)))
    made.close()
    assert list(made.events()) == []


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Our end, and the end that the program reads."""
    yield (ends := pty.openpty())
    for end in ends:
        with contextlib.suppress(OSError):  # it was closed
            os.close(end)


def test_a_spacemouse_uses_the_robots_axes(mouse: spacemouse.SpaceMouse) -> None:
    forward = struct.pack("<Bhhh", 1, 0, -350, 0)
    left_and_up = struct.pack("<Bhhh", 1, -175, 0, -350)
    turned = struct.pack("<Bhhh", 2, 0, 0, -350)
    newer = struct.pack("<Bhhhhhh", 1, 0, -350, 0, 0, 0, 350)
    found = motions(mouse, forward, left_and_up, turned, newer)
    np.testing.assert_allclose(
        np.array(found, float),
        [[1, 0, 0, 0, 0, 0], [0, 0.5, 1, 0, 0, 0], [0, 0.5, 1, 0, 0, 1], [1, 0, 0, 0, 0, -1]],
    )


def test_its_buttons_count_at_release_and_together(mouse: spacemouse.SpaceMouse) -> None:
    def said(*reports: int) -> list[tuple[bool, str | None]]:
        events = [mouse.parse(bytes([3, pressed])) for pressed in reports]
        return [(event.toggles, event.word) for event in events if event]

    assert said(1, 1) == [] and said(0) == [(True, None)]
    assert said(2, 0) == [(False, SUCCESS)]
    for first, last in ((1, 2), (2, 1), (1, 1)):
        assert said(first, 3) == [(False, PAUSE)] and said(last, 3, 0) == [], (
            "neither button counts separately"
        )


@given(st.binary(max_size=20))
def test_it_accepts_any_report(report: bytes) -> None:
    with still_mouse() as mouse:
        event = mouse.parse(report)
    assert event is None or event.motion is None or max(map(abs, event.motion)) <= 1


def test_a_gamepad(pad: gamepad.Gamepad) -> None:
    def event(value: int, kind: int, number: int) -> bytes:
        return struct.pack("=IhBB", 12, value, kind, number)

    full = 32767
    assert motions(pad, event(-full, 2, 1), event(full, 2, 0)) == [
        (1, 0, 0, 0, 0, 0),
        (1, -1, 0, 0, 0, 0),
    ]
    assert motions(pad, event(0, 2, 1), event(0, 2, 0), event(-full, 2, 4))[-1] == (
        0,
        0,
        1,
        0,
        0,
        0,
    )
    assert motions(pad, event(0, 2, 4), event(full, 2, 5), event(-full, 2, 5))[1:] == [
        (0, 0, 0, 1, 0, 0),
        (0, 0, 0, 0, 0, 0),
    ]
    pressed = [pad.parse(event(1, 1, number)) for number in (0, 1, 2, 3, 6, 7, 8)]
    assert [each and each.word for each in pressed] == [
        None,
        SUCCESS,
        FAILURE,
        RESUME,
        ACKNOWLEDGE,
        PAUSE,
        QUIT,
    ]
    assert pressed[0] is not None and pressed[0].toggles
    assert pad.parse(event(0, 1, 1)) is None, "released"
    assert pad.parse(event(1, 0x81, 1)) is None and pad.parse(event(full, 0x82, 1)) is None, (
        "its state at rest"
    )


def test_keys() -> None:
    assert keyboard.parse("w").motion == (1, 0, 0, 0, 0, 0) and keyboard.parse("d").motion == (
        0,
        -1,
        0,
        0,
        0,
        0,
    )  # type: ignore[union-attr]
    assert keyboard.parse(" ").toggles  # type: ignore[union-attr]
    assert [keyboard.parse(key).word for key in "ynp\nkx"] == [
        SUCCESS,
        FAILURE,
        PAUSE,
        RESUME,
        ACKNOWLEDGE,
        QUIT,
    ]  # type: ignore[union-attr]
    assert keyboard.parse("ß") is None


def test_the_operators_motion_holds_until_release() -> None:
    hands = DeviceReader(Silent(), 4)
    assert hands.action(1) is None and hands.words() == []
    hands.hear(Event(motion=(0.5, 0, 0, 0.9, 0, 0)))
    for _ in range(2):
        np.testing.assert_allclose(
            hands.action(0.3),
            [0.5, 0, 0, 0.3],
            err_msg="the hand stays, and four numbers have no turn",
            rtol=1e-6,
        )  # type: ignore[arg-type]
    hands.hear(Event(motion=(0.01,) * 6))
    assert hands.action(1) is None, "that is no takeover"
    hands.hear(Event(toggles=True))
    np.testing.assert_allclose(hands.action(0.3), [0.01, 0.01, 0.01, -1], rtol=1e-6)  # type: ignore[arg-type]
    assert hands.action(-1) is None
    for _ in range(2):
        hands.hear(Event(toggles=True))
    assert hands.action(-1) is None, "unchanged"
    hands.hear(Event(motion=(0.0,) * 6, keeps=True))
    np.testing.assert_allclose(
        hands.action(0.3),
        [0, 0, 0, 0.3],
        err_msg="the operator stands, and keeps the arm",
        rtol=1e-6,
    )  # type: ignore[arg-type]
    hands.hear(RELEASED)
    assert hands.action(1) is None
    hands.hear(Event(word=SUCCESS))
    assert hands.words() == [SUCCESS] and hands.words() == []
    hands.close()


def test_a_silent_spacemouse_counts_as_released(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "hidraw0")
    ours = os.open(path, os.O_RDWR)
    hands = DeviceReader(spacemouse.SpaceMouse(path), 4)
    assert (
        wait_for(lambda: held(ours, "spacemouse") and hands.action(1) is not None)
        and wait_for(lambda: hands.action(1) is None)
        and hands.words() == []
    )
    hands.close()
    os.close(ours)


def test_keys_are_read_from_a_terminal_which_is_restored(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(keyboard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    master, slave = terminal
    path = os.ttyname(slave)
    import termios

    before = termios.tcgetattr(slave)
    operator = keyboard.open_keyboard(path, 7)
    os.write(master, b"wy")
    assert wait_for(lambda: SUCCESS in operator.words())
    os.write(master, b"a")
    assert wait_for(lambda: (action := operator.action(1)) is not None and action[1] == 1.0)
    now[0] += keyboard.HOLD_S + 0.01
    assert wait_for(
        lambda: (action := operator.action(0.5)) is not None and action.tolist() == [0] * 6 + [0.5]
    ), "a tap is over"
    now[0] = keyboard.TAKEOVER_S
    os.write(master, b"y")
    assert wait_for(lambda: SUCCESS in operator.words()) and operator.action(1) is not None, (
        "until a held key would repeat"
    )
    now[0] += 0.01
    assert wait_for(lambda: operator.action(1) is None), "a key is released"
    os.write(master, b"a")
    assert wait_for(lambda: operator.action(1) is not None)
    now[0] += keyboard.TAKEOVER_S + 0.01
    assert wait_for(lambda: os.write(master, b"k") > 0 and operator.action(1) is None), (
        "also while another key is held"
    )
    operator.close()
    assert wait_for(lambda: termios.tcgetattr(slave) == before)


def ended(device: str) -> bool:
    """Whether the device's thread has ended: only then is what it printed whole, and the captured stderr may close."""
    return all(each.name != device for each in threading.enumerate())


def forward(device: str) -> bytes:
    return {
        "gamepad": struct.pack("=IhBB", 12, -32767, 2, 1),
        "spacemouse": struct.pack("<Bhhh", 1, 0, -350, 0),
    }[device]


def held(ours: int, device: str) -> bool:
    """The device reports that it is deflected once its last report was read: a slow reader is never
    far behind."""
    return bool(select.select([ours], [], [], 0)[0]) or os.write(ours, forward(device)) > 0


@pytest.mark.parametrize("device", ["gamepad", "spacemouse"])
def test_a_lost_device_counts_as_released_and_pauses(
    device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / device
    os.mkfifo(path)
    ours = os.open(path, os.O_RDWR)
    operator = DeviceReader(
        {"gamepad": gamepad.Gamepad, "spacemouse": spacemouse.SpaceMouse}[device](path), 4
    )
    assert wait_for(lambda: held(ours, device) and operator.action(1) is not None)
    assert operator.words() == []
    os.close(ours)
    assert wait_for(lambda: operator.action(1) is None)
    assert wait_for(lambda: PAUSE in operator.words()) and operator.words() == [PAUSE], (
        "permanently"
    )
    assert operator.name == f"{device}, disconnected"
    assert wait_for(lambda: ended(device)) and f"{device} is disconnected" in capfd.readouterr().err
    operator.close()


def test_a_closed_terminal_counts_as_released_and_pauses(
    terminal: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    master, slave = terminal
    operator = keyboard.open_keyboard(os.ttyname(slave), 4)
    os.write(master, b"w")
    assert wait_for(lambda: operator.action(1) is not None)
    os.close(master)
    assert wait_for(lambda: PAUSE in operator.words()), "EIO"
    assert operator.action(1) is None
    assert (
        wait_for(lambda: ended("keyboard")) and "keyboard is disconnected" in capfd.readouterr().err
    )
    operator.close()


def test_the_end_of_the_keys_counts_as_release(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = terminal
    device = keyboard.Keyboard(os.ttyname(slave))
    monkeypatch.setattr(os, "read", lambda file, most: b"")
    os.write(master, b"w")
    assert list(device.events()) == [], "the events end"
    device.close()


def test_a_failing_device_counts_as_released_and_pauses(capfd: pytest.CaptureFixture[str]) -> None:
    class Breaks(Silent):
        def events(self) -> Iterator[Event]:
            yield Event(motion=(1.0,) * 6)
            raise ValueError("nobody thought of this")

    operator = DeviceReader(Breaks(), 4)
    assert wait_for(lambda: PAUSE in operator.words()) and operator.action(1) is None
    assert (
        wait_for(lambda: ended("silent"))
        and "(ValueError: nobody thought of this)" in capfd.readouterr().err
    )


def test_closing_a_device_does_not_pause(capfd: pytest.CaptureFixture[str]) -> None:
    operator = DeviceReader(Silent(), 4)
    operator.close()
    assert wait_for(lambda: ended("silent"))
    assert operator.words() == [] and capfd.readouterr().err == ""


def test_all_words_can_be_sent() -> None:
    for device in (keyboard, gamepad):
        assert set(device.WORDS.values()) == set(WORDS)


def test_with_a_spacemouse_the_keys_send_the_words(
    terminal: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hidraw"
    os.mkfifo(path)
    reports = os.open(path, os.O_RDWR)
    monkeypatch.setattr(keyboard, "TERMINAL", f"{tmp_path}/no-terminal")
    with pytest.raises(RobotError, match="no terminal whose keys could"):
        spacemouse.open_spacemouse(str(path), 4)
    master, slave = terminal
    monkeypatch.setattr(keyboard, "TERMINAL", os.ttyname(slave))
    operator = spacemouse.open_spacemouse(str(path), 4)
    said: list[str] = []
    for pressed in (2, 0):
        os.write(reports, bytes([3, pressed]))
        assert wait_for(lambda: not select.select([reports], [], [], 0)[0]), (
            "a device gives one report at a time"
        )
    os.write(master, b"w\nk")
    assert wait_for(
        lambda: said.extend(operator.words()) or {SUCCESS, RESUME, ACKNOWLEDGE} <= set(said)
    )  # type: ignore[func-returns-value]
    assert operator.action(1) is None, "keys move nothing here"
    assert wait_for(lambda: held(reports, "spacemouse") and operator.action(1) is not None)
    assert operator.name == "spacemouse"
    operator.close()
    os.close(reports)


def open_files() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(
    "opens", [gamepad.open_gamepad, spacemouse.open_spacemouse, keyboard.open_keyboard]
)
def test_closing_a_device_closes_its_files(
    terminal: tuple[int, int],
    opens: OperatorPlugin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keyboard, "TERMINAL", os.ttyname(terminal[1]))
    os.mkfifo(tmp_path / "device")
    ours = os.open(tmp_path / "device", os.O_RDWR)
    before = open_files()
    operator = opens(None if opens is keyboard.open_keyboard else str(tmp_path / "device"), 4)
    assert len(open_files()) > len(before)
    for _ in range(2):
        operator.close()
    assert wait_for(lambda: open_files() == before)
    os.close(ours)


def test_a_device_that_cannot_be_opened_leaves_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyboard, "TERMINAL", os.devnull)
    os.mkfifo(tmp_path / "device")
    ours = os.open(tmp_path / "device", os.O_RDWR)
    before = open_files()
    for opens in (keyboard.open_keyboard, spacemouse.open_spacemouse):
        with pytest.raises(RobotError, match="terminal"):
            opens(None if opens is keyboard.open_keyboard else str(tmp_path / "device"), 4)
        assert open_files() == before
    os.close(ours)


def test_a_missing_device_is_one_line(tmp_path: object) -> None:
    for opens in (gamepad.open_gamepad, spacemouse.open_spacemouse, keyboard.open_keyboard):
        with pytest.raises(RobotError, match="nothing-here") as raised:
            opens(f"{tmp_path}/nothing-here", 4)
        assert "\n" not in str(raised.value)


def wait_for(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120  # only bounds a hang
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

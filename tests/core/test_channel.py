"""Messages between processes: complete, without blocking, and with detection of dead peers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from rlinf_vla.core.channel import PACKET, Channel, ChannelClosed
from rlinf_vla.features.realworld import listener as listening
from rlinf_vla.features.realworld.listener import CALLERS, IDLE_S, Listener, ask


def test_messages_arrive_complete_and_in_order(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    for number in range(3):
        ours.send({"number": number, "text": "x" * 5000})
    assert [theirs.receive(1.0)["number"] for _ in range(3)] == [0, 1, 2]  # type: ignore[index]
    assert theirs.receive(0) is None


def test_a_peer_that_is_gone_is_detected(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)
    with pytest.raises(ChannelClosed):
        ours.send({})


def test_send_does_not_block_on_a_peer_that_does_not_read(pair: tuple[Channel, Channel]) -> None:
    ours, _theirs = pair
    with pytest.raises(BlockingIOError):
        for _ in range(10_000):
            ours.send({"text": "x" * 1000})


@pytest.mark.parametrize("size", [PACKET - 1, PACKET, 10 * PACKET, 10 * PACKET + 1])
def test_a_message_of_any_size_arrives_complete(pair: tuple[Channel, Channel], size: int) -> None:
    ours, theirs = pair
    message = {"text": "x" * (size - len(json.dumps({"text": ""})))}
    sending = threading.Thread(target=ours.send, args=(message, None))
    sending.start()
    assert theirs.receive(None) == message and theirs.receive(0) is None
    sending.join()


def test_receive_does_not_block_on_a_partial_message() -> None:
    theirs, ours = Channel.pair()
    body = json.dumps({"text": "x" * PACKET}).encode()
    ours.send(body[:PACKET])
    assert theirs.receive(0) is None
    ours.send(body[PACKET:])
    assert theirs.receive(0) == json.loads(body)
    theirs.close()
    ours.close()


def test_a_partially_sent_message_closes_the_channel(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    with pytest.raises(BlockingIOError):
        ours.send({"text": "x" * 100 * PACKET})
    with pytest.raises(ChannelClosed):
        theirs.receive(None)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that a busy machine lets wait are not idle."""
    monkeypatch.setattr(listening, "IDLE_S", 120.0)


@pytest.mark.usefixtures("patient")
def test_a_listener_serves_several_callers_and_survives_invalid_data(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "socket")
    first, second, third = (
        Channel.dial(tmp_path / "socket"),
        *(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)),
    )
    for each in (second, third):
        each.connect(str(tmp_path / "socket"))
    first.send({"from": 1})
    second.send(b"not JSON")
    third.send(b"[]")
    heard = [message for _ in range(6) for _, message in listener.messages()]
    assert heard == [{"from": 1}]
    first.send({"from": 1})
    assert [message for _, message in listener.messages()] == [{"from": 1}]
    for each in (first, second, third, listener):
        each.close()


NESTED = b"[" * 60_000
"""Of one packet."""


@pytest.mark.parametrize(
    "data", [NESTED, b'{"a":' * 10_000, b"1" * 60_000, b"\xff", b"NaN", b'"text"']
)
def test_invalid_data_is_an_error_of_one_kind(pair: tuple[Channel, Channel], data: bytes) -> None:
    ours, theirs = pair
    with socket.socket(fileno=os.dup(theirs.fileno())) as raw:
        raw.send(data)
    with pytest.raises(ValueError, match=r"."):
        ours.receive(1.0)


def descriptors() -> list[int]:
    return [int(each.name) for each in Path("/proc/self/fd").iterdir()]


def test_any_number_of_callers_leaves_a_listener_bounded_and_open_to_a_new_one(
    tmp_path: Path,
) -> None:
    listener = Listener(tmp_path / "socket")
    half_open = []
    before = len(descriptors())
    for _ in range(10 * CALLERS):
        half_open.append(Channel.dial(tmp_path / "socket"))
        listener.messages()
        assert len(descriptors()) - before - len(half_open) <= CALLERS + 1
    late = Channel.dial(tmp_path / "socket")
    late.send({"stop": "stopped by Bob"})
    ((caller, message),) = listener.messages()
    caller.send({"heard": message})
    assert late.receive(1.0) == {"heard": {"stop": "stopped by Bob"}}
    for each in (*half_open, late, listener):
        each.close()


@pytest.mark.usefixtures("patient")
def test_a_listener_without_file_descriptors_drops_a_caller(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "socket")
    first, second = (Channel.dial(tmp_path / "socket") for _ in range(2))
    assert listener.messages() == []
    third = Channel.dial(tmp_path / "socket")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()), limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        assert listener.messages() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in taken:
            os.close(each)
    with pytest.raises(ChannelClosed):
        first.receive(0)
    third.send({})
    assert len(listener.messages()) == 1
    for each in (first, second, third, listener):
        each.close()


def test_idle_callers_and_long_messages_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(tmp_path / "socket")
    idle, active, long = (Channel.dial(tmp_path / "socket") for _ in range(3))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)  # the clock stands while they connect
    listener.messages()
    active.send({})
    monkeypatch.setattr(time, "monotonic", lambda: now + IDLE_S - 1)
    assert len(listener.messages()) == 1
    with contextlib.suppress(BlockingIOError):
        long.send({"text": "x" * 4 * PACKET})
    monkeypatch.setattr(time, "monotonic", lambda: now + IDLE_S + 1)
    assert listener.messages() == []
    for each in (idle, long):
        with pytest.raises(ChannelClosed):
            each.receive(0)
    assert active.receive(0) is None
    for each in (idle, active, long, listener):
        each.close()


def test_a_listener_that_accepts_nobody_is_an_error(tmp_path: Path) -> None:
    mute = Listener(tmp_path / "mute")
    waiting = []
    with contextlib.suppress(TimeoutError):
        while True:
            waiting.append(Channel.dial(tmp_path / "mute", 0.05))
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        ask(tmp_path / "mute", {}, 0.1)
    for each in (*waiting, mute):
        each.close()


def test_asking_without_a_listener_gives_none_and_a_silent_one_is_an_error(tmp_path: Path) -> None:
    assert ask(tmp_path / "nobody", {}, 0.1) is None
    mute = Listener(tmp_path / "mute")
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        ask(tmp_path / "mute", {}, 0.1)
    mute.close()


def test_the_last_message_is_received_after_the_peer_has_closed(
    pair: tuple[Channel, Channel],
) -> None:
    """A policy's process sends stop and ends while the arm's process is sending to it."""
    ours, theirs = pair
    theirs.send({"safety": [1e-4]})
    ours.send({"stop": "the learner is gone"})
    ours.hang_up()
    assert theirs.receive(1.0) == {"stop": "the learner is gone"}
    with pytest.raises(ChannelClosed):
        theirs.receive(1.0)
    theirs.send({"safety": [1e-4]})

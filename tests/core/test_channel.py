"""Messages between processes: complete, without blocking, and with detection of dead peers."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from rlinf_vla.core.channel import PACKET, Channel, ChannelClosed
from rlinf_vla.core.listener import Listener, ask


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


def test_a_listener_serves_several_callers_and_survives_invalid_data(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "socket")
    first, second, third = Channel.dial(tmp_path / "socket"), *(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
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


def test_asking_without_a_listener_gives_none_and_a_silent_one_is_an_error(tmp_path: Path) -> None:
    assert ask(tmp_path / "nobody", {}, 0.1) is None
    mute = Listener(tmp_path / "mute")
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        ask(tmp_path / "mute", {}, 0.1)
    mute.close()


def test_the_last_message_is_received_after_the_peer_has_closed(pair: tuple[Channel, Channel]) -> None:
    """A policy's process sends stop and ends while the arm's process is sending to it."""
    ours, theirs = pair
    theirs.send({"safety": [1e-4]})
    ours.send({"stop": "the learner is gone"})
    ours.hang_up()
    assert theirs.receive(1.0) == {"stop": "the learner is gone"}
    with pytest.raises(ChannelClosed):
        theirs.receive(1.0)
    theirs.send({"safety": [1e-4]})

"""Messages between processes: whole, never waited for, and of dead peers noticed."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from rlinf_vla.core.channel import PACKET, Channel, ChannelClosed
from rlinf_vla.core.listener import Listener, ask


def test_messages_come_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    for number in range(3):
        ours.send({"number": number, "text": "x" * 5000})
    assert [theirs.receive(1.0)["number"] for _ in range(3)] == [0, 1, 2]  # type: ignore[index]
    assert theirs.receive(0) is None


def test_a_peer_that_is_gone_is_noticed(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)
    with pytest.raises(ChannelClosed):
        ours.send({})


def test_sending_never_waits_for_a_peer_that_does_not_read(pair: tuple[Channel, Channel]) -> None:
    ours, _theirs = pair
    with pytest.raises(BlockingIOError):
        for _ in range(10_000):
            ours.send({"text": "x" * 1000})


@pytest.mark.parametrize("size", [PACKET - 1, PACKET, 10 * PACKET, 10 * PACKET + 1])
def test_a_message_of_any_size_arrives_whole(pair: tuple[Channel, Channel], size: int) -> None:
    ours, theirs = pair
    message = {"text": "x" * (size - len(json.dumps({"text": ""})))}
    sending = threading.Thread(target=ours.send, args=(message, None))
    sending.start()
    assert theirs.receive(None) == message and theirs.receive(0) is None
    sending.join()


def test_half_a_message_is_not_waited_for() -> None:
    theirs, ours = Channel.pair()
    body = json.dumps({"text": "x" * PACKET}).encode()
    ours.send(body[:PACKET])
    assert theirs.receive(0) is None
    ours.send(body[PACKET:])
    assert theirs.receive(0) == json.loads(body)
    theirs.close()
    ours.close()


def test_a_message_of_which_only_the_beginning_could_be_sent_ends_the_channel(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    with pytest.raises(BlockingIOError):
        ours.send({"text": "x" * 100 * PACKET})
    with pytest.raises(ChannelClosed):
        theirs.receive(None)


def test_a_listener_hears_several_callers_and_survives_nonsense(tmp_path: Path) -> None:
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


def test_asking_nobody_gives_nothing_and_who_is_mute_is_told(tmp_path: Path) -> None:
    assert ask(tmp_path / "nobody", {}, 0.1) is None
    mute = Listener(tmp_path / "mute")
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        ask(tmp_path / "mute", {}, 0.1)
    mute.close()


def test_the_last_words_are_heard_though_nobody_listened_any_more(pair: tuple[Channel, Channel]) -> None:
    """A policy's process that says stop and goes while the arm's process is telling it something."""
    ours, theirs = pair
    theirs.send({"safety": [1e-4]})
    ours.send({"stop": "the learner is gone"})
    ours.hang_up()
    assert theirs.receive(1.0) == {"stop": "the learner is gone"}
    with pytest.raises(ChannelClosed):
        theirs.receive(1.0)
    theirs.send({"safety": [1e-4]})

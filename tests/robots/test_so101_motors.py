"""The simulated motors' bus: packets as Feetech's protocol has them, and noise between them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.robots.so101_sim.motors import BROADCAST, GOAL, PRESENT, TORQUE, MotorBus, steps

RANGES = [(-110.0, 110.0), (-10.0, 100.0)]


def packet(who: int, instruction: int, *parameters: int) -> bytes:
    body = bytes((who, len(parameters) + 2, instruction, *parameters))
    return b"\xff\xff" + body + bytes((~sum(body) & 0xFF,))


def bus() -> MotorBus:
    return MotorBus(RANGES, [0.0, 50.0])


def test_a_ping_and_a_read_are_answered_as_the_manual_shows() -> None:
    """The ping of motor 1 is the manual's example."""
    assert packet(1, 1) == bytes.fromhex("ffff0102 01fb")
    assert bus().feed(packet(1, 1)) == bytes.fromhex("ffff0102 00fc")
    answer = bus().feed(packet(2, 2, PRESENT, 2))
    assert struct.unpack("<H", answer[5:7])[0] == steps(50.0) and answer[2:5] == bytes((2, 4, 0))
    assert bus().feed(packet(3, 1)) == b"", "there is no motor 3"


def test_goals_hold_with_torque_only_and_within_the_limits() -> None:
    made = bus()
    assert made.goals_deg() == [None, None]
    for who in (1, 2):
        assert made.feed(packet(who, 3, TORQUE, 1))
    assert made.goals_deg() == [pytest.approx(0, abs=0.1), pytest.approx(50, abs=0.1)]
    low = struct.pack("<H", steps(30))
    high = struct.pack("<H", 4095)
    assert made.feed(packet(BROADCAST, 0x83, GOAL, 2, 1, *low, 2, *high)) == b""
    assert made.goals_deg() == [pytest.approx(30, abs=0.1), pytest.approx(100, abs=0.1)]


def test_all_motors_answer_one_synchronous_read() -> None:
    made = bus()
    made.measure([-20.0, 99.0])
    answer = made.feed(packet(BROADCAST, 0x82, PRESENT, 2, 1, 2))
    assert [struct.unpack("<H", answer[at + 5 : at + 7])[0] for at in (0, 8)] == [
        steps(-20),
        steps(99),
    ]
    made.silent = True
    assert made.feed(packet(BROADCAST, 0x82, PRESENT, 2, 1, 2)) == b""


@given(st.lists(st.binary(max_size=20), max_size=5), st.integers(1, 3))
def test_noise_and_partial_packets_do_no_harm(noise: list[bytes], part: int) -> None:
    made = bus()
    ping = packet(1, 1)
    for each in noise:
        made.feed(each)
    made.feed(bytes(300))  # the end of whatever packet the noise began
    made.feed(ping[:part])
    assert made.feed(ping[part:]).endswith(bytes.fromhex("ffff010200fc"))

"""Simulate the motors of an SO-101 on their serial bus: six Feetech STS3215.

Packets and registers: Feetech's SCS/STS protocol 0, as LeRobot's ``motors/feetech`` uses it. An
instruction is ``FF FF id length instruction parameters checksum``, and each addressed motor answers
with ``FF FF id length error parameters checksum``; none answers a broadcast, except to a
synchronous read. Words are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

PING = 1
READ = 2
WRITE = 3
SYNC_READ = 0x82
SYNC_WRITE = 0x83
BROADCAST = 0xFE
STEPS = 4096
"""Encoder steps per turn."""
_MODEL = 777
_MIDDLE = STEPS // 2
_DEG = 360 / (STEPS - 1)
"""Degrees per step, as LeRobot computes them."""

FIRMWARE = 0
MODEL = 3
ID = 5
LOWEST = 9
HIGHEST = 11
TORQUE = 40
GOAL = 42
PRESENT = 56
"""Addresses of registers."""
_REGISTERS = 128
_LONGEST = 250
"""Longest packet; a longer length is noise."""


def steps(degrees: float) -> int:
    """Return the encoder's reading at an angle, which is 2048 in the middle of a joint's range."""
    return round(_MIDDLE + degrees / _DEG)


class MotorBus:
    """Motors with ids from 1. ``feed`` takes what the computer writes and returns what it reads."""

    def __init__(self, ranges_deg: Sequence[tuple[float, float]], degrees: Sequence[float]) -> None:
        """``ranges_deg``: limits of each motor. ``degrees``: where the motors stand."""
        self._registers = [bytearray(_REGISTERS) for _ in ranges_deg]
        for number, (low, high) in enumerate(ranges_deg):
            registers = self._registers[number]
            registers[FIRMWARE : FIRMWARE + 2] = bytes((3, 10))
            registers[ID] = number + 1
            for address, value in (
                (MODEL, _MODEL),
                (LOWEST, steps(low)),
                (HIGHEST, steps(high)),
                (GOAL, steps(degrees[number])),
            ):
                struct.pack_into("<H", registers, address, value)
        self.measure(degrees)
        self.silent = False
        """The bus is interrupted: motors hear and answer nothing, and hold."""
        self._unread = b""

    def goals_deg(self) -> list[float | None]:
        """Return the angle that each motor holds; None without torque."""
        goals: list[float | None] = []
        for registers in self._registers:
            lowest, highest, goal = (
                struct.unpack_from("<H", registers, address)[0]
                for address in (LOWEST, HIGHEST, GOAL)
            )
            held = (min(max(goal, lowest), highest) - _MIDDLE) * _DEG
            goals.append(held if registers[TORQUE] else None)
        return goals

    def measure(self, degrees: Sequence[float]) -> None:
        """Set the encoders to the joints' angles."""
        for registers, at in zip(self._registers, degrees, strict=True):
            struct.pack_into("<H", registers, PRESENT, min(max(steps(at), 0), STEPS - 1))

    def feed(self, data: bytes) -> bytes:
        """Handle all complete instructions; noise between them is skipped."""
        self._unread += data
        answers = b""
        while (begin := self._unread.find(b"\xff\xff")) >= 0:
            packet = self._unread[begin:]
            if len(packet) < 4:
                break
            whole = packet[3] + 4
            if packet[2] == 0xFF or packet[3] < 2 or whole > _LONGEST:
                self._unread = packet[1:]
                continue
            if len(packet) < whole:
                break
            if _checksum(packet[2 : whole - 1]) == packet[whole - 1]:
                self._unread = packet[whole:]
                answers += (
                    b"" if self.silent else self._obey(packet[2], packet[4], packet[5 : whole - 1])
                )
            else:
                self._unread = packet[1:]
        return answers

    def _obey(self, who: int, instruction: int, parameters: bytes) -> bytes:
        if instruction == SYNC_READ and len(parameters) > 2:
            return b"".join(
                self._answer(motor, self._slice(motor, *parameters[:2]))
                for motor in parameters[2:]
                if self._exists(motor)
            )
        if instruction == SYNC_WRITE and len(parameters) > 2:
            address, length = parameters[:2]
            for at in range(2, len(parameters) - length, length + 1):
                self._write(parameters[at], address, parameters[at + 1 : at + 1 + length])
            return b""
        if not self._exists(who):
            return b""
        if instruction == READ and len(parameters) == 2:
            return self._answer(who, self._slice(who, *parameters))
        if instruction == WRITE and parameters:
            self._write(who, parameters[0], parameters[1:])
        return self._answer(who, b"")

    def _exists(self, who: int) -> bool:
        return 1 <= who <= len(self._registers)

    def _slice(self, who: int, address: int, length: int) -> bytes:
        return bytes(self._registers[who - 1][address : address + length])

    def _write(self, who: int, address: int, data: bytes) -> None:
        if self._exists(who) and address + len(data) <= _REGISTERS:
            self._registers[who - 1][address : address + len(data)] = data

    def _answer(self, who: int, data: bytes) -> bytes:
        body = bytes((who, len(data) + 2, 0)) + data
        return b"\xff\xff" + body + bytes((_checksum(body),))


def _checksum(body: bytes) -> int:
    return ~sum(body) & 0xFF

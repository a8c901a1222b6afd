"""The policy is on a server: a process that is killed, stopped, replaced or cut off while the real driver moves the simulated arm."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import CHUNK, IN_CI, ROUNDS, SERVER_FAULTS, Round
from chaos_franka import Real
from circling_policy import CirclingPolicy, announce
from franka_session import wait_until
from wire import Wire

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_actor import ControlActor
from rlinf_vla.features.realworld.inference import Chunk, Request
from rlinf_vla.features.serving.policy_server import metadata_of
from rlinf_vla.models.remote.options import RemoteOptions
from rlinf_vla.models.remote.policy import RemotePolicy
from rlinf_vla.robots.simulated.client import SimulatedCell
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.testing.toy_policy import LinearOptions
from tests.models.policy_servers import PolicyServer, serving
from tests.skips import needs

pytestmark = [pytest.mark.simulator, pytest.mark.timeout(300 + 120 * ROUNDS), needs("serve")]

ROOT = Path(__file__).parents[2]
START_S = 120.0
LONG_EVERY = 4
LONG_S = 7.0
"""Every fourth time a silent server comes back only after its client has given up the connection."""
RAW = {
    "an HTTP error": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
    "a refusal": b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(range(256)),
    "nothing": b"",
}
"""What a server that speaks no websocket answers before it closes."""


def replies() -> dict[str, Any]:
    """What a server that claims to be ours sends instead of a chunk ``[1, CHUNK, 4]`` of numbers."""
    return {
        "a text frame": "Traceback (most recent call last):\nValueError: out of memory",
        "random bytes": np.random.default_rng(0).bytes(500),
        "another shape": {"actions": np.zeros((1, CHUNK, 7), np.float32)},
        "a short chunk": {"actions": np.zeros((1, 1, 4), np.float32)},
        "not a number": {"actions": np.full((1, CHUNK, 4), np.nan, np.float32)},
        "whole numbers": {"actions": np.zeros((1, CHUNK, 4), np.int64)},
        "no actions": {"action": [1, 2, 3]},
    }


class ServerProcess:
    """``rlinf-vla serve`` with the circling policy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said = folder / "said.txt"
        announce(folder / "package")
        CirclingPolicy(LinearOptions()).save(folder / "model")
        self.start()

    def start(self) -> None:
        words = [
            "serve",
            "recipe=franka_remote",
            "model=circling",
            f"model.checkpoint={self._folder}/model",
            "model.lora.rank=0",
        ]
        command = [
            sys.executable,
            "-P",
            "-m",
            "rlinf_vla.cli.main",
            *words,
            "serve.port=0",
            "cluster=laptop",
        ]
        path = os.pathsep.join(map(str, [ROOT, self._folder / "package"]))
        environment = os.environ | {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self._said.open("w") as said:
            self._process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        wait_until(self._ready, START_S, "the server is ready")
        found = re.search(r"ws://[^:/]+:(\d+)", self._said.read_text())
        assert found
        self.port = int(found[1])

    def _ready(self) -> bool:
        assert self.alive, self._said.read_text()
        return "\nready" in self._said.read_text()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def speaking(answer: bytes) -> Iterator[int]:
    """Port of a server that answers whatever it is asked with these bytes, and closes."""

    def serve() -> None:
        with suppress(OSError):  # the listener is shut down
            while True:
                client, _ = listening.accept()
                with client, suppress(OSError):
                    client.recv(1 << 16)
                    client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


class Served(Real):
    """The arm follows the chunks of a policy on a server, asynchronously."""

    chunk = CHUNK
    warmup = 2

    def __init__(
        self, cell: SimulatedCell, wall_clock_off: Path, folder: Path, stack: ExitStack
    ) -> None:
        self._server = ServerProcess(folder)
        stack.callback(self._server.kill)
        self._wire = Wire(self._server.port)
        stack.callback(self._wire.close)
        options = RemoteOptions(url=f"ws://127.0.0.1:{self._wire.port}")
        self._garbage = itertools.cycle(self._impostors(stack, metadata_of(options)))
        remote = RemotePolicy.load(Path(NO_MODEL), options)
        super().__init__(cell, wall_clock_off)
        self.policy = ControlActor(remote, Settings(0, 0.0, 1), Clock())
        self._silences = 0
        self._until = 0.0

    def _impostors(self, stack: ExitStack, metadata: dict[str, Any]) -> list[int]:
        """Ports of servers that are none of ours."""
        ports = [stack.enter_context(speaking(answer)) for answer in RAW.values()]
        servers = [
            PolicyServer(lambda seen, reply=reply: reply, metadata) for reply in replies().values()
        ]  # type: ignore[misc]
        servers += [
            PolicyServer(lambda seen: None, said)
            for said in ({}, "hello", {"rlinf_vla": {"spec": {"chunk": 9}}})
        ]
        addresses = [stack.enter_context(serving(server)) for server in servers]
        ports.append(
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        )  # it says nothing
        return ports + [int(address.rsplit(":", 1)[1]) for address in addresses]

    def _infer(self, request: Request) -> Chunk:
        return super()._infer(request) if self.player.warm else self.policy(request)

    def inject(self, fault: str) -> None:
        if fault == "killed_server":
            self._server.kill()
        elif fault == "replaced_server":
            self._wire.lead_to(next(self._garbage))
        else:
            self._silences += 1
            self._until = self.clock.now() + LONG_S if self._silences % LONG_EVERY == 0 else 0.0
            self._server.send(signal.SIGSTOP) if fault == "stalled_server" else self._wire.cut()

    def fix(self, fault: str) -> None:
        self.wait(self._until)
        if not self._server.alive:
            self._server.start()
            self._wire.lead_to(self._server.port)
        elif fault == "replaced_server":
            self._wire.lead_to(self._server.port)
        self._server.send(signal.SIGCONT)
        self._wire.mend()


@pytest.fixture(scope="module")
def served(
    cell: SimulatedCell, wall_clock_off: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with ExitStack() as stack:
        made = Served(cell, wall_clock_off, tmp_path_factory.mktemp("served"), stack)
        stack.callback(made.close)
        yield made


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.nightly] * (fault not in IN_CI))
        for fault in SERVER_FAULTS
    ],
)
def test_a_server_that_fails_stops_the_arm_in_time_and_is_latched(
    fault: str, served: Served, rounds: list[Round]
) -> None:
    found = served.rounds(fault, ROUNDS or 1)
    rounds += found
    assert [each.wrong for each in found] == [None] * len(found)

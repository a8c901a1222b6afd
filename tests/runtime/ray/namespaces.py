"""Two Ray nodes in two network namespaces, and a link between them. Needs root rights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
NEAR, FAR = "10.77.0.1", "10.77.0.2"
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    # a node counts as gone after 3 seconds without an answer, not after a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
COMMON = ("--num-cpus=2", "--disable-usage-stats", "--object-store-memory=200000000")


class Nodes:
    """``rlinf_near`` is the cluster's head; ``rlinf_far`` has the resources ``far`` and ``robot``."""

    address = f"{NEAR}:6379"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = ExitStack()
        self._environment = os.environ | ENVIRONMENT | {"XDG_STATE_HOME": str(folder / "state")}

    def inside(self, namespace: str, *command: str, **options: Any) -> subprocess.Popen[str]:
        command = ("ip", "netns", "exec", namespace, *command)
        return self._started.enter_context(
            subprocess.Popen(command, env=self._environment, cwd=ROOT, text=True, **options)
        )

    def close(self) -> None:
        """The output of the command that ran inside, after its end."""
        self._started.close()

    def start_near(self) -> None:
        head = (
            "--head",
            f"--node-ip-address={NEAR}",
            "--port=6379",
            "--include-dashboard=false",
            '--resources={"near": 8}',
        )
        self._ray("rlinf_near", "start", *head, *COMMON)

    def start_far(self) -> None:
        there = (
            f"--address={self.address}",
            f"--node-ip-address={FAR}",
            '--resources={"far": 8, "robot": 1}',
        )
        self._ray("rlinf_far", "start", *there, "--labels=market-type=spot", *COMMON)

    def tell_to_leave(self, node_id: str) -> None:
        """Send the notice that comes before a preemption."""
        why = (
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=preempted",
            "--deadline-remaining-seconds=120",
        )
        self._ray(
            "rlinf_near", "drain-node", f"--address={self.address}", f"--node-id={node_id}", *why
        )

    def cut(self) -> None:
        ip("-n", "rlinf_far", "link", "set", "rlinf1", "down")

    def fix(self) -> None:
        ip("-n", "rlinf_far", "link", "set", "rlinf1", "up")

    def kill(self, namespace: str) -> None:
        """Kills all processes of a node at once."""
        found = subprocess.run(
            ["ip", "netns", "pids", namespace],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _ray(self, namespace: str, *arguments: str) -> None:
        log = self._folder / f"{namespace}.log"
        with log.open("w") as file:  # daemons would keep a pipe open
            command = [str(Path(sys.executable).with_name("ray")), *arguments]
            assert (
                self.inside(namespace, *command, stdout=file, stderr=subprocess.STDOUT).wait(
                    timeout=120
                )
                == 0
            ), log.read_text()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@contextmanager
def namespaces() -> Iterator[None]:
    """Raises OSError or CalledProcessError if they cannot be created."""
    for name in ("rlinf_near", "rlinf_far"):
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    try:
        ip(
            "link",
            "add",
            "rlinf0",
            "netns",
            "rlinf_near",
            "type",
            "veth",
            "peer",
            "name",
            "rlinf1",
            "netns",
            "rlinf_far",
        )
        for name, device, address in (("rlinf_near", "rlinf0", NEAR), ("rlinf_far", "rlinf1", FAR)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in ("rlinf_near", "rlinf_far"):
            ip("netns", "del", name)

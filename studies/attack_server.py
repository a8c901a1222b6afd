"""Attack a policy server with malformed frames and requests while a good client is served.

Quiet and attacked phases take turns. The server must not crash, its memory must stay bounded, it
must answer the good client with the same bits, and its p99 under attack should be within twice that
of the quiet phases. ``make prove-serve`` writes docs/results/serving.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from attack_frames import FRAMES, REQUESTS, connected, frame, observation, seeded, upgraded, vanish

from rlinf_vla.core.io import write_text
from rlinf_vla.features.serving.array_messages import pack, unpack

ROOT = Path(__file__).parents[1]
SERVE = [
    "recipe=maniskill_ppo",
    "cluster=laptop",
    "cluster.rollout_threads=1",
    "serve.port=0",
    "serve.handshake_timeout_s=3",
    "serve.idle_timeout_s=5",
]
RATE_HZ = 10.0
"""Requests of the good client per second, as a control loop makes them."""
ATTACKERS, THREADS = 2, 4
"""Processes that attack, and threads of each."""
LORISES, HALF_OPEN = 40, 20
"""Of each process: connections that drip a byte now and then, and websockets that nobody reads."""
PATHS = (
    "/",
    "/v1/realtime/robot/openpi",
    "/v1/realtime/robot/openpi",
    "/v1/realtime/robot/openpi",
    "/vla-eval",
    "/openpi/policy",
)


def good_client(port: int, seconds: float) -> dict[str, Any]:
    """Ask ``RATE_HZ`` times a second; return the latencies in ms, and the distinct replies."""
    from websockets.sync.client import connect

    message = pack(observation())
    latencies = []
    replies = Counter[bytes]()
    with connect(f"ws://127.0.0.1:{port}/", compression=None) as client:
        client.recv()
        began = time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            client.send(message)
            reply = client.recv()
            assert isinstance(reply, bytes), reply
            replies[unpack(reply)["actions"].tobytes()] += 1
            latencies.append(1e3 * (time.perf_counter() - now))
            time.sleep(max(0.0, 1 / RATE_HZ - (time.perf_counter() - now)))
    return {"ms": latencies, "replies": len(replies)}


class Attacker:
    """Sends ``count`` malformed frames and requests at no more than ``rate`` a second."""

    def __init__(self, port: int, number: int, count: int, rate: float, holds: bool) -> None:
        """``holds``: also keep slow and half-open connections."""
        self.port = port
        self.count = count
        self.rate = rate
        self.draw = seeded(number)
        self.holds = holds
        self.sent: Counter[str] = Counter()
        self.sockets: dict[str, Any] = {}
        self.held: list[Any] = []

    def run(self) -> dict[str, int]:
        began = time.perf_counter()
        while (total := sum(self.sent.values())) < self.count:
            if self.holds:
                self.hold()
            with suppress(OSError):
                if self.draw.random() < 0.7:
                    self.send_frame()
                else:
                    self.send_request()
            time.sleep(max(0.0, began + total / self.rate - time.perf_counter()))
        for connection in [*self.held, *self.sockets.values()]:
            vanish(connection)
        return dict(self.sent)

    def send_frame(self) -> None:
        """Send a bad message on an open websocket, or a new one, and wait for the refusal."""
        path = self.draw.choice(PATHS)
        kind = self.draw.choice([*FRAMES, "text", "oversized", "unmasked", "left"])
        connection = self.sockets.pop(path, None) or upgraded(self.port, path)
        if kind == "text":
            data = frame(b"{}", first=0x81)
        elif kind == "oversized":
            data = frame(b"x", length=1 << 40)
        elif kind == "unmasked":
            data = b"\x82\x01x"
        else:
            data = frame(FRAMES["truncated" if kind == "left" else kind](self.draw))
        self.sent[f"frame: {kind}"] += 1
        try:
            connection.sendall(data)
            if kind == "left":
                vanish(connection)
                return
            reply = connection.recv(1 << 16)
        except OSError:
            connection.close()
            return
        if reply and path == PATHS[1]:
            self.sockets[path] = connection
        else:
            connection.close()

    def send_request(self) -> None:
        kind = self.draw.choice(list(REQUESTS))
        self.sent[f"request: {kind}"] += 1
        with connected(self.port) as connection:
            connection.sendall(REQUESTS[kind](self.draw))
            if self.draw.random() < 0.2:
                vanish(connection)
            elif kind not in ("head without end", "garbage"):
                connection.recv(1 << 16)

    def hold(self) -> None:
        """Keep slow and half-open connections, replacing some of them."""
        with suppress(OSError):
            if len(self.held) < LORISES + HALF_OPEN:
                slow = self.draw.random() < LORISES / (LORISES + HALF_OPEN)
                self.held.append(
                    connected(self.port) if slow else upgraded(self.port, self.draw.choice(PATHS))
                )
                self.sent["slow connections" if slow else "half-open websockets"] += 1
            elif self.draw.random() < 0.1:
                self.held.pop(self.draw.randrange(len(self.held))).close()
            if self.held and self.draw.random() < 0.2:
                self.held[self.draw.randrange(len(self.held))].sendall(b"G")


def attack(port: int, number: int, count: int, rate: float) -> dict[str, int]:
    """Attack from several threads; return how often each kind was sent."""
    os.nice(15)
    attackers = [
        Attacker(port, number * THREADS + i, count // THREADS, rate / THREADS, i == 0)
        for i in range(THREADS)
    ]
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(sum(map(Counter, threads.map(Attacker.run, attackers)), Counter[str]()))


def begun(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def result(program: subprocess.Popen[str]) -> Any:
    out, _ = program.communicate()
    assert program.returncode == 0, out
    return json.loads(out)


def measure(
    attacks: int,
    pairs: int,
    seconds: float,
    rate: float,
    seed: int,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return latencies of quiet and attacked phases, what was sent, and the server's memory."""
    with tempfile.TemporaryFile("w+") as errors, ExitStack() as stack:
        command = [sys.executable, "-P", "-m", "rlinf_vla.cli.main", "serve", *SERVE]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=tempfile.gettempdir()
        )
        stack.callback(server.kill)
        assert server.stdout is not None
        port = int(re.search(r":(\d+) accepts", server.stdout.readline())[1])  # type: ignore[index]
        assert "ready" in server.stdout.readline()
        process = psutil.Process(server.pid)
        sent = Counter[str]()
        replies = set[int]()
        results: dict[str, Any] = {"quiet": [], "attacked": [], "memory": [], "attacked_s": 0.0}
        good_client(port, 3)
        for pair in range(pairs):
            quiet = result(begun("--client", port, seconds))
            began = time.perf_counter()
            share = -(-attacks // (pairs * ATTACKERS * THREADS)) * THREADS
            numbers = range(
                ATTACKERS * (pairs * seed + pair), ATTACKERS * (pairs * seed + pair + 1)
            )
            attackers = [
                begun("--attacker", port, number, share, rate / ATTACKERS) for number in numbers
            ]
            attacked: list[float] = []
            while any(attacker.poll() is None for attacker in attackers):
                part = result(begun("--client", port, min(seconds, 10.0)))
                attacked += part["ms"]
                replies.add(part["replies"])
            results["attacked_s"] += time.perf_counter() - began
            for attacker in attackers:
                sent.update(result(attacker))
            replies.add(quiet["replies"])
            results["quiet"].append(quiet["ms"])
            results["attacked"].append(attacked)
            results["memory"].append(process.memory_info().rss)
            p99 = [
                f"{np.percentile(latencies, 99):.0f} ms" for latencies in (quiet["ms"], attacked)
            ]
            say(
                f"pair {pair + 1}: p99 quiet {p99[0]}, attacked {p99[1]}; memory {results['memory'][-1] >> 20} MiB"
            )
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=60)
        errors.seek(0)
        return results | {
            "sent": dict(sent),
            "peak": int(peak[1]) << 10 if peak else 0,
            "exit": server.returncode,
            "stopped": out.strip(),
            "errors": errors.read(),
            "same": replies == {1},
        }


def page(found: dict[str, Any], command: str) -> str:
    """Return the results as a page of docs/results."""
    rows = []
    joined = {}
    for kind in ("quiet", "attacked"):
        joined[kind] = np.concatenate([np.asarray(phase) for phase in found[kind]])
        cells = [f"{np.percentile(joined[kind], rank):.1f}" for rank in (50, 99)] + [
            f"{joined[kind].max():.1f}"
        ]
        rows.append(f"| {kind} | {len(joined[kind])} | {' | '.join(cells)} |")
    ratio = np.percentile(joined["attacked"], 99) / np.percentile(joined["quiet"], 99)
    memory = [size / (1 << 20) for size in found["memory"]]
    pairs = [
        "{:.0f} and {:.0f}".format(*(np.percentile(phase, 99) for phase in pair))
        for pair in zip(found["quiet"], found["attacked"], strict=True)
    ]
    sent = found["sent"]
    total = sum(found["sent"].values())
    kinds = "\n".join(f"| {name} | {count} |" for name, count in sorted(sent.items()) if count)
    return f"""# A policy server under attack

`{command}` attacks `rlinf-vla serve` with malformed frames and requests, while a good client
asks for actions {RATE_HZ:g} times a second. Quiet and attacked phases take turns
({len(found["quiet"])} of each), because other programs used the two cores at the same time. The attackers ran on the
same cores, at a lower priority.

| phase | requests of the good client | median, ms | p99, ms | longest, ms |
|---|---|---|---|---|
{chr(10).join(rows)}

* p99 under attack is {ratio:.2f} times the quiet one.
* p99 of each pair of phases, quiet and attacked, ms: {", ".join(pairs)}.
* {total} attacks in {found["attacked_s"]:.0f} s, {total / found["attacked_s"]:.0f} a second.
* All replies to the good client had the same bits: {"yes" if found["same"] else "no"}.
* Memory of the server after each attacked phase, MiB: {", ".join(f"{size:.0f}" for size in memory)}; peak
  {found["peak"] / (1 << 20):.0f}.
* After SIGTERM its exit code was {found["exit"]}. Its log of errors had {len(found["errors"].splitlines())} lines.

| attack | times |
|---|---|
{kinds}

Policy: `openvla_tiny_pushcube` on the CPU, from `recipe=maniskill_ppo`. Server:
`{" ".join(SERVE[2:])}`, otherwise
defaults. All attacks came from the same machine; a network's own limits, and floods that fill a
link, were not tested.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a quiet phase")
    parser.add_argument("--rate", type=float, default=120.0, help="attacks per second")
    parser.add_argument("--seed", type=int, default=0, help="another one sends other messages")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--attacker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(good_client(int(arguments.client[0]), float(arguments.client[1]))))
    elif arguments.attacker:
        port, number, count, rate = arguments.attacker
        print(json.dumps(attack(int(port), int(number), int(count), float(rate))))
    else:
        results = measure(
            arguments.attacks,
            arguments.pairs,
            arguments.seconds,
            arguments.rate,
            arguments.seed,
            lambda line: print(line, flush=True),
        )
        text = page(results, f"make prove-serve SEED={arguments.seed}")
        print(text, results["errors"][-2000:])
        if arguments.page:
            write_text(arguments.page, text)
        if results["exit"] or results["errors"] or not results["same"]:
            sys.exit("the server did not withstand the attack")


if __name__ == "__main__":
    main()

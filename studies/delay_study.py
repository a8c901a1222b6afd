"""Success against delay: policies on a server drive the simulated Franka over a slow link.

python studies/delay_study.py OUT pi0=RUN oft=RUN [--links 0 200 200+50] [--episodes 20] [--split]
                            [--task TouchAround --sampled]

Each policy is served by `rlinf-vla serve` in a process of its own, and drives the arm at 10 Hz with
`rlinf-vla robot run recipe=franka_remote` through a relay that delays every answer. All runs play
the same episodes; with ``--sampled`` policies draw their noise instead of acting greedily. Writes
OUT/POLICY_MODE_LINK/ and prints a table; a finished run is not repeated. NAME_delay, a policy that
was trained with delays, is also compared with NAME.
With ``--split`` the modes are asynchronous ones of the whole policy on the server, of its head at
the arm, and of the head with several requests under way.

A link is DELAY[+JITTER][/LOSS]: milliseconds added to a round trip, their standard deviation, and
the percentage of answers that are lost and sent again after 200 ms.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf_vla.benchmarks.slow_link import Link, relay
from rlinf_vla.evaluation.statistics import paired_episodes, wilson_interval

PROGRAM = [sys.executable, "-P", "-m", "rlinf_vla.cli.main"]
MODES = {
    "synchronous": ["control.asynchronous=false"],
    "asynchronous": ["control.asynchronous=true"],
    "real-time chunking": ["control.asynchronous=true", "control.real_time_chunking=true"],
}
SPLIT = {
    "whole policy": ["control.asynchronous=true"],
    "head": ["control.asynchronous=true"],
    "head, 4 requests in flight": ["control.asynchronous=true", "control.requests_in_flight=4"],
}
FLOW = ("pi0", "pi0_delay")
"""Policies that can continue committed actions."""
COMMON = [
    "control.max_observation_age_s=2",
    "control.max_misses=20",
    "evaluation.filmed=0",
    "robot.max_age_s=2",
    "robot.frozen_s=5",
]


@contextmanager
def served(run: str) -> Iterator[int]:
    """Serve the policy of a run; yield the port."""
    server = subprocess.Popen(
        [*PROGRAM, "serve", f"run={run}", "serve.port=0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            print(line, end="", flush=True)
            if match := re.search(r"ws://[^:/]+:(\d+)", line):
                yield int(match[1])
                return
        raise RuntimeError(f"the server of {run} ended with exit code {server.wait()}")
    finally:
        server.terminate()
        server.wait(60)


def link_of(text: str) -> Link:
    """Read DELAY[+JITTER][/LOSS]. Raises ValueError."""
    times, _, loss = text.partition("/")
    delay, _, jitter = times.partition("+")
    return Link(float(delay) / 1e3, float(jitter or 0) / 1e3, float(loss or 0) / 100)


def play(
    directory: Path, run: str, port: int, link: str, arguments: argparse.Namespace, mode: str
) -> None:
    if (directory / "report.html").exists():
        return
    with relay(port, link_of(link)) as relayed:
        node = "rollout.backbone" if mode.startswith("head") else "model.options"
        policy = (
            [f"run={run}", "rollout.split=head", "evaluation.modes=[greedy]"]
            if mode.startswith("head")
            else ["recipe=franka_remote"]
        )
        command = [
            *PROGRAM,
            "robot",
            "run",
            *policy,
            f"{node}.url=ws://127.0.0.1:{relayed}",
            f"{node}.timeout_s=10",
        ]
        command += [
            f"run_dir={directory}",
            f"episodes={arguments.episodes}",
            f"env.episode_limit={arguments.limit}",
            *COMMON,
        ]
        command += [
            f"robot.task={arguments.task}",
            *(["evaluation.modes=[sampled]", "rollout.temperature=1"] * arguments.sampled),
        ]
        subprocess.run([*command, *(MODES | SPLIT)[mode]], check=True)


def episodes_of(directory: Path) -> list[dict[str, Any]]:
    (path,) = (directory / "evaluation").glob("*.json")
    modes = json.loads(path.read_text())
    episodes: list[dict[str, Any]] = (modes.get("sampled") or modes["greedy"])["episodes"]
    return episodes


def row(name: str, mode: str, link: str, directory: Path, within: int) -> str:
    """Return a line of the table; success counts within ``within`` control periods."""
    episodes = episodes_of(directory)
    control = json.loads((directory / "control.json").read_text())
    won = [episode for episode in episodes if episode["success"] and episode["steps"] <= within]
    low, high = wilson_interval(len(won), len(episodes))
    at_all = f"{sum(episode['success'] for episode in episodes)} of {len(episodes)}"
    solved = [episode["steps"] for episode in episodes if episode["success"]]
    periods = f"{sum(solved) / len(solved):.1f}" if solved else "-"
    steps = control["steps"]
    age = control["ages_ms"]["action"]["p50"]
    faults = sum(episode["fault"] for episode in episodes)
    rate = f"{100 * len(won) / len(episodes):.0f} % ({100 * low:.0f} to {100 * high:.0f})"
    cells = [
        name,
        mode,
        link,
        rate,
        at_all,
        periods,
        f"{age:.0f}",
        str(steps["held"]),
        str(steps["skipped"]),
        str(faults),
    ]
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("policies", nargs="+", metavar="NAME=RUN")
    parser.add_argument(
        "--links",
        nargs="+",
        default=["0", "100", "200", "300", "200+50", "200/5"],
        metavar="DELAY[+JITTER][/LOSS]",
    )
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--limit", type=int, default=60, help="control periods per episode")
    parser.add_argument(
        "--within",
        type=int,
        default=30,
        help="control periods within which success counts in the table",
    )
    parser.add_argument(
        "--task",
        default="TouchCube",
        help="task of the simulated cell, as in the policies' demonstrations",
    )
    parser.add_argument("--sampled", action="store_true", help="draw noise at temperature 1")
    parser.add_argument(
        "--split",
        action="store_true",
        help="compare the whole policy on the server with its head at the arm",
    )
    arguments = parser.parse_args(words)
    for link in arguments.links:
        try:
            link_of(link)
        except ValueError:
            parser.error(f"--links {link}: give DELAY[+JITTER][/LOSS], such as 200+50 or 200/5")
    lines = list[str]()
    directories = dict[tuple[str, str, str], Path]()
    for policy in arguments.policies:
        name, _, run = policy.partition("=")
        with served(run) as port:
            for link in arguments.links:
                for mode in SPLIT if arguments.split else MODES:
                    if mode == "real-time chunking" and name not in FLOW:
                        continue
                    directory = (
                        arguments.out
                        / f"{name}_{mode.replace(',', '').replace(' ', '_')}_{link.replace('/', '_lost_')}"
                    )
                    play(directory, run, port, link, arguments, mode)
                    directories[name, mode, link] = directory
                    lines.append(row(name, mode, link, directory, arguments.within))
                    print(lines[-1], flush=True)
    heads = [
        "policy",
        "mode",
        "delay ms + jitter ms / loss %",
        "success in time",
        "at all",
        "periods to success",
    ]
    heads.append("age of an action's observation, ms (median)")
    print(f"\n| {' | '.join([*heads, 'held', 'skipped', 'faults'])} |")
    print("|---" * 10 + "|")
    print("\n".join(lines))
    for (name, mode, link), directory in directories.items():
        others = {(name, "synchronous", link)} if mode != "synchronous" else set()
        if name.endswith("_delay"):
            others |= {
                (name.removesuffix("_delay"), baseline, link) for baseline in (mode, "asynchronous")
            }
        for other in sorted(others & set(directories)):
            print(
                f"{name}, {link}, {mode} - {other[0]}, {other[1]}: {compared(directories[other], directory, arguments.within)}"
            )


def compared(before: Path, after: Path, within: int) -> str:
    """Return the paired difference of success within ``within`` control periods."""
    pair = [
        [
            episode | {"success": episode["success"] and episode["steps"] <= within}
            for episode in episodes_of(path)
        ]
        for path in (before, after)
    ]
    difference = paired_episodes(*pair)
    low, high = difference["pc_difference_ci95"]
    return f"{difference['pc_difference']:+.0f} points ({low:+.0f} to {high:+.0f}), p = {difference['p_value']:.3f}"


if __name__ == "__main__":
    main()

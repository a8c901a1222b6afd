"""The control loop of ``bench control`` with the recipe's policy on a server, over slow links.

The server is that of ``rlinf-vla serve``, in a process of its own on this machine. A relay delays
and loses its answers. Success against delay is measured by studies/delay_study.py.

``python -m rlinf_vla.benchmarks.served_control RUN_DIR`` serves the recipe in RUN_DIR.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_vla.benchmarks import harness
from rlinf_vla.benchmarks.slow_link import RESEND_S, Link, relay
from rlinf_vla.benchmarks.synthetic_cell import SyntheticCamera, SyntheticRobot
from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.config.robot import ControlConfig, timing
from rlinf_vla.core import plugins
from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.core.child_process import Child
from rlinf_vla.core.protocols import Policy, RealTimeChunking
from rlinf_vla.features.planner.synthetic import INSTRUCTION
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_actor import ControlActor
from rlinf_vla.features.realworld.control_loop import ControlLoop
from rlinf_vla.features.realworld.inference import InferenceWorker
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.runtime.saved_recipe import read_saved

LINKS = (Link(), Link(0.1), Link(0.2), Link(0.4), Link(0.2, jitter_s=0.05), Link(0.2, loss=0.05))
CONTROL_HZ, SECONDS = 10.0, 4.0
"""Control rate, and seconds per link and mode."""
START_S = 600.0
"""Time limit to load the policy."""
REMOTE = "remote"


def measure(
    config: DictConfig, recipe: Recipe, policy: Policy, costs: tuple[float, float]
) -> list[dict[str, Any]]:
    """Return what the loop counted over each of LINKS, in each mode that ``policy`` can be run in.

    ``costs``: seconds of a robot's call and of a camera's image. Raises Failure.
    """
    rows = []
    with _server(config) as port:
        for link in LINKS:
            with relay(port, link) as relayed:
                for mode, control in modes(recipe, policy).items():
                    document = _run(f"ws://127.0.0.1:{relayed}", recipe, control, costs)
                    rows.append(
                        {
                            "mode": mode,
                            **{
                                name: value
                                for name, value in asdict(link).items()
                                if name != "seed"
                            },
                            **document,
                        }
                    )
    return rows


def modes(recipe: Recipe, policy: Policy) -> dict[str, ControlConfig]:
    """Return the ways to run ``policy``; without those that its chunk or the recipe forbids."""
    free = replace(
        recipe.control, execution_horizon=None, real_time_chunking=False, max_misses=sys.maxsize
    )
    asynchronous = replace(free, asynchronous=True)
    controls = {"synchronous": replace(free, asynchronous=False), "asynchronous": asynchronous}
    if isinstance(policy, RealTimeChunking):
        controls["real-time chunking"] = replace(asynchronous, real_time_chunking=True)
    return {
        name: control for name, control in controls.items() if _possible(control, policy.spec.chunk)
    }


def _possible(control: ControlConfig, chunk: int) -> bool:
    try:
        timing(control, CONTROL_HZ, chunk)
    except UserError:
        return False
    return True


def _run(
    url: str, recipe: Recipe, control: ControlConfig, costs: tuple[float, float]
) -> dict[str, Any]:
    remote = plugins.models()[REMOTE]
    clock = Clock()
    policy = remote.load(Path(NO_MODEL), remote.Config(url=url))
    robot = SyntheticRobot(clock, CONTROL_HZ, costs[0])
    cameras = [
        SyntheticCamera(clock, name, size, costs[1]) for name, size in policy.spec.images.items()
    ]
    background = InferenceWorker(
        ControlActor(policy, builders.actor_settings(recipe, 0.0), clock), clock
    )
    loop = ControlLoop(robot, cameras, background, policy.spec.chunk, control, clock)
    try:
        loop.warm_up(INSTRUCTION)
        ended = loop.run(
            INSTRUCTION, lambda step: "enough" if step.tick + 1 >= SECONDS * CONTROL_HZ else None
        )
        background.settle(clock.now() + SECONDS)
    finally:
        background.close()
    return {"ended": ended.kind, **loop.accounting.document()}


def show(report: harness.Report, found: list[dict[str, Any]]) -> None:
    columns = (
        "delay ms",
        "jitter ms",
        "loss",
        "mode",
        "round trip ms, p50",
        "p99",
        "held",
        "skipped",
        "too old",
        "age ms, p50",
        "p99",
    )
    rows = []
    for row in found:
        trip, age = (
            row[kind].get(name, {})
            for kind, name in (("sections_ms", "act"), ("ages_ms", "action"))
        )
        link = (
            f"{1e3 * row['delay_s']:g}",
            f"{1e3 * row['jitter_s']:g}",
            f"{100 * row['loss']:g} %",
            row["mode"],
        )
        times = [
            f"{block[name]:.0f}" if block else "-"
            for block in (trip, age)
            for name in ("p50", "p99")
        ]
        counts = [
            str(row["steps"]["held"]),
            str(row["steps"]["skipped"]),
            str(row["chunks"]["too_old"]),
        ]
        rows.append((*link, *times[:2], *counts, *times[2:]))
    title = f"Policy on a server, {CONTROL_HZ:g} Hz, {SECONDS * CONTROL_HZ:g} periods each; a lost answer comes {1e3 * RESEND_S:g} ms later"
    report.show(columns, rows, title)


@contextmanager
def _server(config: DictConfig) -> Iterator[int]:
    """Serve the recipe's policy in another process; yield the port. Raises Failure."""
    with tempfile.TemporaryDirectory(prefix="rlinf-vla-") as folder:
        here = {
            "host": "127.0.0.1",
            "port": 0,
            "token_env": None,
            "certificate": None,
            "private_key": None,
        }
        served_config = OmegaConf.merge(config, {"serve": here})
        assert isinstance(served_config, DictConfig)
        run_directory.save_recipe(Path(folder) / run_directory.RECIPE, served_config)
        child = Child(["-m", "rlinf_vla.benchmarks.served_control", folder])
        try:
            yield _port(child)
        finally:
            child.end()


def _port(child: Child) -> int:
    """Wait until the server is ready, and return its port. Raises Failure."""
    try:
        message = child.channel.receive(START_S)
    except ChannelClosed:
        child.end(5.0)
        raise Failure(
            f"the policy server ended: {child.output_tail() or 'it printed nothing'}"
        ) from None
    if message is None:
        raise Failure(f"the policy server was not ready within {START_S:g} s")
    return int(message["port"])


def main(directory: Path) -> None:
    """Serve the recipe in ``directory``; say the port to the parent process when it is ready."""
    parent = Channel.to_parent()
    parent.exit_with_peer()
    from rlinf_vla.features.serving.server import listening, run
    from rlinf_vla.features.serving.service import opened

    recipe = recipes.read(read_saved(directory))
    with listening(recipe.serve) as listener:

        def say(line: str) -> None:
            if line.startswith("ready"):
                parent.send({"port": listener.getsockname()[1]})

        async def serve() -> None:
            await run(listener, recipe.serve, partial(opened, recipe), None, asyncio.Event(), say)

        asyncio.run(serve())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A simulated Franka on another node; a session survives a cut link and a dead node. ``make cluster-test``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.features.realworld.process import LEARNER_GONE
from rlinf_vla.telemetry.metrics import read_metrics
from tests.robots.franka_session import CELL_YAML, SMALL, journal, pursues, wait_until
from tests.runtime.ray.namespaces import Nodes
from tests.skips import require

STEPS = "rollout/episode_len"
WHOLE = 120
HEARTBEAT_S = 5
START_S = 240.0
LONG = (f"env.episode_limit={WHOLE}", "session.patience_s=1000")
"""Episodes last longer than the detection of a lost learner."""


class Elsewhere:
    """``rlinf-vla train`` on the near node, its cell on the far one."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes = nodes
        self.cell = folder / "cell"
        self.run = folder / "run"
        self._said = folder / "said.txt"
        self.cell.mkdir()
        limits = folder / "patient.yaml"
        limits.write_text(CELL_YAML)
        self.words = (
            f"robot.folder={self.cell}",
            f"robot.cell={limits}",
            "cluster.runtime=ray",
            f"cluster.address={nodes.address}",
        )
        self.words += (
            *SMALL,
            f"cluster.heartbeat_s={HEARTBEAT_S}",
            "cluster.start_timeout_s=120",
            "session.minutes=20",
            *LONG,
        )
        self.learner = self.command(
            "train", "recipe=franka_rlpd", f"run_dir={self.run}", "resume=auto", *self.words
        )

    def command(self, *words: str) -> subprocess.Popen[str]:
        with self._said.open("a") as said:
            return self.nodes.inside(
                "rlinf_near",
                sys.executable,
                "-m",
                "rlinf_vla.cli.main",
                *words,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return " ".join(self._said.read_text().split())

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        def met() -> Any:
            assert self.learner.poll() is None, self._said.read_text()
            return condition()

        wait_until(met, START_S, what)

    def lengths(self) -> list[float]:
        """Files of the episodes that were used for training."""
        return (
            [line[STEPS] for line in read_metrics(self.run) if STEPS in line]
            if self.run.exists()
            else []
        )

    def wait_played(self) -> None:
        """Another iteration."""
        before = len(self.lengths())
        self.wait(lambda: len(self.lengths()) > before, "another episode was learnt from")

    def wait_moving(self) -> None:
        self.wait(lambda: pursues(self.cell), "an episode is being played")
        time.sleep(1.0)

    def close(self) -> None:
        self.learner.kill()
        self.learner.wait()


@pytest.fixture
def elsewhere(nodes: Nodes, tmp_path: Path) -> Iterator[Elsewhere]:
    require("franka")
    made = Elsewhere(nodes, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.nightly
@pytest.mark.realtime
@pytest.mark.timeout(1200)
def test_a_session_survives_the_loss_of_link_and_node(
    elsewhere: Elsewhere, nodes: Nodes, tmp_path: Path
) -> None:
    elsewhere.wait_played()
    elsewhere.wait_moving()

    before = len(journal(elsewhere.cell))
    nodes.cut()
    cut = time.monotonic()
    wait_until(
        lambda: any(each["event"] == "end" for each in journal(elsewhere.cell)[before:]),
        60,
        "the arm's process ends",
    )
    assert time.monotonic() - cut < 6 * HEARTBEAT_S
    assert [
        each["fault"] for each in journal(elsewhere.cell)[before:] if each["event"] == "end"
    ] == [f"policy: {LEARNER_GONE}"]
    elsewhere.wait(lambda: "starting a new one" in elsewhere.said, "the learner names it")
    nodes.kill("rlinf_far")
    nodes.fix()
    nodes.start_far()
    elsewhere.wait_played()
    assert elsewhere.lengths()[-1] < WHOLE, "its data until then was delivered"

    elsewhere.wait_moving()
    said = len(elsewhere.said)
    nodes.kill("rlinf_far")
    elsewhere.wait(lambda: "starting a new one" in elsewhere.said[said:], "the learner names it")
    nodes.start_far()
    elsewhere.wait_played()
    assert elsewhere.lengths()[-1] < WHOLE, "the data until the node died was delivered"

    os.kill(elsewhere.learner.pid, signal.SIGINT)
    assert elsewhere.learner.wait(timeout=120) == 130, elsewhere.said[-2000:]
    assert not list((tmp_path / "state/rlinf-vla/sessions").iterdir()), "all was delivered"

    checkpoint = max((elsewhere.run / "checkpoints").glob("step_*"))
    words = [word for word in elsewhere.words if re.match(r"robot|cluster|env|control", word)]
    judged = elsewhere.command(
        "eval",
        "recipe=franka_rlpd",
        f"checkpoint={checkpoint}",
        f"run_dir={tmp_path / 'eval'}",
        "episodes=2",
        *words,
    )
    assert judged.wait(timeout=START_S) == 0, elsewhere.said[-2000:]

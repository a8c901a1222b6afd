"""Counter world and the linear policy as a package of their own announces them: for commands that run in processes of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlinf_vla.protocols import Part
from tests.rollout.fake_env import GOALS, CounterConfig, CounterPlugin

ENTRY_POINTS = """[rlinf_vla.envs]
counter = tests.commands.counting_plugins:plugin

[rlinf_vla.models]
linear = tests.rollout.linear_policy:LinearPolicy
"""


class CountingInSuites(CounterPlugin):
    """Two suites of the same two tasks, with more and with less time."""

    def parts(self, config: CounterConfig) -> list[Part]:
        return [Part(f"within {limit}", tuple(GOALS), replace(config, episode_limit=limit)) for limit in (config.episode_limit, 3)]


plugin = CountingInSuites()


def announce(folder: Path) -> None:
    """Such a package in ``folder``, which is to be on PYTHONPATH."""
    package = folder / "counting-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)

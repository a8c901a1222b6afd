"""Counter world and the linear policy as an installed package: for commands in separate processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlinf_vla.core.protocols import Suite, VectorEnv
from rlinf_vla.core.verb import Help, Verb
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.toy_env import GOALS, CounterConfig, CounterPlugin

ENTRY_POINTS = """[rlinf_vla.envs]
counter = tests.cli.counting_plugins:plugin
counter_processes = tests.cli.counting_plugins:in_processes

[rlinf_vla.models]
linear = rlinf_vla.testing.toy_policy:LinearPolicy

[rlinf_vla.verbs]
count = tests.cli.counting_plugins:COUNT
"""


class CountingInSuites(CounterPlugin):
    """Two suites of the same two tasks, with a longer and a shorter time limit."""

    def suites(self, config: CounterConfig) -> list[Suite]:
        return [
            Suite(f"within {limit}", tuple(GOALS), replace(config, episode_limit=limit))
            for limit in (config.episode_limit, 3)
        ]


@dataclass
class ProcessesConfig(CounterConfig):
    name: str = "counter_processes"
    seconds: float = 0.0
    """Seconds of a control step."""


class CountingInProcesses(CounterPlugin):
    """Two simulator processes for each group."""

    name = "counter_processes"
    Config = ProcessesConfig

    def create(self, config: CounterConfig, groups: int) -> list[VectorEnv]:
        assert isinstance(config, ProcessesConfig)
        program = ["-m", "tests.envs.counting_simulator"]
        options = {"seconds": config.seconds}
        slots = config.num_envs // groups
        limit = config.episode_limit
        pools = [
            SimulatorPool(program, options, slots=slots, processes=2, episode_limit=limit)
            for _ in range(groups)
        ]
        return [ProcessVectorEnv(pool, ("Low",)) for pool in pools]


COUNT = Verb(
    "Count",
    "count the words",
    "tests.cli.counting_plugins",
    Help(("WORD ...",), (("WORD", "to be counted"),), ("a", "a b", "a b c")),
)


def run(words: list[str]) -> int:
    """The verb ``count``."""
    print(len(words))
    return 0


plugin = CountingInSuites()
in_processes = CountingInProcesses()


def announce(folder: Path) -> None:
    """Writes such a package into ``folder``, which must be on PYTHONPATH."""
    package = folder / "counting-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)

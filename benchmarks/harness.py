"""What benchmarks share: simulators, random actions, tables, and the JSON file of the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlinf_vla.benchmarks.simulators import Comparisons
from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import EnvSpec, VectorEnv
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.telemetry.environment import fingerprint


class Report:
    """What a benchmark prints, and its numbers as a JSON file in ``directory``."""

    def __init__(self, config: DictConfig, name: str) -> None:
        """Raises UserError if the directory, ``run_dir`` or a new one, is not writable."""
        self.directory = run_directory.for_evaluation(config, None)
        self._name = name
        self.console = Console(highlight=False)

    def show(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
    ) -> None:
        """Print a table."""
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the numbers beside those of the machine and its software, and say where."""
        path = self.directory / f"{self._name}.json"
        write_json(path, {**document, "environment": fingerprint()})
        self.console.print(f"numbers: {builders.relative(path)}")


def simulators(arguments: Sequence[str], usage: str) -> dict[str, DictConfig]:
    """Return the recipe of each simulator in ``env=NAME,NAME``; empty if an option was answered.

    Raises UserError unless there is exactly one ``env=`` and every name is known.
    """
    names = [argument.removeprefix("env=") for argument in arguments if argument.startswith("env=")]
    if any(argument.startswith("-") for argument in arguments):  # options of Hydra
        compose.compose_and_run("bench_env", arguments, lambda config: None)
        return {}
    if len(names) != 1 or not names[0]:
        raise UserError(f"say which simulators to measure: {usage}")
    others = [argument for argument in arguments if not argument.startswith("env=")]
    return {
        name: compose.load("bench_env", [f"env={name}", *others]) for name in names[0].split(",")
    }


def comparisons(env: Any) -> Comparisons | None:
    """What the simulator of the ``env`` node can be compared with; None: nothing."""
    return plugins.Installed("rlinf_vla.benchmarks").get(env.name)


@contextmanager
def opened(env: Any) -> Iterator[VectorEnv]:
    """Open one vector environment of the ``env`` node of a recipe."""
    (group,) = plugins.choose("env", env.name, plugins.envs()).create(env, 1)
    try:
        yield group
    finally:
        group.close()


def random_actions(spec: EnvSpec, steps: int, generator: torch.Generator) -> Tensor:
    """Draw float32 ``[B, steps, D]`` uniformly from -1 ... 1."""
    return (2 * torch.rand(spec.num_envs, steps, spec.action_dim, generator=generator) - 1).to(
        spec.device
    )

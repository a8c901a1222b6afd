"""Programs that ``rlinf-vla bench env`` runs in a simulator's own vector environment, to compare.

An entry point of ``rlinf_vla.baselines``, with the name of the simulator plug-in, is a function
``(config, episodes) -> list[Baseline]`` for ``config.num_envs`` environments. It raises UserError
for mistakes of the user.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Baseline:
    """A program that calls :func:`rlinf_vla.benchmarks.baselines.timed.timed` and then ends.

    One call resets all environments and runs one episode of random actions in them. All processes
    of the program are its descendants.
    """

    name: str
    images: bool
    """Whether every step renders images."""
    program: tuple[str, ...]
    """Command-line arguments after ``python``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables."""
    python: str | None = None
    """Interpreter of another Python environment; None: the current one."""

"""What benchmarks compare a simulator with: itself in other settings, and itself without us.

A module that implements :class:`Comparisons` is an entry point of ``rlinf_vla.benchmarks`` with the
name of the simulator plug-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

C = TypeVar("C", bound=Any)


@dataclass(frozen=True)
class Baseline:
    """A program that calls :func:`.timed.timed` and then ends.

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


class Comparisons(Protocol):
    def variants(self, config: Any) -> dict[str, Any]:
        """Return configurations by name whose frame rate ``rlinf-vla bench rollout`` compares."""

    def baselines(self, config: Any, episodes: int) -> list[Baseline]:
        """Return what ``rlinf-vla bench env`` compares ``config.num_envs`` environments with.

        Raises UserError for mistakes of the user.
        """


def visual_variants(config: C, visuals: Sequence[str]) -> dict[str, C]:
    """Variants of a simulator whose frame rate depends on ``env.robot_visuals``."""
    return {
        f"{look} robot, {size} x {size}": replace(
            config, robot_visuals=look, image_size=size, backend="cpu", processes=None
        )
        for look in visuals
        for size in (64, 224)
    }

"""What features beside the trainer do for it.

Each is found by an entry point of ``rlinf_vla.hooks``, so that a run that needs none loads none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from rlinf_vla.config.policy_server import BackboneConfig
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Policy
from rlinf_vla.runtime.base import PlayEpisodes, Runtime, Say


class Preview(Protocol):
    """The memory that a recipe needs."""

    model: Any
    """The counted model; None if nothing was counted."""

    def show(self, recipe: Recipe) -> None: ...

    def require_nothing(self) -> None:
        """Raise UserError if something is missing."""


class Monitor(Protocol):
    """Compares a run with the prediction of its plan."""

    def write(self, directory: Path) -> None:
        """Write the prediction to the run directory."""

    def watch(self, metrics: Mapping[str, float], iteration: int) -> dict[str, float]:
        """Return the metrics of the comparison after an iteration."""

    def replan_if_due(self) -> None:
        """Raise Restart if another plan would be faster."""

    def under(self, plan: Any) -> tuple[Recipe, Monitor]:
        """Return the recipe under another plan, and its monitor."""

    def summary_line(self) -> str | None: ...


class Planner(Protocol):
    """Chooses placements and sizes."""

    def choose_rows(
        self, config: DictConfig, resumed: Path | None = None
    ) -> tuple[Recipe, Preview]:
        """Set ``cluster.micro_batch_size`` in ``config`` if it is null."""

    def planned(self, recipe: Recipe, say: Say, model: Any = None) -> tuple[Recipe, Monitor | None]:
        """Return the recipe under its plan, and a monitor if it has a prediction."""


class AtRobot(Protocol):
    """Runs that a robot plays."""

    def at_robot(
        self, recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say
    ) -> AbstractContextManager[Runtime]:
        """Start the robot process and build the learner. Raises UserError."""

    def playing_at_robot(
        self, recipe: Recipe, config: DictConfig, control: Path
    ) -> AbstractContextManager[tuple[PlayEpisodes, float]]:
        """Yield what plays evaluation episodes, and the control rate in Hz. Raises UserError."""


class Backbones(Protocol):
    """Backbones that a policy server runs (``rollout.backbone``)."""

    def open_head(
        self, recipe: Recipe, model: type[Policy], directory: Path, device: str
    ) -> Policy:
        """Return the action head of the recipe's policy. Raises UserError."""

    def provenance(self, config: BackboneConfig) -> dict[str, Any]:
        """Return what the server says of its backbone. Raises UserError."""


def planner() -> Planner:
    return plugins.hook("planner")


def robot() -> AtRobot:
    return plugins.hook("robot")


def backbones() -> Backbones:
    return plugins.hook("backbones")


def sweep() -> Callable[[Recipe, DictConfig], dict[str, Any]]:
    """Return what plays a sweep over policies."""
    return plugins.hook("sweep")

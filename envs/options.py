"""Validate the ``env`` node of a recipe, for all simulators; an error is one line with the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import Diagnosis

C = TypeVar("C", bound=Any)


class Package(NamedTuple):
    """What an environment needs: its name, the module to import, and how to install it."""

    name: str
    module: str
    install: str

    def missing(self) -> bool:
        return find_spec(self.module) is None

    def require(self) -> None:
        """Raise UserError if it is not installed."""
        if self.missing():
            raise UserError(f"{self.name} is not installed: {self.install}")

    def diagnosis(self, *distributions: str) -> Diagnosis:
        """Check that it is installed; report the versions of its ``distributions``."""
        if self.missing():
            return Diagnosis(self.name, False, "optional: not installed", self.install)
        return Diagnosis(
            self.name,
            True,
            ", ".join(f"{distribution} {version(distribution)}" for distribution in distributions),
        )


def one_of(value: str, allowed: Iterable[str], what: str) -> None:
    """Raise UserError unless ``value`` is in ``allowed``; the message suggests the nearest name."""
    names = list(allowed)
    if value not in names:
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
        raise UserError(f"{what}={value} is unknown: {hint}")


def existing_python(path: str | None) -> None:
    """Raise UserError if ``env.python`` is set to what is not there."""
    if path is not None and not Path(path).exists():
        raise UserError(f"env.python={path} is not there: give the path of a Python program")


def divide(total: int, parts: int, what: str) -> int:
    """Return ``total // parts``. Raises UserError unless ``parts`` divides ``total``."""
    if total < 1 or total % parts:
        near = max(parts, round(total / parts) * parts)
        raise UserError(f"{what}={total} cannot be shared by {parts} groups: use {near}")
    return total // parts


def processes_per_group(config: Any, groups: int, *, batches: bool) -> int:
    """Simulator processes of one group, given ``config.processes`` for all groups.

    None takes one per core of this process's share, at least one per group; with ``batches``, where
    each process steps equally many environments as one batch, one per group. Raises UserError if
    they do not divide.
    """
    per_group = divide(config.num_envs, groups, "env.num_envs")
    if config.processes is None:
        from rlinf_vla.core.devices import own_cores  # it imports PyTorch

        return 1 if batches else min(per_group, max(1, own_cores() // groups))
    own = divide(config.processes, groups, "env.processes")
    if batches:
        divide(per_group, own, "the environments of a group, env.num_envs / groups")
    elif own > per_group:
        raise UserError(
            f"env.processes={config.processes} is more than env.num_envs={config.num_envs}"
        )
    return own


def refuse_several(tasks: list[str]) -> None:
    """Raise UserError if ``env.tasks`` is set where a single task is run."""
    if tasks:
        raise UserError(
            "env.tasks is for evaluation sweeps (rlinf-vla eval with sweep.policies): choose one with env.task"
        )


def one_each(config: C) -> list[C]:
    """One configuration per task for a sweep. Raises UserError for a task named twice."""
    tasks = config.tasks or [config.task]
    if twice := sorted({task for task in tasks if tasks.count(task) > 1}):
        raise UserError(f"env.tasks names {twice[0]} twice")
    return [replace(config, task=task, tasks=[]) for task in tasks]

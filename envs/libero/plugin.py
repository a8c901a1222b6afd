"""Implement the LIBERO plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import bootstrap
from rlinf_vla.core.protocols import Diagnosis, Suite, Task, VectorEnv

from ..options import one_of, processes_per_group
from ..processes import SimulatorPool
from ..vector_env import environments
from . import gl
from .config import CAMERAS, CONVENTIONS, LiberoConfig
from .doctor import checks
from .suites import SUITES, LiberoTask, limit, of_suite, selected_tasks


class Libero:
    """Implements ``EnvPlugin``."""

    name = "libero"
    Config = LiberoConfig

    def create(self, config: LiberoConfig, groups: int) -> list[VectorEnv]:
        options = simulator_options(config)
        tasks = selected_tasks(config)
        processes = processes_per_group(config.num_envs, config.processes, groups)
        renderer = gl.find(config.renderer, config.python, bool(config.cameras))
        pool = partial(
            SimulatorPool,
            [str(bootstrap.__file__), "envs.libero.simulator"],
            {**options, "tasks": [files_of(task) for task in tasks], "renderer": f"{renderer.backend}: {renderer.name}"},
            slots=config.num_envs // groups,
            processes=processes,
            episode_limit=episode_limit(config),
            environment=gl.environment(renderer.backend),
            python=config.python,
            step_timeout=config.step_timeout_s,
        )
        return environments(groups, pool, tuple(task.name for task in tasks), why_no_expert(tasks))

    def suites(self, config: LiberoConfig) -> list[Suite]:
        """One entry per suite, because their episodes differ in length."""
        if twice := sorted({suite for suite in suites(config) if suites(config).count(suite) > 1}):
            raise UserError(f"env.suites names {twice[0]} twice")
        alone = [replace(config, suite=suite, suites=None) for suite in suites(config)]
        for each in alone:
            simulator_options(each)
        return [Suite(each.suite, tuple(task.name for task in selected_tasks(each)), each) for each in alone]

    def tasks(self) -> list[Task]:
        try:
            listed = [task for suite in SUITES for task in of_suite(suite)]
        except UserError:
            return []
        return [Task(task.name, task.instruction, True, has_expert(task)) for task in listed]

    def diagnose(self) -> list[Diagnosis]:
        return list(checks())


def suites(config: LiberoConfig) -> list[str]:
    return [config.suite] if config.suites is None else config.suites


def episode_limit(config: LiberoConfig) -> int:
    """Control steps of an episode: the longest limit of all suites."""
    return max(limit(suite) for suite in suites(config)) if config.episode_limit is None else config.episode_limit


def has_expert(task: LiberoTask) -> bool:
    return task.suite in ("libero_object", "libero_spatial")


def why_no_expert(tasks: list[LiberoTask]) -> str | None:
    without = [task.name for task in tasks if not has_expert(task)]
    return f"{without[0]} has no scripted expert; all of libero_object and libero_spatial have one" if without else None


def simulator_options(config: LiberoConfig) -> dict[str, Any]:
    """Options of a simulator except its tasks, JSON values only.

    Raises UserError for options that the user can fix.
    """
    for suite in suites(config):
        one_of(suite, SUITES, "env.suite" if config.suites is None else "env.suites")
    convention = CONVENTIONS[config.convention]
    given = {name: getattr(config, name) for name in ("flip", "state", "gripper")}
    words = {name: getattr(convention, name) if value is None else value for name, value in given.items()}
    size = convention.image_size if config.image_size is None else config.image_size
    if config.python is not None and not Path(config.python).exists():
        raise UserError(f"env.python={config.python} is not there: give the path of a Python program")
    common = CONVENTIONS["common"]
    return words | {
        "cameras": {name: CAMERAS.get(name, name) for name in config.cameras},
        "image_size": size,
        "rendering": config.rendering,
        "wait_steps": config.wait_steps,
        "seed": config.seed,
        "scenes": config.scenes,
        "convention": ", ".join(words.values()),
        "tool": all(words[name] == getattr(common, name) for name in ("state", "gripper")),
    }


def files_of(task: LiberoTask) -> dict[str, str]:
    """What a simulator needs to know of a task, JSON values only."""
    return {"bddl": str(task.bddl), "init_states": str(task.init_states), "instruction": task.instruction}


plugin = Libero()

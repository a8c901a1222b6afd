"""Simulator process of Isaac Lab: one manager-based environment, stepped as a batch on its device.

Written from the sources of isaac-sim/IsaacLab and **not run with it**. In ``isaaclab``:
``app/app_launcher.py``, ``envs/manager_based_env.py`` (``reset``), ``envs/manager_based_rl_env.py``
(``step``), ``managers/termination_manager.py``, ``envs/mdp/actions``; in ``isaaclab_tasks``:
``utils/parse_cfg.py``, ``manager_based/manipulation/stack``.
"""

from __future__ import annotations

import signal
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

from ..batch_serving import BatchServer
from ..options import one_of
from ..serving import serve
from ..shared_arrays import SimulatorSpec

TOOL = ("eef_pos", "eef_quat", "gripper_pos")
"""Terms of the state of docs/conventions.md: ``[N, 3]`` (m), ``[N, 4]``, fingers ``[N, 2]`` (m)."""


class IsaacLabBatch:
    """Implements what ``BatchServer`` needs of ``Batch``; there is no expert.

    Isaac Lab resets ended environments within ``step``, from its global generator, and returns the
    observation after it. Here ``step`` resets nothing: an ended environment keeps its last state,
    and moves on unrecorded until ``reset`` begins its next episode from that episode's seed.
    """

    def __init__(self, options: dict[str, Any], num_envs: int) -> None:
        self._options = options
        try:
            from isaaclab.app import AppLauncher
        except ModuleNotFoundError as error:
            raise UserError(
                f"{error} in env.python: install Isaac Lab there (docs/isaaclab.md)"
            ) from error
        self._app = AppLauncher(
            headless=True, enable_cameras=bool(options["cameras"]), device=options["device"]
        )
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # again, after AppLauncher: the parent handles Ctrl-C
        from isaaclab.utils.math import quat_from_euler_xyz

        self._w = int(
            quat_from_euler_xyz(*torch.zeros(3, 1))[0].argmax()
        )  # place of w: 0, since version 3 at the end
        self.env, self._units = _make(options, num_envs)
        self.num_envs = num_envs
        self.device = torch.device(self.env.device)
        self._stepping = False
        reset_idx = self.env._reset_idx
        self.env._reset_idx = lambda *rows, **more: (
            None if self._stepping else reset_idx(*rows, **more)
        )
        self._seen, _ = self.env.reset(seed=0)
        self.spec = self._spec()

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        for row in rows:  # one by one: all draw from one generator, and an episode must depend on its own seed alone
            self._seen, _ = self.env.reset(
                seed=seeds[row], env_ids=torch.tensor([row], device=self.device)
            )
        return [self._options["instruction"]] * self.num_envs

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        name = self._options["success"]
        if name:  # before 2.3.1 a term keeps its value until another ends the row's episode
            self.env.termination_manager.get_term(name).zero_()
        self._stepping = True
        self._seen, reward, terminated, _, _ = self.env.step(
            actions if self._units is None else actions.clamp(-1, 1)
        )
        self._stepping = False
        success = (
            self.env.termination_manager.get_term(name).bool()
            if name
            else torch.zeros_like(terminated)
        )
        reward = success if self._options["reward"] == "sparse" else reward
        return reward.float(), terminated.clone(), success.clone()

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        group = self._seen["policy"]
        if self._options["state"]:
            parts = [group[name].reshape(self.num_envs, -1) for name in self._options["state"]]
        else:
            position, quaternion, fingers = (group[name] for name in TOOL)
            parts = [position, quaternion.roll(-self._w, dims=1), fingers[:, :1]]
        state = torch.cat([part.float() for part in parts], dim=1)
        return state[rows], {
            name: group[term][rows, ..., :3] for name, term in self._options["cameras"].items()
        }

    def render(self, index: int) -> Tensor:
        _, images = self.observe([index])
        return next(
            (image[0] for image in images.values()), torch.zeros(64, 64, 3, dtype=torch.uint8)
        )

    def _spec(self) -> SimulatorSpec:
        import isaaclab

        options = self._options
        (state, images) = self.observe([0])
        units = self._units
        for name, image in images.items():
            if image.dtype != torch.uint8 or image.ndim != 4:
                kind = f"{image.dtype} {list(image.shape[1:])}".removeprefix("torch.")
                raise UserError(
                    f"env.cameras: {name} is {kind}, not uint8 [height, width, 3]: set the term's normalize=False"
                )
        native = {
            "tool": units,
            "gripper": "open_positive",
            "state": "isaaclab" if options["state"] else "quaternion",
            "images": "upright",
        }
        return SimulatorSpec(
            action_dim=int(self.env.action_manager.total_action_dim),
            state_dim=state.shape[1],
            control_hz=1 / float(self.env.step_dt),
            images={name: list(image.shape[1:3]) for name, image in images.items()},
            picture=list(self.render(0).shape[:2]),
            tool=None if options["state"] else units,
            native=None if units is None else native,
            instructions=[options["instruction"]],
            stack={
                "isaaclab": str(isaaclab.__version__),
                "torch": torch.__version__,
                "device": str(self.device),
                "task": options["task"],
            },
        )


def _make(options: dict[str, Any], num_envs: int) -> tuple[Any, list[float] | None]:
    """Return the environment and its units. Raises UserError for options that do not fit."""
    import gymnasium

    task = f"env.task={options['task']}"
    try:
        import_module(options["module"])
        from isaaclab_tasks.utils import parse_env_cfg

        cfg = parse_env_cfg(options["task"], device=options["device"], num_envs=num_envs)
    except (gymnasium.error.Error, ModuleNotFoundError, ValueError) as error:
        raise UserError(f"{task} cannot be made: {' '.join(str(error).split())}") from error
    group = getattr(getattr(cfg, "observations", None), "policy", None)
    if group is None or not hasattr(cfg, "terminations"):
        raise UserError(
            f"{task} is not a manager-based task with the observation group policy: only these are supported"
        )
    cfg.seed = 0
    cfg.recorders = None
    cfg.curriculum = (
        None  # it counts steps of the process, so an episode would depend on what ran before
    )
    if options["cameras"]:  # else the first image of an episode is the last of the one before
        name = (
            "num_rerenders_on_reset"
            if hasattr(cfg, "num_rerenders_on_reset")
            else "rerender_on_reset"
        )
        setattr(cfg, name, getattr(cfg, name, 0) or 1)
    group.concatenate_terms = False
    group.enable_corruption = False
    ends = {
        name: term.time_out
        for name, term in vars(cfg.terminations).items()
        if hasattr(term, "time_out")
    }
    for name in (
        name for name, time_out in ends.items() if time_out
    ):  # env.episode_limit replaces them
        setattr(cfg.terminations, name, None)
    if options["success"]:
        one_of(
            options["success"],
            [name for name, time_out in ends.items() if not time_out],
            f"env.success of {options['task']}",
        )
    terms = [name for name, term in vars(group).items() if hasattr(term, "func")]
    for name in options["state"] or TOOL:
        one_of(
            name,
            terms,
            "env.state" if options["state"] else f"{task} has no tool state (set env.state): term",
        )
    for term in options["cameras"].values():
        one_of(term, terms, "env.cameras")
        if options["image_size"]:
            sensor = getattr(cfg.scene, getattr(group, term).params["sensor_cfg"].name)
            sensor.height = sensor.width = options["image_size"]
    units = _choose_units(cfg.actions, options["units"], task)
    return gymnasium.make(options["task"], cfg=cfg).unwrapped, units


def _choose_units(actions: Any, units: list[float | None], task: str) -> list[float] | None:
    """[m, rad] that 1 means in an action, set to ``units`` where that is not None.

    None if actions are not a relative pose of the tool and a binary gripper, of which Isaac Lab
    opens at values from 0 on.
    """
    arm: Any = getattr(actions, "arm_action", None)
    control: Any = getattr(arm, "controller", None)
    relative = getattr(control, "use_relative_mode", False) and control.command_type == "pose"
    if not relative or not hasattr(getattr(actions, "gripper_action", None), "open_command_expr"):
        if any(units):
            raise UserError(
                f"{task} has no relative inverse kinematics: unset env.translation_m and env.rotation_rad"
            )
        return None
    own = (arm.scale,) * 6 if isinstance(arm.scale, (int, float)) else tuple(arm.scale)
    metres, radians = (
        float(own[3 * i] if value is None else value) for i, value in enumerate(units)
    )
    if any(units):
        arm.scale = (metres,) * 3 + (radians,) * 3
    return [metres, radians]


if __name__ == "__main__":
    serve(IsaacLabBatch, BatchServer)

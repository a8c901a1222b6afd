"""Registers tasks when it is imported, as Isaac Lab's package does."""

from __future__ import annotations

from types import SimpleNamespace as Cfg
from typing import Any

import gymnasium
from isaaclab import envs


def term(func: Any, time_out: bool = False, **params: Any) -> Cfg:
    return Cfg(func=func, time_out=time_out, params=params)


def stack() -> Cfg:
    """Two environment steps per time limit would be too few for any test of ours: 4 steps."""
    camera = {"sensor_cfg": Cfg(name="table_cam")}
    policy = Cfg(
        **{
            name: term(getattr(envs, name))
            for name in ("eef_pos", "eef_quat", "gripper_pos", "cube_pos")
        },
        table_cam=term(envs.image, **camera),
        wrist_cam=term(envs.image, **camera),
        concatenate_terms=False,
        enable_corruption=False,
    )
    terms = {
        "success": term(envs.reached),
        "fell": term(envs.fell),
        "time_out": term(envs.time_out, time_out=True),
    }
    arm = Cfg(scale=0.5, controller=Cfg(command_type="pose", use_relative_mode=True))
    return Cfg(
        scene=Cfg(num_envs=1, table_cam=Cfg(height=84, width=84)),
        sim=Cfg(dt=0.01, device="cuda:0"),
        decimation=5,
        episode_length_s=0.2,
        seed=None,
        recorders=Cfg(),
        observations=Cfg(policy=policy),
        terminations=Cfg(**terms),
        actions=Cfg(
            arm_action=arm, gripper_action=Cfg(open_command_expr={"panda_finger_.*": 0.04})
        ),
    )


def lift() -> Cfg:
    """No success, no cameras and no tool state; one vector with noise."""
    cfg = stack()
    del cfg.terminations.success
    cfg.observations.policy = Cfg(
        cube_pos=term(envs.cube_pos),
        eef_pos=term(envs.eef_pos),
        concatenate_terms=True,
        enable_corruption=True,
    )
    return cfg


def joints() -> Cfg:
    """Actions are joint positions; its image is not of bytes."""
    cfg = stack()
    cfg.actions.arm_action = Cfg(scale=0.5)
    cfg.observations.policy.wrist_cam = term(envs.eef_pos)
    return cfg


for name, make in {
    "Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor-v0": stack,
    "Isaac-Lift-Cube-Franka-IK-Rel-v0": lift,
    "Isaac-Joints-v0": joints,
    "Isaac-Direct-v0": lambda: Cfg(scene=Cfg(), sim=Cfg()),
}.items():
    gymnasium.register(
        id=name, entry_point=envs.ManagerBasedRLEnv, kwargs={"env_cfg_entry_point": make}
    )

"""Simulate the FR3 at half of franky-sim's cost per step, to keep 1 kHz on a shared core.

franky-sim computes with Pinocchio what MuJoCo already provides, and writes each field of the state
with a separate call. Here MuJoCo compensates gravity (``gravcomp``) and provides poses, and the
state is one array. As on the real arm, the controller also compensates joint friction (Franka
Control Interface: commanded torques include neither); in franky-sim the client must. Motions in
torques, joint positions and joint velocities are supported; Cartesian motions are refused.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import numpy as np
from franky_sim.base_simulator import InnerRobotState
from franky_sim.constants import FRANKA_HAND_FORCE_LIMIT, FRANKA_TORQUE_LIMITS_HIGH
from franky_sim.franka_robot_state import FrankaRobotState
from franky_sim.mujoco_simulator import FrankaMujocoRobot
from numpy.typing import NDArray

TOOL_M = 0.1034
"""Tool centre point between the fingertips, along z of the hand's frame."""
FRICTION_N_M = 0.05
"""Friction of a joint that remains after compensation."""

_STIFFNESS = np.array([3000.0, 3000.0, 3000.0, 3000.0, 2000.0, 2000.0, 2000.0])
_DAMPING = np.array([150.0, 150.0, 120.0, 120.0, 60.0, 60.0, 60.0])
"""Gains of the arm's own controller, N m / rad and N m s / rad.

franky-sim's damping is three times as high and chatters without friction.
"""

_FLOATS = (
    ("O_T_EE", 16), ("O_T_EE_d", 16), ("F_T_EE", 16), ("EE_T_K", 16), ("F_T_NE", 16), ("NE_T_EE", 16), ("m_ee", 1), ("I_ee", 9),
    ("F_x_Cee", 3), ("m_load", 1), ("I_load", 9), ("F_x_Cload", 3), ("elbow", 2), ("elbow_d", 2), ("tau_J", 7), ("tau_J_d", 7),
    ("dtau_J", 7), ("q", 7), ("q_d", 7), ("dq", 7), ("dq_d", 7), ("ddq_d", 7), ("joint_contact", 7), ("cartesian_contact", 6),
    ("joint_collision", 7), ("cartesian_collision", 6), ("tau_ext_hat_filtered", 7), ("O_F_ext_hat_K", 6), ("K_F_ext_hat_K", 6),
    ("O_dP_EE_d", 6), ("O_ddP_O", 3), ("elbow_c", 2), ("delbow_c", 2), ("ddelbow_c", 2), ("O_T_EE_c", 16), ("O_dP_EE_c", 6),
    ("O_ddP_EE_c", 6), ("theta", 7), ("dtheta", 7), ("accelerometer_top", 18), ("accelerometer_bottom", 18),
)  # fmt: skip
STATE = np.dtype(
    [(name, "<f4", (size,)) for name, size in _FLOATS]
    + [
        ("motion_generator_mode", "u1"),
        ("controller_mode", "u1"),
        ("errors", "u1", (41,)),
        ("reflex_reason", "u1", (41,)),
    ]
    + [("robot_mode", "u1"), ("control_command_success_rate", "<f4")]
)
"""libfranka's robot state, version 10, in the order of FrankaRobotState.pack_state."""


def compensate(body: ET.Element) -> None:
    """Compensate gravity for all bodies in the arm's XML."""
    for element in body.iter("body"):
        element.set("gravcomp", "1")


class SimulatedArm(FrankaMujocoRobot):
    """Replacement of franky-sim's MuJoCo robot."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        initial = self.robot_parameters
        self._hand_to_tool = np.eye(4)
        self._hand_to_tool[2, 3] = TOOL_M
        self._tool_to_effector = np.eye(4)
        self._torque_limit = np.array(FRANKA_TORQUE_LIMITS_HIGH, float)
        self._desired: NDArray[np.float64] = np.array(self._initial_q)
        self._record = np.zeros((), STATE)
        self._record["m_ee"] = initial.ee_mass
        self._record["F_x_Cee"] = initial.ee_com
        self._record["I_ee"] = initial.ee_inertia
        self._record["EE_T_K"] = np.eye(4).flatten()
        self._record["control_command_success_rate"] = 1.0

    def _attach_to_scene(self, model: Any, data: Any, prefix: str) -> None:
        super()._attach_to_scene(model, data, prefix)
        self._q = np.array(self._qpos_addrs)
        self._v = np.array(self._dof_addrs)
        self._hand = model.body(f"{prefix}hand").id
        model.dof_frictionloss[self._v] = FRICTION_N_M
        flange = np.eye(4)
        flange[:2, :2] = np.array([[1, 1], [-1, 1]]) / np.sqrt(2)
        self._record["F_T_NE"] = (flange @ self._hand_to_tool).flatten("F")
        self.set_NE_T_EE(tuple(self._tool_to_effector.flatten("F")))

    def set_NE_T_EE(self, ne_t_ee: Sequence[float]) -> None:
        self._tool_to_effector = np.array(ne_t_ee).reshape(4, 4, order="F")
        self._record["NE_T_EE"] = ne_t_ee
        self._record["F_T_EE"] = (
            self._record["F_T_NE"].reshape(4, 4, order="F") @ self._tool_to_effector
        ).flatten("F")

    def torque_control(self, torques: Sequence[float], has_new_command: bool = True) -> None:
        self._desired = self._data.qpos[self._q]
        self._push(np.asarray(torques))

    def joint_position_control(
        self, target_q: Sequence[float], has_new_command: bool = True
    ) -> None:
        self._desired = np.asarray(target_q)
        self._push(
            _STIFFNESS * (self._desired - self._data.qpos[self._q])
            - _DAMPING * self._data.qvel[self._v]
        )

    def joint_velocity_control(
        self, target_dq: Sequence[float], has_new_command: bool = True
    ) -> None:
        self._desired = self._data.qpos[self._q]
        self._push(_DAMPING * (np.asarray(target_dq) - self._data.qvel[self._v]))

    def cartesian_position_control(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError("Cartesian motions")

    cartesian_velocity_control = cartesian_position_control

    def _push(self, torques: NDArray[np.float64]) -> None:
        self._applied_torques = np.minimum(
            np.maximum(torques, -self._torque_limit), self._torque_limit
        )
        self._data.qfrc_applied[self._v] = self._applied_torques

    def _pre_step(self) -> None:
        """Drive the fingers to the hand's goal: a spring-damper of limited force and speed."""
        if self._data is None:
            return
        force_limit = min(self._hand_goal_force, FRANKA_HAND_FORCE_LIMIT)
        for position, dof, stiffness, damping in zip(
            self._finger_qpos_addrs,
            self._finger_dof_addrs,
            self._kp_hand,
            self._kv_hand,
            strict=True,
        ):
            speed = float(self._data.qvel[dof])
            force = (
                stiffness * (self._hand_goal_width / 2 - float(self._data.qpos[position]))
                - damping * speed
            )
            if abs(speed) > self._hand_goal_velocity and speed * force > 0:
                force = -damping * speed
            self._data.qfrc_applied[dof] = min(max(force, -force_limit), force_limit)

    def _post_step(self) -> None:
        """Skip franky-sim's tracking."""

    def _get_state(self) -> InnerRobotState:
        if self._data is None:
            return super()._get_state()
        return InnerRobotState(
            tuple(self._data.qpos[self._q].tolist()),
            tuple(self._data.qvel[self._v].tolist()),
            tuple(self._applied_torques.tolist()),
        )

    @property
    def state(self) -> FrankaRobotState:
        """The fields that starting and stopping a motion need."""
        inner = self._get_state()
        return FrankaRobotState(
            q=inner.q, dq=inner.dq, q_d=tuple(self._desired.tolist()), tau_J=inner.tau_j
        )

    def record(self) -> NDArray[Any]:
        """Return the state as sent to the client, except modes, errors and wrench."""
        data, record = self._data, self._record
        hand = np.eye(4)
        hand[:3, :3] = data.xmat[self._hand].reshape(3, 3)
        hand[:3, 3] = data.xpos[self._hand]
        record["O_T_EE"] = record["O_T_EE_d"] = record["O_T_EE_c"] = (
            hand @ self._hand_to_tool @ self._tool_to_effector
        ).flatten("F")
        q = record["q"] = record["theta"] = data.qpos[self._q]
        record["dq"] = record["dtheta"] = data.qvel[self._v]
        record["q_d"] = self._desired
        record["tau_J"] = record["tau_J_d"] = self._applied_torques
        record["elbow"] = record["elbow_d"] = record["elbow_c"] = q[2], np.sign(q[3])
        return record

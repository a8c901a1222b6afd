"""Task of the simulated SO-101: touch the cube. The simulation's true state gives success."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlinf_vla.features.realworld.action_space import JointSpace
from rlinf_vla.features.realworld.robot import Action, RobotState, Vector

from . import scene
from .client import SimulatedSO101

X_M = (0.19, 0.26)
Y_M = (-0.1, 0.1)
"""Range of the cube's position."""
NEAR_M = 0.025
"""Success distance between the tip of the gripper and the centre of the cube's upper face."""
PITCH_DEG = 60.0
"""How far the gripper points down from the horizontal, where the expert may choose."""
_PITCH_M_DEG = 0.001
"""Metres of the tip's way that weigh as much as a degree of the pitch."""
_DAMPING = 0.02**2
_ARM, _ALL = 5, 6
"""Joints of one arm, without and with the gripper."""


class Reach:
    """Implements ``Scene``. The expert is damped least squares on the tip and the pitch.

    Of two arms, the one on the cube's side has to touch it.
    """

    task = "TouchCube"
    by_hand = False
    has_expert = True
    instructions: tuple[str, ...] = ("touch the red cube",)

    def __init__(self, cell: SimulatedSO101, space: JointSpace) -> None:
        self._cell = cell
        self._space = space
        self._model: Any = None
        self._data: Any = None

    def arrange(self, seed: int) -> str:
        draw = np.random.default_rng(seed).uniform
        self._cell.place((float(draw(*X_M)), float(draw(*Y_M)), float(draw(-np.pi, np.pi))))
        return self.instructions[0]

    def succeeded(self, state: RobotState) -> bool | None:
        return float(np.linalg.norm(self._way(state)[1])) < NEAR_M

    def expert(self, state: RobotState) -> Action | None:
        arm, way = self._way(state)
        first = arm * _ALL
        turn = PITCH_DEG - float(state.joints[first + 1 : first + 4].sum())
        error = np.array([*way, _PITCH_M_DEG * turn])
        rows = np.zeros((3, self._model.nv))
        self._mujoco().mj_jacSite(self._model, self._data, rows, None, self._site(arm).id)
        pitch = np.array([0.0, 1.0, 1.0, 1.0, 0.0]) * np.degrees(_PITCH_M_DEG)
        jacobian = np.vstack([rows[:, first : first + _ARM], pitch])
        moved = np.zeros(len(state.joints))
        moved[first : first + _ARM] = np.degrees(
            jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + _DAMPING * np.eye(4), error)
        )
        grippers = self._space.is_gripper
        if not self._space.relative:
            return np.where(grippers, self._space.upper, state.joints + moved).astype(np.float32)
        action = moved / np.array(self._space.step)
        return np.where(grippers, 1.0, action / max(1.0, float(np.abs(action).max()))).astype(
            np.float32
        )

    def _way(self, state: RobotState) -> tuple[int, Vector]:
        """Return the arm that has to touch the cube, and the vector from its tip to the cube's top,
        metres ``[3]``."""
        mujoco = self._mujoco()
        cube = self._cell.truth().cube
        joints = np.radians(state.joints).reshape(-1, _ALL)[:, :_ARM]
        for arm, at in enumerate(joints):
            self._data.qpos[arm * _ALL : arm * _ALL + _ARM] = at
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        arm = int(len(joints) > 1 and cube[1] < 0)
        way: Vector = cube + np.array([0.0, 0.0, scene.CUBE_M / 2]) - self._site(arm).xpos
        return arm, way

    def _site(self, arm: int) -> Any:
        return self._data.site(f"{self._cell.arms[arm]}{scene.TIP}")

    def _mujoco(self) -> Any:
        import mujoco

        if self._model is None:
            self._model = scene.build(self._cell.arms)
            self._data = mujoco.MjData(self._model)
        return mujoco

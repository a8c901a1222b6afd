"""The task of the simulated SO-101: its expert reaches the cube anywhere, with one arm or two."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_vla.features.realworld.robot import RobotState
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.joint_cell import JointCell
from tests.skips import NOT_INSTALLED

pytest.importorskip("mujoco", reason=NOT_INSTALLED + "franka")

from rlinf_vla.robots.so101_sim import scene
from rlinf_vla.robots.so101_sim.reach import X_M, Y_M, Reach


class Cell:
    """Stands in for the simulation: the cube stays where it was placed."""

    def __init__(self, arms: tuple[str, ...]) -> None:
        self.arms = arms

    def place(self, cube: tuple[float, float, float]) -> None:
        self.cube = np.array([*cube[:2], scene.CUBE_M / 2])

    def truth(self) -> scene.SimulatorState:
        return scene.SimulatorState(
            0.0, np.concatenate([np.zeros(6 * len(self.arms)), self.cube, np.zeros(4)])
        )


ROBOTS = {"so101_sim": (scene.ONE_ARM,), "bi_so101_sim": scene.TWO_ARMS}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("name", ROBOTS)
def test_the_expert_touches_the_cube_within_the_limits(
    name: str, relative: bool, seed: int
) -> None:
    limits = cell_file.load(cell_file.CELLS / f"{name}.yaml", JointCell)
    cell = Cell(ROBOTS[name])
    space = limits.space(relative)
    reach = Reach(cell, space)  # type: ignore[arg-type]
    reach.arrange(seed)
    assert X_M[0] <= cell.cube[0] <= X_M[1] and Y_M[0] <= cell.cube[1] <= Y_M[1]
    joints, step = np.array(limits.home), np.array(limits.action_step)
    assert not reach.succeeded(RobotState(0.0, joints, np.zeros_like(joints)))
    for _ in range(30):
        state = RobotState(0.0, joints, np.zeros_like(joints))
        if reach.succeeded(state):
            break
        action = reach.expert(state)
        assert action is not None and space.accepts(action) and len(action) == len(joints)
        moved = (
            joints + action * step if relative else joints + np.clip(action - joints, -step, step)
        )
        joints = np.where(space.is_gripper, 100.0, moved)
        assert (joints >= limits.lower).all() and (joints <= limits.upper).all()
    assert reach.succeeded(RobotState(0.0, joints, np.zeros_like(joints)))


def test_each_of_two_arms_has_its_own_side() -> None:
    model = scene.build(scene.TWO_ARMS)
    assert model.nu == 12 and model.nq == 19
    assert model.body("left_base").pos[1] == -model.body("right_base").pos[1] > 0

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlinf_vla.features.realworld.action_space import ToolSpace
from rlinf_vla.features.realworld.robot import ToolPose, ToolState
from rlinf_vla.robots.simulated.scene import SimulatorState
from rlinf_vla.robots.simulated.touch import COLUMN_M, NEAR_M, X_M, Y_M, Touch, TouchAround

SPACE = ToolSpace(translation_m=0.02, rotation_rad=0.1, gripper_width_m=0.08)


class Cell:
    """Records where objects were placed, and reports these positions."""

    def place(self, cube: tuple[float, float, float], target: tuple[float, float]) -> None:
        self.cube = np.array([*cube[:2], 0.022])
        self.target = np.array(target)

    def truth(self) -> SimulatorState:
        return SimulatorState(0.0, np.zeros(7), np.zeros(16), np.zeros(3), self.cube)


def at(position: list[float]) -> ToolState:
    pose = ToolPose(np.array(position), np.array([0.0, 1.0, 0.0, 0.0]))
    return ToolState(0.0, np.zeros(7), np.zeros(7), pose, np.zeros(6), 0.08)


@pytest.mark.parametrize("seed", [0, 1, 1 << 24])
def test_the_expert_touches_the_cube_at_any_position(seed: int) -> None:
    cell = Cell()
    scene = Touch(cell, SPACE)  # type: ignore[arg-type]
    assert scene.arrange(seed) == "touch the red cube"
    first = cell.cube
    scene.arrange(seed)
    assert (
        (cell.cube == first).all() and X_M[0] <= first[0] <= X_M[1] and Y_M[0] <= first[1] <= Y_M[1]
    )
    state = at([0.31, 0.0, 0.48])
    for _ in range(40):
        if scene.succeeded(state):
            break
        action = scene.expert(state)
        assert (
            action is not None and action.shape == (4,) and np.linalg.norm(action[:3]) <= 1 + 1e-6
        )
        position = state.pose.position + 0.02 * action[:3]
        state = replace(state, pose=replace(state.pose, position=position))
    assert (
        scene.succeeded(state)
        and np.linalg.norm(state.pose.position - first - [0, 0, 0.02]) < NEAR_M
    )


def test_layouts_differ() -> None:
    cell, found = Cell(), set()
    scene = Touch(cell, SPACE)  # type: ignore[arg-type]
    for seed in range(20):
        scene.arrange(seed)
        found.add(tuple(cell.cube.tolist()))
    assert len(found) == 20


def moved(state: ToolState, action: np.ndarray) -> ToolState:
    return replace(
        state,
        pose=replace(state.pose, position=state.pose.position + SPACE.translation_m * action[:3]),
    )


def test_the_expert_passes_the_disc_on_both_sides() -> None:
    cell, sides = Cell(), set()
    scene = TouchAround(cell, SPACE)  # type: ignore[arg-type]
    for seed in range(30):
        scene.arrange(seed)
        state = at([0.307, 0.0, 0.48])
        nearest = np.array([1.0, 0.0])
        for _ in range(30):
            if scene.succeeded(state):
                break
            action = scene.expert(state)
            assert action is not None
            state = moved(state, action)
            beside = state.pose.position[:2] - cell.target
            nearest = min(nearest, beside, key=lambda each: float(np.linalg.norm(each)))
        assert scene.succeeded(state) and np.linalg.norm(nearest) > COLUMN_M + 0.02
        sides.add(bool(nearest[1] > 0))
    assert sides == {True, False}


def test_who_was_over_the_disc_has_failed_until_the_next_episode() -> None:
    cell = Cell()
    scene = TouchAround(cell, SPACE)  # type: ignore[arg-type]
    for _ in range(2):
        scene.arrange(3)
        over = at([*cell.target, 0.3])
        touching = at([*cell.cube[:2], 0.042])
        assert (
            scene.succeeded(touching)
            and not scene.succeeded(over)
            and not scene.succeeded(touching)
        )

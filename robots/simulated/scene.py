"""Build the scene of the simulated cell: FR3 with hand, table, movable cube, target disc, cameras.

Metres and radians in the base frame. franky-sim and MuJoCo are imported when used.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.features.realworld.camera_geometry import Intrinsics

HOME = (0.0, -0.7854, 0.0, -2.3562, 0.0, 1.5708, 0.7854)
"""Initial joints."""
TABLE_Z = 0.002
"""Height of the table's top; franky-sim's floor is at 0."""
CUBE_M = 0.04
CUBE, TARGET = "cube", "target"
PREFIX = "robot0_"
FOVY_DEG = {"front": 45.0, "wrist": 70.0}
"""Angle of view of each camera, vertically."""


def build() -> tuple[Any, Any]:
    """Return franky-sim's simulator, not yet started, and its robot."""
    from franky_sim import mujoco_simulator

    from . import arm

    mujoco_simulator.FrankaMujocoRobot = arm.SimulatedArm  # the class that add_robot instantiates
    simulator = mujoco_simulator.MujocoSimulator()
    robot = simulator.add_robot(initial_q=HOME, initial_hand_width=0.08)
    world, add = simulator.worldbody, ET.SubElement
    arm.compensate(world)
    add(
        world,
        "geom",
        name="table",
        type="box",
        size="0.35 0.5 0.01",
        pos=f"0.55 0 {TABLE_Z - 0.01}",
        rgba="0.75 0.68 0.58 1",
    )
    cube = add(world, "body", name=CUBE, pos=f"0.5 -0.1 {TABLE_Z + CUBE_M / 2}")
    add(cube, "freejoint", name=CUBE)
    half = f"{CUBE_M / 2} {CUBE_M / 2} {CUBE_M / 2}"
    add(
        cube,
        "geom",
        type="box",
        size=half,
        mass="0.05",
        rgba="0.85 0.1 0.1 1",
        friction="1 0.005 0.0001",
        condim="4",
    )
    target = add(world, "body", name=TARGET, mocap="true", pos=f"0.5 0.1 {TABLE_Z + 0.001}")
    add(
        target,
        "geom",
        type="cylinder",
        size="0.04 0.001",
        rgba="0.1 0.7 0.2 1",
        contype="0",
        conaffinity="0",
    )
    add(
        world,
        "camera",
        name="front",
        pos="1.35 0 0.75",
        xyaxes="0 1 0 -0.466 0 0.885",
        fovy=str(FOVY_DEG["front"]),
    )
    # The hand's z points along the fingers, its x forward: the image's top is away from the base.
    hand = next(body for body in world.iter("body") if body.get("name") == f"{PREFIX}hand")
    add(
        hand,
        "camera",
        name="wrist",
        pos="0.07 0 0.03",
        xyaxes="0 1 0 1 0 0",
        fovy=str(FOVY_DEG["wrist"]),
    )
    return simulator, robot


def intrinsics(camera: str, width: int, height: int) -> Intrinsics:
    """Return how a camera projects; its pixels are square."""
    focal = height / (2 * math.tan(math.radians(FOVY_DEG[camera.rpartition("_")[2]]) / 2))
    return Intrinsics(width, height, focal, focal, (width - 1) / 2, (height - 1) / 2)


@dataclass(frozen=True)
class SimulatorState:
    """True state of the simulation."""

    time: float
    """Monotonic, seconds."""
    joint_velocities: NDArray[np.float64]
    """Radians per second ``[7]``."""
    positions: NDArray[np.float64]
    """MuJoCo's ``qpos``."""
    target: NDArray[np.float64]
    """Position of the disc ``[3]``."""
    cube: NDArray[np.float64]
    """Position of the cube ``[3]``."""

    def pack(self) -> bytes:
        return np.concatenate(
            [[self.time], self.joint_velocities, self.target, self.cube, self.positions]
        ).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> SimulatorState:
        numbers = np.frombuffer(data)
        return cls(float(numbers[0]), numbers[1:8], numbers[14:], numbers[8:11], numbers[11:14])

"""One or two simulated SO-101 with table, cube and cameras.

Metres; joints in degrees outside MuJoCo.

Joint frames and masses: the URDF of the SO-100 (TheRobotStudio, SO-ARM100, Apache-2.0), whose links
the SO-101 keeps, with x forward and z up. Shapes are primitives. Position control, friction and
armature are those of MuJoCo Menagerie's ``trs_so_arm100``. Joint ranges are the SO-101's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..simulated.scene import FOVY_DEG

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
RANGE_DEG = (
    (-110.0, 110.0),
    (-100.0, 100.0),
    (-97.0, 97.0),
    (-95.0, 95.0),
    (-160.0, 160.0),
    (-10.0, 100.0),
)
HOME_DEG = (0.0, -44.0, 36.0, 68.0, 0.0, 100.0)
ONE_ARM = ""
TWO_ARMS = ("left_", "right_")
"""Prefixes of the names of each arm."""
APART_M = 0.32
"""Distance of two arms, the left one at the larger y."""
CUBE_M = 0.03
CUBE, TIP = "cube", "tip"
STEP_S = 0.002

_MJCF = """
<mujoco model="so101">
  <compiler angle="degree"/>
  <option timestep="{step}" integrator="implicitfast"/>
  <visual><headlight ambient="0.4 0.4 0.4"/></visual>
  <default>
    <joint frictionloss="0.1" armature="0.1" limited="true"/>
    <position kp="50" dampratio="1" forcerange="-3.5 3.5"/>
    <default class="arm"><geom contype="2" conaffinity="0" rgba="0.9 0.75 0.2 1"/></default>
    <default class="motor"><geom contype="2" conaffinity="0" rgba="0.1 0.1 0.1 1"/></default>
  </default>
  <worldbody>
    <light pos="0.3 0 1.5"/>
    <geom name="table" type="box" size="0.5 0.5 0.01" pos="0.2 0 -0.01" rgba="0.75 0.68 0.58 1" conaffinity="3"/>
    <camera name="front" pos="0.68 0 0.35" xyaxes="0 1 0 -0.6 0 0.8" fovy="{front}"/>
{arms}    <body name="cube" pos="0.22 0 {half}">
      <freejoint name="cube"/>
      <geom type="box" size="{half} {half} {half}" mass="0.03" rgba="0.85 0.1 0.1 1" friction="1 0.005 0.0001" conaffinity="3"/>
    </body>
  </worldbody>
  <actuator>{actuators}</actuator>
</mujoco>
"""


_ARM = """\
    <body name="{p}base" pos="0 {y} 0">
      <geom class="arm" type="box" size="0.045 0.045 0.02" pos="0 0 0.025" mass="0.193"/>
      <body name="{p}shoulder" pos="0.0452 0 0.0165">
        <joint name="{p}shoulder_pan" axis="0 0 -1" range="{r0}"/>
        <geom class="arm" type="capsule" size="0.022" fromto="0 0 0.04 0.02 0 0.1" mass="0.119"/>
        <body name="{p}upper_arm" pos="0.0306 0 0.1025">
          <joint name="{p}shoulder_lift" axis="0 1 0" range="{r1}"/>
          <geom class="arm" type="capsule" size="0.017" fromto="0 0 0 0.028 0 0.11257" mass="0.162"/>
          <body name="{p}lower_arm" pos="0.028 0 0.11257">
            <joint name="{p}elbow_flex" axis="0 1 0" range="{r2}"/>
            <geom class="motor" type="capsule" size="0.017" fromto="0 0 0 0.1349 0 0.0052" mass="0.148"/>
            <body name="{p}wrist" pos="0.1349 0 0.0052">
              <joint name="{p}wrist_flex" axis="0 1 0" range="{r3}"/>
              <geom class="arm" type="capsule" size="0.016" fromto="0 0 0 0.05 0 0" mass="0.066"/>
              <body name="{p}hand" pos="0.0601 0 0">
                <joint name="{p}wrist_roll" axis="-1 0 0" range="{r4}"/>
                <geom class="motor" type="box" size="0.02 0.02 0.015" pos="0.01 0 0" mass="0.063"/>
                <geom class="arm" type="box" size="0.035 0.01 0.004" pos="0.062 0 -0.008" mass="0.03"/>
                <site name="{p}tip" pos="0.097 0 0" size="0.003"/>
                <camera name="{p}wrist" pos="-0.02 0 0.06" xyaxes="0 -1 0 0.3 0 0.95" fovy="{wrist}"/>
                <body name="{p}jaw" pos="0.0244 0 0.0202">
                  <joint name="{p}gripper" axis="0 -1 0" range="{r5}"/>
                  <geom class="arm" type="box" size="0.035 0.01 0.004" pos="0.037 0 -0.008" mass="0.02"/>
                </body>
              </body>
            </body>
          </body>
        </body>
      </body>
    </body>
"""


def build(arms: Sequence[str] = (ONE_ARM,)) -> Any:
    """Return MuJoCo's model; the first six positions are the joints, then those of the second arm.

    arms: prefix of the names of each arm: ONE_ARM, or TWO_ARMS.
    """
    import mujoco

    ranges = {f"r{number}": f"{low} {high}" for number, (low, high) in enumerate(RANGE_DEG)}
    actuators = "".join(
        f'<position name="{arm}{name}" joint="{arm}{name}" ctrlrange="{low} {high}"/>'
        for arm in arms
        for name, (low, high) in zip(JOINTS, RANGE_DEG, strict=True)
    )
    sides = (0.0,) if len(arms) == 1 else (APART_M / 2, -APART_M / 2)
    bodies = "".join(
        _ARM.format(p=arm, y=side, **ranges, **FOVY_DEG)
        for arm, side in zip(arms, sides, strict=True)
    )
    return mujoco.MjModel.from_xml_string(
        _MJCF.format(step=STEP_S, half=CUBE_M / 2, actuators=actuators, arms=bodies, **FOVY_DEG)
    )


@dataclass(frozen=True)
class SimulatorState:
    """True state of the simulation."""

    time: float
    """Monotonic, seconds."""
    positions: NDArray[np.float64]
    """MuJoCo's ``qpos``."""

    @property
    def joints_deg(self) -> NDArray[np.float64]:
        """Of all arms."""
        return np.degrees(self.positions[:-7])

    @property
    def cube(self) -> NDArray[np.float64]:
        """Position of the cube's centre ``[3]``."""
        return self.positions[-7:-4]

    def pack(self) -> bytes:
        return np.concatenate([[self.time], self.positions]).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> SimulatorState:
        numbers = np.frombuffer(data)
        return cls(float(numbers[0]), numbers[1:])

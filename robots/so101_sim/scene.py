"""The simulated SO-101 with table, cube and cameras. Metres; joints in degrees outside MuJoCo.

Joint frames and masses: the URDF of the SO-100 (TheRobotStudio, SO-ARM100, Apache-2.0), whose links
the SO-101 keeps, with x forward and z up. Shapes are primitives. Position control, friction and
armature are those of MuJoCo Menagerie's ``trs_so_arm100``. Joint ranges are the SO-101's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..simulated.scene import FOVY_DEG

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
RANGE_DEG = ((-110.0, 110.0), (-100.0, 100.0), (-97.0, 97.0), (-95.0, 95.0), (-160.0, 160.0), (-10.0, 100.0))
HOME_DEG = (0.0, -44.0, 36.0, 68.0, 0.0, 100.0)
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
    <body name="base">
      <geom class="arm" type="box" size="0.045 0.045 0.02" pos="0 0 0.025" mass="0.193"/>
      <body name="shoulder" pos="0.0452 0 0.0165">
        <joint name="shoulder_pan" axis="0 0 -1" range="{r0}"/>
        <geom class="arm" type="capsule" size="0.022" fromto="0 0 0.04 0.02 0 0.1" mass="0.119"/>
        <body name="upper_arm" pos="0.0306 0 0.1025">
          <joint name="shoulder_lift" axis="0 1 0" range="{r1}"/>
          <geom class="arm" type="capsule" size="0.017" fromto="0 0 0 0.028 0 0.11257" mass="0.162"/>
          <body name="lower_arm" pos="0.028 0 0.11257">
            <joint name="elbow_flex" axis="0 1 0" range="{r2}"/>
            <geom class="motor" type="capsule" size="0.017" fromto="0 0 0 0.1349 0 0.0052" mass="0.148"/>
            <body name="wrist" pos="0.1349 0 0.0052">
              <joint name="wrist_flex" axis="0 1 0" range="{r3}"/>
              <geom class="arm" type="capsule" size="0.016" fromto="0 0 0 0.05 0 0" mass="0.066"/>
              <body name="hand" pos="0.0601 0 0">
                <joint name="wrist_roll" axis="-1 0 0" range="{r4}"/>
                <geom class="motor" type="box" size="0.02 0.02 0.015" pos="0.01 0 0" mass="0.063"/>
                <geom class="arm" type="box" size="0.035 0.01 0.004" pos="0.062 0 -0.008" mass="0.03"/>
                <site name="tip" pos="0.097 0 0" size="0.003"/>
                <camera name="wrist" pos="-0.02 0 0.06" xyaxes="0 -1 0 0.3 0 0.95" fovy="{wrist}"/>
                <body name="jaw" pos="0.0244 0 0.0202">
                  <joint name="gripper" axis="0 -1 0" range="{r5}"/>
                  <geom class="arm" type="box" size="0.035 0.01 0.004" pos="0.037 0 -0.008" mass="0.02"/>
                </body>
              </body>
            </body>
          </body>
        </body>
      </body>
    </body>
    <body name="cube" pos="0.22 0 {half}">
      <freejoint name="cube"/>
      <geom type="box" size="{half} {half} {half}" mass="0.03" rgba="0.85 0.1 0.1 1" friction="1 0.005 0.0001" conaffinity="3"/>
    </body>
  </worldbody>
  <actuator>{actuators}</actuator>
</mujoco>
"""


def build() -> Any:
    """Return MuJoCo's model; the first six positions are the joints."""
    import mujoco

    ranges = {f"r{number}": f"{low} {high}" for number, (low, high) in enumerate(RANGE_DEG)}
    actuators = "".join(
        f'<position name="{name}" joint="{name}" ctrlrange="{low} {high}"/>' for name, (low, high) in zip(JOINTS, RANGE_DEG, strict=True)
    )
    return mujoco.MjModel.from_xml_string(_MJCF.format(step=STEP_S, half=CUBE_M / 2, actuators=actuators, **ranges, **FOVY_DEG))


@dataclass(frozen=True)
class SimulatorState:
    """True state of the simulation."""

    time: float
    """Monotonic, seconds."""
    positions: NDArray[np.float64]
    """MuJoCo's ``qpos``."""

    @property
    def joints_deg(self) -> NDArray[np.float64]:
        return np.degrees(self.positions[: len(JOINTS)])

    @property
    def cube(self) -> NDArray[np.float64]:
        """Position of the cube's centre ``[3]``."""
        return self.positions[len(JOINTS) : len(JOINTS) + 3]

    def pack(self) -> bytes:
        return np.concatenate([[self.time], self.positions]).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> SimulatorState:
        numbers = np.frombuffer(data)
        return cls(float(numbers[0]), numbers[1:])

"""Convert between an arm, which follows docs/conventions.md, and a policy of another convention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.core.protocols import Convention
from rlinf_vla.core.rotations import axis_angle
from rlinf_vla.core.types import Observation
from rlinf_vla.features.realworld.inference import Actions

GRIPPERS = {"open_positive": (1.0, 0.0), "close_positive": (-1.0, 0.0), "zero_to_one": (2.0, -1.0)}
"""What a policy's gripper action means -> scale and offset that make +1 open and -1 close."""


class ArmConvention:
    """Converts the state of observations, and the gripper of actions.

    Recordings keep the arm's convention, whatever the policy. Units and images are not converted:
    ``check_meaning`` refuses a policy that differs in these.
    """

    def __init__(self, policy: Convention) -> None:
        """``policy``: what it expects; None in a part means the arm's own convention."""
        self.axis_angle = policy.state == "axis_angle"
        self._scale, self._offset = GRIPPERS[policy.gripper or "open_positive"]
        state = policy.state if policy.state in (None, "axis_angle") else "quaternion"
        self.native = Convention(gripper=policy.gripper, state=state, images="upright")
        """What the policy gets after the conversion."""

    def seen(self, observation: Observation) -> Observation:
        """Return the observation ``[B]`` with the state ``[B, 8]`` in the policy's layout."""
        if not self.axis_angle:
            return observation
        state = observation.state
        turns = torch.tensor(
            [axis_angle(quaternion) for quaternion in state[:, 3:7].tolist()], dtype=torch.float32
        )
        fingers = torch.stack([state[:, 7], -state[:, 7]], 1)
        return replace(
            observation, state=torch.cat([state[:, :3], turns.reshape(-1, 3), fingers], 1)
        )

    def to_arm(self, actions: Actions) -> Actions:
        """Convert the policy's actions ``[..., D]``."""
        return np.concatenate(
            [actions[..., :-1], self._scale * actions[..., -1:] + self._offset],
            -1,
            dtype=np.float32,
        )

    def to_policy(self, actions: Tensor) -> Tensor:
        """Convert actions ``[..., D]`` of the arm: the inverse of ``to_arm``."""
        return torch.cat([actions[..., :-1], (actions[..., -1:] - self._offset) / self._scale], -1)

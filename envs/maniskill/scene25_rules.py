"""Success and reward of PutOnPlateInScene25, as RLinf's tasks at a3816b59 define them.

Lengths are metres; ``N`` is the number of environments.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRASPED, GRASPED_LONG, PLACED = 0.1, 0.1, 1.0
"""Parts of the reward."""
LONG = 5
"""Control steps in a row that make a long grasp."""
BESIDE, ABOVE = 0.01, 0.05
"""How far an object may be beyond its receptacle's half size, and above its place."""
TOUCH = 0.03
"""Force between the two that must be exceeded, newtons."""


def turned_size(turn: Tensor, size: Tensor) -> Tensor:
    """Return sizes ``[N, 3]`` of the boxes around turned boxes, from rotations ``[N, 3, 3]``."""
    return (turn.abs() @ size[..., None])[..., 0]


def on_plate(offset: Tensor, object_size: Tensor, plate_size: Tensor, force: Tensor) -> Tensor:
    """Whether objects are on their plates: bool ``[N]``.

    ``offset``: from the plate's origin to the object's; ``force``: contact force between them
    (N); sizes: of the boxes around both at reset. All ``[N, 3]``.
    """
    reach = plate_size.amax(dim=1) / 2 + BESIDE
    height = offset[:, 2] - plate_size[:, 2] / 2 - object_size[:, 2] / 2
    is_near = offset[:, :2].norm(dim=1) <= reach
    return is_near & (offset[:, 2] > 0) & (height <= ABOVE) & (force.norm(dim=1) > TOUCH)


class Progress:
    """What an episode has reached: flags that stay until it ends."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.step = torch.zeros(num_envs, dtype=torch.int64, device=device)
        """Control steps that have been counted."""
        self.streak = torch.zeros_like(self.step)
        """Of these, the last ones in a row with a grasp."""
        self.grasped = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.grasped_long = torch.zeros_like(self.grasped)

    def begin(self, rows: Tensor) -> None:
        for counted in (self.step, self.streak, self.grasped, self.grasped_long):
            counted[rows] = 0

    def count(self, new: Tensor, grasping: Tensor) -> None:
        """Count a control step in the rows where it is ``new``: bool ``[N]`` each."""
        self.step += new
        self.streak = torch.where(new, (self.streak + 1) * grasping, self.streak)
        self.grasped |= new & grasping
        self.grasped_long |= new & (self.streak >= LONG)

    def level(self, success: Tensor) -> Tensor:
        """Return the level ``[N]``, whose changes are the rewards."""
        return (
            GRASPED * self.grasped
            + GRASPED_LONG * self.grasped_long
            + PLACED * (success & self.grasped)
        )

"""Define the ``env`` node of a recipe that runs Meta-World."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Dict, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.config.ranges import (
    OUTSIDE,
    Count,
    EnvCount,
    ImageSize,
    Name,
    NonEmpty,
    OneOf,
    Seconds,
    Size,
    SizeOrZero,
)

CONVENTIONS = ("common", "metaworld")
STATES = {"tool": 8, "hand": 4, "full": 39}
"""Choices of ``env.state`` -> numbers."""
RENDERINGS = ("exact", "fast")
RENDERERS = ("auto", "egl", "osmesa")
REWARDS = ("sparse", "dense", "progress")
CAMERAS = {"base": "corner4", "wrist": "gripperPOV"}
"""Camera name -> name in Meta-World."""
MOUNTED = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
"""Meta-World's cameras, in all of its scenes."""
OFFICIAL_LIMIT = 500
"""Steps of Meta-World after which it ends an episode."""


@dataclass
class MetaWorldConfig:
    """Meta-World 3: 50 tasks of a Sawyer arm, on MuJoCo.

    tasks: task names (``rlinf-vla list tasks``), or MT10 or MT50 for all tasks of that benchmark.
    instructions: task -> sentence that replaces ours, for checkpoints that know other words.
    num_envs: total number of environments over all groups.
    episode_limit: control steps after which an episode is truncated; null: Meta-World's 500 steps.
    action_repeat: steps of Meta-World (80 Hz) in which a control step repeats its action.
    convention: ``common`` follows docs/conventions.md; ``metaworld`` has actions and states as
        Meta-World and LeRobot's data have: axes of the world, where y points away from the base,
        and a gripper that 1 closes.
    state: ``tool``: as docs/conventions.md; ``hand``: position of the hand and opening of the
        gripper; ``full``: Meta-World's own observation, with objects and goal. null: ``tool``
        in the common convention, else ``hand``.
    cameras: ``base``, ``wrist`` or names of Meta-World's cameras; [] renders only videos. ``base``
        is ``corner4``, which is ``corner2`` where the field puts it.
    image_size: height and width of the images in pixels.
    rendering: ``exact`` renders as Meta-World does; ``fast`` without shadows, reflections and
        antialiasing: several times faster on a CPU.
    renderer: ``egl``, ``osmesa``, or ``auto``, the first of them that works.
    reward: ``sparse``: 1 on success, else 0. ``dense``: Meta-World's own, 0 to 10 at every step,
        which rewards delay where success ends an episode. ``progress``: change of a tenth of it,
        and up to 1 on success, so that an episode sums to its last value (potential-based shaping,
        Ng et al. 1999; the first step pays the start's value, which no action changes).
    processes: total number of simulator processes, which rollout workers divide; null: one per CPU
        core, at least one per group.
    scenes: idle tasks that a process keeps built.
    step_timeout_s: seconds that a command may take before its process counts as hung and is
        replaced.
    python: another Python environment with metaworld for the simulators; null: this one.
    """

    name: Name = "metaworld"
    tasks: Annotated[list[Name], NonEmpty()] = field(default_factory=lambda: ["reach-v3"])
    instructions: Dict[str, str] = field(default_factory=dict)  # noqa: UP006
    num_envs: EnvCount = 8
    episode_limit: Optional[Count] = None  # noqa: UP045
    action_repeat: Size = 1
    convention: Annotated[str, OneOf(*CONVENTIONS)] = "common"
    state: Optional[Annotated[str, OneOf(*STATES)]] = None  # noqa: UP045
    cameras: list[Name] = field(default_factory=lambda: ["base"])
    image_size: ImageSize = 128
    rendering: Annotated[str, OneOf(*RENDERINGS)] = "exact"
    renderer: Annotated[str, OneOf(*RENDERERS)] = "auto"
    reward: Annotated[str, OneOf(*REWARDS)] = "sparse"
    processes: Optional[Size] = None  # noqa: UP045
    scenes: SizeOrZero = 1
    step_timeout_s: Seconds = 120.0
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

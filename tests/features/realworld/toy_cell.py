"""A robot, a scene and an operator without hardware, on a virtual clock: touch a point that the seed selects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlinf_vla.benchmarks.synthetic_cell import REST, SyntheticCamera, SyntheticRobot
from rlinf_vla.config.robot import ControlConfig, SessionConfig
from rlinf_vla.features.realworld.episode import RobotEpisode
from rlinf_vla.features.realworld.inference import Chunk, Request
from rlinf_vla.features.realworld.operator_session import Cell
from rlinf_vla.features.realworld.player import RobotPlayer, Score
from rlinf_vla.features.realworld.robot import Action, RobotState, Scene, Vector
from rlinf_vla.rollout.reward_shaping import env_reward
from tests.features.realworld.control import HZ, MS
from tests.features.realworld.virtual_time import ScheduledInference, VirtualClock

NEAR_M = 0.021


class ToyScene:
    task = "Touch"
    by_hand = False
    has_expert = True
    instructions = ("touch the point",)
    can_tell = True

    def __init__(self) -> None:
        self.goal: Vector = REST.position
        self.laid_out: list[int] = []

    def arrange(self, seed: int) -> str:
        self.laid_out.append(seed)
        self.goal = REST.position + np.array([0.1 + 0.01 * (seed % 5), 0.05 * (seed % 3 - 1), -0.1])
        return "touch the point"

    def succeeded(self, state: RobotState) -> bool | None:
        return (
            bool(np.linalg.norm(state.pose.position - self.goal) < NEAR_M)
            if self.can_tell
            else None
        )

    def expert(self, state: RobotState) -> Action | None:
        if not self.has_expert:
            return None
        return np.array(
            [*np.clip((self.goal - state.pose.position) / 0.05, -1, 1), 1.0], np.float32
        )


class ToyPerson:
    """Sends planned words and motions, each at its time: ``plan[ms] = word``."""

    name = "Ada"

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.plan: dict[float, str] = {}
        self.acts: Callable[[float], Action | None] = lambda hand: None

    def action(self, hand: float) -> Action | None:
        return self.acts(hand)

    def words(self) -> list[str]:
        due = [when for when in self.plan if when * MS <= self._clock.now()]
        return [self.plan.pop(when) for when in sorted(due)]

    def close(self) -> None: ...


class Toy:
    """``acts``: the policy's action from (position, goal); its inference takes ``delay`` of control.MS. ``wrap``: wraps the scene."""

    def __init__(
        self,
        limit: int = 20,
        delay: float = 20,
        score: Score = env_reward,
        journal_path: Path | None = None,
        warmup: int = 0,
        wrap: Callable[[ToyScene], Scene] = lambda scene: scene,
        **settings: object,
    ) -> None:
        self.clock = VirtualClock()
        self.robot = SyntheticRobot(self.clock, HZ)
        self.scene = ToyScene()
        self.operator = ToyPerson(self.clock)
        self.acts: Callable[[Vector, Vector], list[float]] = lambda position, goal: [
            1.0,
            0.0,
            0.0,
            1.0,
        ]
        self.delay: Callable[[Request], float] = lambda request: delay * MS
        background = ScheduledInference(
            self._infer, self.clock, lambda request: self.delay(request)
        )
        self.camera = SyntheticCamera(self.clock, "front", (8, 8))
        cell = Cell(self.robot, [self.camera], wrap(self.scene), self.operator)
        self.said: list[dict[str, str]] = []
        self.episodes: list[RobotEpisode] = []
        self.by_kind: dict[str, list[RobotEpisode]] = defaultdict(list)
        self.player = RobotPlayer(
            cell,
            background,
            ControlConfig(warmup=warmup, max_misses=5),
            SessionConfig(**settings),  # type: ignore[arg-type]
            limit,
            (1, 4),
            self.clock,
            score,
            self.said.append,
            journal_path,
        )

    @property
    def told(self) -> list[dict[str, str]]:
        """Messages without heartbeats."""
        return [message for message in self.said if message]

    def keep(self, episode: RobotEpisode) -> None:
        self.episodes.append(episode)
        self.by_kind[episode.job.kind].append(episode)

    def _infer(self, request: Request) -> Chunk:
        position = request.seen.state.pose.position
        return Chunk(request, np.array([self.acts(position, self.scene.goal)], np.float32))

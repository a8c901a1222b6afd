"""Toy environment in pure Python: it starts at once, and refuses calls that break the protocol.

Each environment counts a level, which a large first action dimension raises or lowers by one. An
episode succeeds at the task's goal, fails at its negative, and is truncated at the limit. Image and
state show level and clock. Results depend on task, seed and actions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.core.protocols import Diagnosis, EnvSpec, Task, ToolUnits, VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult

GOALS = {"Low": 2, "High": 3}
INSTRUCTIONS = {"Low": "push the cube", "High": "stack the red cube on the green cube"}
IMAGE = 64
PUSH = 0.7


@dataclass
class Counter:
    """One environment."""

    task: str
    seed: int
    limit: int
    ends_at_goal: bool = True
    level: int = 0
    clock: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.level = self.seed % 3 - 1

    @property
    def goal(self) -> int:
        return GOALS[self.task]

    def step(self, action: list[float]) -> tuple[float, bool, bool, bool]:
        """Return reward, terminated, truncated and success."""
        if abs(action[0]) >= PUSH:
            self.level += 1 if action[0] > 0 else -1
        self.clock += 1
        success = self.level >= self.goal
        failed = self.level <= -self.goal
        truncated = self.clock == self.limit
        terminated = self.ends_at_goal and (success or failed)
        self.ended = terminated or truncated
        reward = float(success) - 0.5 * failed + 0.1 * action[1] * (1 + self.seed % 4)
        return reward, terminated, truncated, success

    def image(self) -> Tensor:
        """Return an image whose red columns show the level, green rows the clock, blue the seed."""
        image = torch.zeros(IMAGE, IMAGE, 3, dtype=torch.uint8)
        image[:, : IMAGE // 2 + 8 * self.level, 0] = 255
        image[: 3 * self.clock, :, 1] = 255
        image[..., 2] = self.seed % 251
        return image

    def expert(self) -> list[float]:
        return [1.0, self.level / 4, self.clock / 32, 0.0]


class CounterWorld(VectorEnv):
    """The toy environment.

    journal: a list that is told each call, in order.
    ends_at_goal: if false, every episode goes on to its limit.
    state_dim: the state is level and clock, padded with zeros.
    tool_m: metres that an action of 1 is said to move a tool; None: there is no tool.
    """

    def __init__(
        self,
        num_envs: int,
        episode_limit: int = 6,
        journal: list[str] | None = None,
        name: str = "",
        ends_at_goal: bool = True,
        state_dim: int = 2,
        tool_m: float | None = None,
    ) -> None:
        self.spec = EnvSpec(
            num_envs=num_envs,
            action_dim=4,
            state_dim=state_dim,
            control_hz=10.0,
            episode_limit=episode_limit,
            images={"base": (IMAGE, IMAGE)},
            tasks=tuple(GOALS),
            device=torch.device("cpu"),
            tool=None if tool_m is None else ToolUnits(tool_m),
        )
        self.played: list[tuple[str, int]] = []
        self.closed = False
        self._journal = [] if journal is None else journal
        self._name = name
        self._ends_at_goal = ends_at_goal
        self._counters: list[Counter] = []
        self._pending: tuple[str, Callable[[], Any]] | None = None

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        size = self.spec.num_envs
        selected = [True] * size if mask is None else mask.tolist()
        tasks, seeds = episodes.task_id.tolist(), episodes.seed.tolist()
        _require(len(selected) == size, "mask", selected)
        _require(len(seeds) == size and all(0 <= seed < 2**32 for seed in seeds), "seed", seeds)
        _require(
            len(tasks) == size and all(0 <= task < len(GOALS) for task in tasks), "task_id", tasks
        )
        _require(bool(self._counters) or all(selected), "mask", selected)

        def reset() -> Observation:
            fresh = [
                Counter(self.spec.tasks[task], seed, self.spec.episode_limit, self._ends_at_goal)
                for task, seed in zip(tasks, seeds, strict=True)
            ]
            self._counters = [
                new if new_wanted else old
                for new, old, new_wanted in zip(
                    fresh, self._counters or fresh, selected, strict=True
                )
            ]
            self.played += [
                (counter.task, counter.seed)
                for counter, it_is in zip(fresh, selected, strict=True)
                if it_is
            ]
            return self._observe()

        self._begin("reset", reset)

    def reset_wait(self) -> Observation:
        return self._wait("reset")

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        shape = (self.spec.num_envs, self.spec.action_dim)
        right = (
            actions.dtype == torch.float32
            and actions.dim() == 3
            and (actions.shape[0], actions.shape[2]) == shape
        )
        _require(
            right and actions.shape[1] > 0 and bool(actions.isfinite().all()), "actions", actions
        )
        if not skip_ended and any(counter.ended for counter in self._counters):
            raise RuntimeError("an episode has ended: reset it before the next step")
        rows = actions.tolist()

        def step() -> StepResult:
            reward = torch.zeros(actions.shape[:2])
            flags = torch.zeros(
                4, *reward.shape, dtype=torch.bool
            )  # terminated, truncated, success, valid
            for b, (counter, chunk) in enumerate(zip(self._counters, rows, strict=True)):
                for c, action in enumerate(chunk):
                    if not counter.ended:
                        reward[b, c], *ends = counter.step(action)
                        flags[:, b, c] = torch.tensor([*ends, True])
            return StepResult(self._observe(), reward, *flags)

        self._begin("step", step)

    def step_wait(self) -> StepResult:
        return self._wait("step")

    def render(self, index: int) -> Tensor:
        return self._counters[index].image()

    def expert_actions(self) -> Tensor:
        return torch.tensor([counter.expert() for counter in self._counters])

    def close(self) -> None:
        self.closed = True

    def _begin(self, name: str, work: Callable[[], Any]) -> None:
        """The work itself is done in ``_wait``, as by a slow simulator."""
        if self.closed or self._pending:
            raise RuntimeError(
                f"{name}: {'closed' if self.closed else 'the last command is still under way'}"
            )
        self._pending = name, work
        self._journal.append(f"{self._name} {name}")

    def _wait(self, name: str) -> Any:
        if self._pending is None or self._pending[0] != name:
            raise RuntimeError(f"{name}_wait without {name}_async")
        (_, work) = self._pending
        self._pending = None
        self._journal.append(f"{self._name} {name} done")
        return work()

    def _observe(self) -> Observation:
        return Observation(
            images={"base": torch.stack([counter.image() for counter in self._counters])},
            state=F.pad(
                torch.tensor([[float(c.level), float(c.clock)] for c in self._counters]),
                (0, self.spec.state_dim - 2),
            ),
            instruction=[INSTRUCTIONS[counter.task] for counter in self._counters],
        )


def _require(condition: bool, what: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{what}: {value}")


def groups(num_envs: int, count: int, **options: Any) -> list[CounterWorld]:
    """Return ``num_envs`` environments in ``count`` equal groups."""
    assert num_envs % count == 0
    return [CounterWorld(num_envs // count, name=str(index), **options) for index in range(count)]


@dataclass
class CounterConfig:
    """Recipe node ``env``."""

    name: str = "counter"
    num_envs: int = 4
    episode_limit: int = 6
    state_dim: int = 2
    tool_m: float | None = None


class CounterPlugin:
    """Implements ``EnvPlugin``."""

    name = "counter"
    Config = CounterConfig

    def __init__(self) -> None:
        self.created: list[CounterWorld] = []

    def create(self, config: CounterConfig, groups: int) -> list[VectorEnv]:
        options: dict[str, Any] = {"state_dim": config.state_dim, "tool_m": config.tool_m}
        envs = [
            CounterWorld(config.num_envs // groups, config.episode_limit, **options)
            for _ in range(groups)
        ]
        self.created += envs
        return list(envs)

    def tasks(self) -> list[Task]:
        return [Task(name, INSTRUCTIONS[name], available=True, has_expert=True) for name in GOALS]

    def diagnose(self) -> list[Diagnosis]:
        return [Diagnosis("counter", True, "needs nothing")]


plugin = CounterPlugin()

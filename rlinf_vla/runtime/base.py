"""Common state of macro-flow runtimes: iteration, metrics, policy version, early rollouts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vla.algorithms.parity import Parity
from rlinf_vla.core.protocols import EnvSpec
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.rollout.faults import METRIC, Fault
from rlinf_vla.runtime.workers.shards import Packed
from rlinf_vla.telemetry.timeline import Timeline


class Restart(Exception):
    """The run must resume from its newest checkpoint, under ``plan`` if it is not None."""

    plan: Any = None


class BaseFlow:
    """Base of flows; per iteration: ``begin(i)``, ``algorithm.iteration(flow)``, ``metrics``."""

    metrics_every = 1
    """Number of iterations per written line of metrics."""
    time_limit_s = math.inf
    """No iteration begins more than this many seconds after the first of this process."""
    parity: Parity | None = None
    """Errors of ``evaluate`` on the first rollout's log-probabilities; None: unchecked."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.timeline = Timeline()
        self.progress: Callable[[str, float], None] = lambda stage, fraction: None
        """Receives the name of the present stage and the fraction of it that is done."""
        self.iteration = 0
        self.policy_version = 0
        self.changed = False
        """Whether this iteration has begun to change the policy or the replay buffer.

        From then until its end there is no state to resume from."""
        self.metrics: dict[str, float] = {}
        self.faults: list[Fault] = []
        """Episodes of this iteration that were cut because a simulator failed."""
        self._played_steps = 0
        self._first_began = math.inf
        """When the first iteration of this process began, of ``time.monotonic``."""

    def begin(self, iteration: int) -> None:
        self._first_began = min(self._first_began, time.monotonic())
        self.iteration = iteration
        self.metrics = {}
        self.changed = False
        self.faults = []
        self._played_steps = 0
        self.timeline.begin_iteration(iteration + 1)

    def enough(self) -> bool:
        """Whether the run must end before the next iteration, whatever ``iterations`` says."""
        return time.monotonic() - self._first_began >= self.time_limit_s

    def will_leave(self) -> bool:
        """Whether a machine that holds what only a checkpoint preserves was told to leave."""
        return False

    def log(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def publish(self) -> None:
        self.policy_version += 1

    def log_faults(self, faults: Sequence[Fault]) -> None:
        self.faults += faults
        self.log({METRIC: float(len(self.faults))} if self.faults else {})

    def log_rollout(self, seconds: float, steps: int) -> None:
        """Log time and throughput, summed over the rollouts that run during this iteration.

        Later iterations may train on some of them; ``rollout/steps`` counts those of this one."""
        seconds += self.metrics.get("timing_s/rollout", 0.0)
        self._played_steps += steps
        self.log(
            {
                "timing_s/rollout": seconds,
                "throughput/rollout_steps_per_s": self._played_steps / seconds,
            }
        )

    def save(self) -> dict[str, Any]:
        """Return the flow's state for a checkpoint, as JSON; data that it refers to is on disk."""
        return {"policy_version": self.policy_version}

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        """Receive the states of all checkpoints that can still be resumed."""

    def packed_earlier(self) -> dict[int, Packed]:
        """Return version -> trained weights of earlier versions that still have rollouts to run."""
        return {}

    def _rolling(self, fraction: float) -> None:
        self.progress("rollout", fraction)


PlayEpisodes = Callable[[float, int, Callable[[float], None], str | None], list[EpisodeResult]]
"""Run the recipe's evaluation episodes: (temperature, episodes to film, progress callback, probe or
None)."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Runtime:
    """A running training flow with its evaluation and checkpoints."""

    flow: BaseFlow
    env: EnvSpec | None
    """Spec of one environment group; None: there is no environment."""
    calls_per_s: float
    """Policy calls per second of simulated (at a robot: real) time."""
    play: PlayEpisodes | None
    """Runs the recipe's evaluation episodes; None: there is no policy or no environment."""
    save: Callable[[dict[str, Any]], None]
    """Write a checkpoint with this state."""
    state: dict[str, Any]
    """State of the checkpoint that the run resumes from; empty for a new run."""

"""What every runtime of a macro flow keeps: the iteration, its metrics, the policy's version, rollouts that were begun early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.collector import episode_metrics, rollout_metrics
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.types import Rollouts, Tensors, gather


class BaseFlow:
    """One iteration at a time: ``begin(i)``, then ``algorithm.iteration(flow)``, then ``metrics``."""

    parity: float | None = None
    """How well ``evaluate`` found the first rollout's log-probabilities again; None: not asked yet."""

    def __init__(
        self, settings: Settings, timeline: Timeline, progress: Callable[[str, float], None] = lambda stage, fraction: None
    ) -> None:
        self.settings, self.timeline, self.progress = settings, timeline, progress
        self.iteration = 0
        self.policy_version = 0
        self.changed = False
        """This iteration has begun to change policy or replay: until it is done there is no state to go on from."""
        self.metrics: dict[str, float] = {}
        self._played_steps = 0

    def begin(self, iteration: int) -> None:
        self.iteration, self.metrics, self.changed = iteration, {}, False
        self._played_steps = 0
        self.timeline.begin_iteration(iteration + 1)

    def enough(self) -> bool:
        """No further iteration shall begin, whatever ``iterations`` says."""
        return False

    def log(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def publish(self) -> None:
        self.policy_version += 1

    def log_rollout(self, seconds: float, steps: int) -> None:
        """Adds up over the rollouts that were played during an iteration. Some of them may be learnt from later: ``rollout/steps`` counts
        those that this iteration learns from."""
        seconds += self.metrics.get("timing_s/rollout", 0.0)
        self._played_steps += steps
        self.log({"timing_s/rollout": seconds, "throughput/rollout_steps_per_s": self._played_steps / seconds})

    def save(self) -> dict[str, Any]:
        """What a checkpoint must remember of the flow, as JSON; it is on disk when this returns."""
        return {"policy_version": self.policy_version}

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        """These are the checkpoints that can still be resumed."""

    def _rolling(self, fraction: float) -> None:
        self.progress("rollout", fraction)


class OnPolicyFlow(BaseFlow):
    """What the runtimes of PPO and GRPO share: rollouts ahead of their iteration, and the metrics of several updates in one."""

    def __init__(self, settings: Settings, timeline: Timeline, staleness: int = 0, iterations: int | None = None, **options: Any) -> None:
        """``iterations``: after which nothing more will be asked for; None: not known."""
        super().__init__(settings=settings, timeline=timeline, **options)
        self.staleness, self.iterations = staleness, iterations
        self._ahead: dict[int, Rollouts] = {}
        self._updates = 0.0
        self._scored: list[Rollouts] = []

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        self._updates, self._scored = 0.0, []

    def collect(self, horizon: int) -> Rollouts:
        return self._started(lambda iteration, version: self.start_slots(iteration, version, horizon))

    def collect_groups(self, groups: int, attempts: int, draw: int) -> Rollouts:
        return self._started(lambda iteration, version: self.start_groups(iteration, version, groups, attempts, draw))

    def start_slots(self, iteration: int, version: int, horizon: int) -> Rollouts:
        """Begin the rollout of an iteration, by the policy's ``version``."""
        raise NotImplementedError

    def start_groups(self, iteration: int, version: int, groups: int, attempts: int, draw: int) -> Rollouts:
        raise NotImplementedError

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The environments know their recipe's reward: see ``rollout.rewarded``."""
        self._scored.append(rollouts)
        return rollouts

    def publish(self) -> None:
        shards = [replace(shard, inputs={}, latent={}, reference=None) for rollouts in self._scored for shard in rollouts]
        if shards:
            everything = gather(shards)
            self.log(rollout_metrics(everything) if everything.value.ndim == 2 else episode_metrics(everything))
            if self.staleness:
                self.log({"rollout/staleness": (self.policy_version - everything.policy_version).float().mean().item()})
        super().publish()

    def awaited(self, version: int) -> bool:
        """An earlier version, by which rollouts that are still to be learnt from are played."""
        return self.policy_version - self.staleness <= version < self.policy_version

    def earlier(self) -> dict[int, Tensors]:
        """What trains, as it was in versions that still have rollouts to play."""
        return {}

    def remember(self, earlier: dict[int, Tensors]) -> None:
        """What ``earlier`` said when the checkpoint was written that the run goes on from."""

    def log_update(self, metrics: dict[str, float]) -> None:
        """Means over all optimiser steps of the iteration."""
        steps = metrics["actor/updates"]
        before, self._updates = self._updates, self._updates + steps
        if before:
            share = steps / max(self._updates, 1)
            metrics = {name: share * value + (1 - share) * self.metrics.get(name, value) for name, value in metrics.items()}
        self.log(metrics | {"actor/updates": self._updates})

    def _started(self, start: Callable[[int, int], Rollouts]) -> Rollouts:
        """This iteration's rollouts; those of the next ``staleness`` iterations have begun, too."""
        if not self.staleness:
            return start(self.iteration, self.policy_version)
        end = self.iteration + self.staleness + 1
        for iteration in range(self.iteration, end if self.iterations is None else min(end, self.iterations)):
            if iteration not in self._ahead:
                self._ahead[iteration] = start(iteration, max(0, iteration - self.staleness))
        return self._ahead.pop(self.iteration)

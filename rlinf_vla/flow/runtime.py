"""The macro flow in one process: the policy here, the simulators in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy, OnPolicyConfig, parity
from rlinf_vla.algorithms.sft import Demonstrations, imitation_loss
from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect, collect_episodes, episode_metrics, rollout_calls, rollout_metrics
from rlinf_vla.rollout.demonstrations import demonstrate, imitation_noise
from rlinf_vla.rollout.episodes import training_episodes
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import merged_lora
from rlinf_vla.training.trainer import Term, Trainer
from rlinf_vla.types import Episodes, Inputs, Trajectory

PARITY_TOLERANCE, BFLOAT16_PARITY_TOLERANCE = 1e-4, 0.1
"""Refuse to train where ``evaluate`` does not find the rollout's own log-probabilities again. A network in bfloat16 rounds differently
token by token and all at once: by 0.01 on the packaged tiny model."""


class LocalFlow:
    """One iteration at a time: ``begin(i)``, then ``algorithm.iteration(flow)``, then ``metrics``."""

    parity: float | None = None
    """How well ``evaluate`` found the first rollout's log-probabilities again; None: not asked yet."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[VectorEnv],
        settings: Settings,
        timeline: Timeline,
        progress: Callable[[str, float], None] = lambda stage, fraction: None,
        update_threads: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``update_threads``: what holds while the trainer works and the simulators rest."""
        self.policy, self.groups, self.settings = policy, groups, settings
        self.actor = Actor(policy, settings)
        self.timeline, self.progress, self.update_threads = timeline, progress, update_threads
        self.iteration = 0
        self.policy_version = 0
        self.metrics: dict[str, float] = {}

    def begin(self, iteration: int) -> None:
        self.iteration, self.metrics = iteration, {}
        self.timeline.begin_iteration(iteration + 1)

    def log(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def training_episodes(self, count: int, draw: int) -> Episodes:
        slots = torch.arange(count)
        tasks = len(self.groups[0].spec.tasks)
        return training_episodes(self.settings.run_seed, self.iteration, slots, torch.full_like(slots, draw), tasks)

    def publish(self) -> None:
        """The rollouts use the trainer's own weights here: only the version moves."""
        self.policy_version += 1

    def log_rollout(self, seconds: float, steps: int) -> None:
        """Adds up over the rollouts of an iteration."""
        seconds += self.metrics.get("timing_s/rollout", 0.0)
        steps += int(self.metrics.get("rollout/steps", 0))
        self.log({"timing_s/rollout": seconds, "throughput/rollout_steps_per_s": steps / seconds, "rollout/steps": steps})

    def save(self) -> dict[str, Any]:
        """What a checkpoint must remember of the flow, as JSON; it is on disk when this returns."""
        return {"policy_version": self.policy_version}

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        """These are the checkpoints that can still be resumed."""

    def _rolling(self, fraction: float) -> None:
        self.progress("rollout", fraction)


class InProcessFlow(LocalFlow):
    """The flow of on-policy algorithms."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[VectorEnv],
        trainer: Trainer,
        settings: Settings,
        timeline: Timeline,
        reuse_frozen: bool = True,
        **options: Any,
    ) -> None:
        """``reuse_frozen``: see ``ClusterConfig``. ``options``: see :class:`LocalFlow`."""
        super().__init__(policy, groups, settings, timeline, **options)
        self.trainer, self.reuse_frozen = trainer, reuse_frozen
        self._demonstrations: Demonstrations | None = None

    def collect(self, horizon: int) -> Trajectory:
        started = time.perf_counter()
        calls = rollout_calls(horizon, self.groups[0].spec.episode_limit, self.policy.spec.chunk)
        with merged_lora(self.policy):
            rollouts = collect(self.actor, self.groups, self.iteration, self.policy_version, calls, self.timeline, self._rolling)
        self.log(rollout_metrics(rollouts))
        self._collected(rollouts.flatten(), time.perf_counter() - started)
        return rollouts

    def collect_episodes(self, episodes: Episodes) -> Trajectory:
        started = time.perf_counter()
        with merged_lora(self.policy):
            calls = collect_episodes(self.actor, self.groups, episodes, self.policy_version, self.timeline, self._rolling)
        self.log(episode_metrics(calls))
        self._collected(calls, time.perf_counter() - started)
        return calls

    def _collected(self, calls: Trajectory, seconds: float) -> None:
        """``calls`` ``[N]``."""
        self.log_rollout(seconds, int(calls.valid.sum()))
        if self.parity is None:
            self.parity = parity(self.policy, calls, self.settings.temperature)
            rounded = any(parameter.dtype == torch.bfloat16 for parameter in self.policy.backbone.parameters())
            tolerance = BFLOAT16_PARITY_TOLERANCE if rounded else PARITY_TOLERANCE
            if not self.parity <= tolerance:
                raise RuntimeError(
                    f"evaluate() does not reproduce the rollout's log-probabilities: they differ by {self.parity:.2g} "
                    f"(tolerance {tolerance:g}); the policy's act() and evaluate() disagree"
                )

    def update(self, batch: Batch, algorithm: OnPolicy, value_only: bool = False) -> None:
        started, config = time.perf_counter(), algorithm.config

        def loss(policy: Policy, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return algorithm.loss(policy, part, value_only)

        with self.timeline.span("update", "trainer"), self.update_threads():
            if self.reuse_frozen and config.epochs > 1:
                calls = batch.calls
                batch = replace(batch, calls=replace(calls, inputs=fixed(self.policy, calls.inputs, self.trainer.micro_batch_size)))
            if config.decoupled:
                batch = replace(batch, proximal=self._log_prob(batch.calls))
            if config.kl_coef:
                with self.trainer.reference_weights():
                    batch = replace(batch, reference=self._log_prob(batch.calls))
            self.log(
                self.trainer.update(
                    batch,
                    loss,
                    config.epochs,
                    config.minibatch_size,
                    shuffle_seed=self.settings.run_seed * 1_000_003 + self.iteration,
                    enough=algorithm.enough,
                    critic_only=value_only,
                    beside=self._cotraining(algorithm.config) if config.sft_coef and not value_only else lambda index: (),
                    progress=lambda fraction: self.progress("update", fraction),
                )
            )
        self.log({"timing_s/update": time.perf_counter() - started})

    def _cotraining(self, config: OnPolicyConfig) -> Callable[[int], Sequence[Term]]:
        if self._demonstrations is None:
            self._demonstrations, expert = demonstrate(self.policy, self.groups, config.demonstrations, self.settings.run_seed)
            self.log({"sft/expert_success": expert} if expert is not None else {})
        shown, size = self._demonstrations, config.sft_batch_size
        loss = partial(imitation_loss, noise=partial(imitation_noise, self.settings.run_seed))

        def terms(index: int) -> list[Term]:
            # a minibatch's demonstrations depend on its place alone, so that a resumed run draws the same ones
            place = (self.iteration << 20) + index
            generator = torch.Generator().manual_seed(self.settings.run_seed * 1_000_003 + place)
            batch = shown[torch.randint(len(shown), (size,), generator=generator)]
            return [Term(replace(batch, draws=place * size + torch.arange(size)), loss, config.sft_coef)]

        return terms

    @torch.no_grad()
    def _log_prob(self, calls: Trajectory) -> Tensor:
        """``[N, C, D]`` under the present weights."""
        rows, temperature = self.trainer.micro_batch_size, self.settings.temperature
        parts = [calls[start : start + rows] for start in range(0, len(calls), rows)]
        return torch.cat([self.policy.evaluate(part.inputs, part.latent, temperature).log_prob for part in parts])


@torch.no_grad()
def fixed(policy: Policy, inputs: Inputs, rows: int) -> Inputs:
    """``policy.fix`` on all ``inputs``, ``rows`` at a time."""
    count = len(next(iter(inputs.values())))
    result: Inputs = {}
    for start in range(0, count, rows):
        part = {name: value[start : start + rows] for name, value in inputs.items()}
        found = policy.fix(part)
        if found is part:
            return inputs
        for name, value in found.items():
            result.setdefault(name, value.new_empty(count, *value.shape[1:]))[start : start + rows] = value
    return result

"""Flows in this process, around a policy and environments that a test has built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.off_policy import OffPolicyFlow
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.runtime.workers.learner import LearnerWorker
from rlinf_vla.runtime.workers.local import local_workers
from rlinf_vla.training.replay import AnyReplay
from rlinf_vla.training.trainer import Trainer

HERE = ClusterConfig("here", rollout_threads=1, update_threads=1)


def on_policy_flow(
    policy: Policy,
    envs: Sequence[VectorEnv],
    trainer: Trainer,
    settings: Settings,
    algorithm: Any,
    cluster: ClusterConfig = HERE,
    **options: Any,
) -> OnPolicyFlow:
    """``algorithm``: an instance for the trainer alone. ``options``: see ``OnPolicyFlow``."""
    workers = local_workers(policy, envs, envs, trainer, algorithm, settings, cluster)
    return OnPolicyFlow(workers, sum(env.spec.num_envs for env in envs), settings, **options)


def off_policy_flow(
    policy: Policy,
    envs: Sequence[VectorEnv],
    trainer: Trainer,
    settings: Settings,
    algorithm: Any,
    directory: Path,
    state: dict[str, Any],
) -> OffPolicyFlow:
    workers = local_workers(policy, envs, envs, trainer, algorithm, settings, HERE, LearnerWorker)
    return OffPolicyFlow(workers, 1, settings, algorithm.config, directory, state)


def trainer_of(flow: Any) -> Trainer:
    """The trainer of a flow in this process."""
    trainer: Trainer = flow.trainers.worker.trainer
    return trainer


def policy_of(flow: Any) -> Any:
    return flow.trainers.worker.policy


def replays_of(flow: Any) -> tuple[AnyReplay, AnyReplay]:
    """The replay buffers of online data and of demonstrations of a flow in this process."""
    online, demonstrations = flow.trainers.worker.replays
    return online, demonstrations

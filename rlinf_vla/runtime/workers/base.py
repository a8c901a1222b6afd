"""Base class of workers, builders of their parts, and shared functions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.core.devices import free_cache, threads
from rlinf_vla.core.protocols import EnvSpec, Policy, PolicySpec, VectorEnv
from rlinf_vla.core.types import Tensors
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.reward_shaping import RewardShaper
from rlinf_vla.telemetry.timeline import Span, Timeline

Progress = Callable[[float], None]
"""Receives the fraction of a task that is done. It may raise, to end the run."""


def _unheard(fraction: float) -> None:
    """Nobody waits for the progress of a worker in another process."""


@dataclass(frozen=True)
class Builders:
    """Functions that build a worker's parts; importable, so that other machines find them."""

    learner: Callable[[], Any]
    """The network that the run trains, a policy or a reward model, with its initial weights."""
    head: Callable[[], Policy]
    """Policy reduced by ``rollout.split.strip_to_head``, its weights still to be filled in."""
    environments: Callable[
        [], AbstractContextManager[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]
    ]
    """A rollout worker's environment groups: unchanged, and with the recipe's reward."""
    trainer: Callable[[Any], Any]
    algorithm: Callable[[], Any]
    reward_shaper: Callable[[EnvSpec], RewardShaper]
    """The recipe's reward, for reward workers."""
    rewards_apart: bool
    """Reward workers, not rollout workers, compute the recipe's reward."""
    settings: Settings
    cluster: ClusterConfig
    neighbours: int = 1
    """Rollout workers of this one's machine, which divide its cores among their simulators."""

    def rollout_threads(self) -> AbstractContextManager[None]:
        return threads(self.cluster.rollout_threads)

    def update_threads(self) -> AbstractContextManager[None]:
        return threads(self.cluster.update_threads)


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker reports when it is ready."""

    pid: int
    node: str
    """Address of its machine in the cluster."""
    node_id: str
    policy: PolicySpec | None
    gpus: tuple[str, ...] = ()
    """Numbers of its GPUs on that machine."""
    weights: int = 0
    trained: int = 0
    env: EnvSpec | None = None


class Workers(NamedTuple):
    """The workers of a run, by role; None: the run has none of the role.

    Pools are a ``LocalPool`` or ``Pool``s, the trainers ``LocalTrainers`` or ``Trainers``."""

    rollouts: Any
    rewards: Any
    references: Any
    features: Any
    """They have the backbone of a split policy; rollout workers then have only its head."""
    trainers: Any
    growth: Any = None
    """Adds rollout workers."""

    def pools(self) -> list[Any]:
        """Return the pools that the run has."""
        every = (self.rollouts, self.rewards, self.references, self.features)
        return [pool for pool in every if pool is not None]

    def actors(self) -> dict[str, list[Any]]:
        """Return the actors of each role."""
        by_role = {pool.role: pool.actors for pool in self.pools()}
        return {"trainer": list(self.trainers.actors), **by_role}


class ShardLost(Exception):
    """The input of a worker's task is lost, with the machine that held it."""


class Worker:
    """Base class of workers: a plain class, called directly or as a Ray actor."""

    def __init__(self, builders: Builders, place: int) -> None:
        """``place``: index of the worker among those of its role."""
        self.builders = builders
        self.place = place
        self.progress: Progress = _unheard

    def ping(self) -> None:
        """Answer while other work runs."""

    def pid(self) -> int:
        return os.getpid()

    def where(self) -> dict[str, Any]:
        """Return this worker's machine, process, GPUs that Ray gave it, and device of tensors."""
        fields = {
            "node": node_address(),
            "node_id": node_id(),
            "pid": self.pid(),
            "gpus": list(gpus()),
        }
        return fields | {"device": self.builders.cluster.torch_device}

    def info(self, spec: PolicySpec | None = None, **fields: Any) -> WorkerInfo:
        """Return what this worker reports; ``fields``: further fields."""
        return WorkerInfo(self.pid(), node_address(), node_id(), spec, gpus=gpus(), **fields)


def node_address() -> str:
    """Return the address of this machine in the cluster."""
    ray = _ray()
    return "127.0.0.1" if ray is None else str(ray.util.get_node_ip_address())


def node_id() -> str:
    ray = _ray()
    return "" if ray is None else str(ray.get_runtime_context().get_node_id())


def gpus() -> tuple[str, ...]:
    """Return the numbers of the GPUs that Ray gave this process."""
    ray = _ray()
    if ray is None:
        return ()
    numbers = ray.get_runtime_context().get_accelerator_ids()
    return (*numbers["GPU"], *numbers["NPU"])


def fetched(value: Any) -> Any:
    """Return what an object reference of Ray stands for; any other value is returned as it is."""
    ray = _ray()
    return ray.get(value) if ray is not None and isinstance(value, ray.ObjectRef) else value


def _ray() -> Any:
    """Return Ray if this process is in a cluster. It is not imported for that."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


@torch.no_grad()
def load_weights(policy: Policy, weights: Tensors) -> None:
    """Copy ``weights`` into the policy's parameters of the same names."""
    own = dict(policy.named_parameters())
    for name, value in weights.items():
        own[name].copy_(value)


def off_the_gpu(module: nn.Module) -> None:
    module.to("cpu")
    free_cache()


def clock_offset() -> float:
    """Seconds from ``time.perf_counter``, which is specific to a machine, to ``time.time``."""
    return time.time() - time.perf_counter()


def add_spans(timeline: Timeline, spans: Sequence[Span]) -> None:
    """Add spans of another process, in ``time.time``, to the timeline of this one."""
    for span in shifted(spans, -clock_offset()):
        timeline.add(*span)


def shifted(spans: Sequence[Span], seconds: float) -> list[Span]:
    return [span._replace(start=span.start + seconds, end=span.end + seconds) for span in spans]

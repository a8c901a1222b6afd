"""Base class of Ray workers, builders of their parts, and shared functions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.core.protocols import EnvSpec, Policy, PolicySpec, VectorEnv
from rlinf_vla.core.types import Tensors
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.reward_shaping import RewardShaper
from rlinf_vla.runtime.builders import threads
from rlinf_vla.runtime.ray.serialization import Packed
from rlinf_vla.telemetry.timeline import Span, Timeline

HEALTH, WEIGHTS = "health", "weights"
"""Concurrency groups in which a worker answers ``ping`` and moves weights while it works."""
START_S = 60.0
"""Seconds for a process to start before it must answer."""


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


class Worker:
    """Base class of workers: a plain class that Ray actors are made from."""

    def __init__(self, builders: Builders, place: int) -> None:
        """``place``: index of the worker among those of its role."""
        self.builders = builders
        self.place = place

    def ping(self) -> None:
        """Answer while other work runs."""

    def pid(self) -> int:
        return os.getpid()

    def where(self) -> dict[str, Any]:
        """Return this worker's machine, process, GPUs that Ray gave it, and device of tensors."""
        found = {
            "node": node_address(),
            "node_id": node_id(),
            "pid": self.pid(),
            "gpus": list(gpus()),
        }
        return found | {"device": self.builders.cluster.torch_device}

    def info(self, spec: PolicySpec | None = None, **known: Any) -> WorkerInfo:
        """Return what this worker reports; ``known``: further fields."""
        return WorkerInfo(self.pid(), node_address(), node_id(), spec, gpus=gpus(), **known)


def call_with_restart(
    actor: Any, method: str, arguments: tuple[Any, ...], heartbeat_s: float
) -> Any:
    """Call ``method`` of an actor that Ray restarts itself; kill one that hangs, and retry."""
    import ray
    from ray import exceptions

    while True:
        ref = getattr(actor, method).remote(*arguments)
        try:
            while not ray.wait([ref], timeout=heartbeat_s)[0]:
                ray.get(
                    actor.ping.options(concurrency_group=HEALTH).remote(),
                    timeout=heartbeat_s + START_S,
                )
            return ray.get(ref)
        except exceptions.GetTimeoutError:
            ray.kill(actor, no_restart=False)
        except exceptions.ActorUnavailableError:
            continue


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def gpus() -> tuple[str, ...]:
    """Return the numbers of the GPUs that Ray gave this process."""
    import ray

    return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def followed(reference: Any) -> Packed:
    """Fetch the value of an object reference."""
    import ray

    return ray.get(reference)


@torch.no_grad()
def put(policy: Policy, weights: Tensors) -> None:
    """Copy ``weights`` into the policy's parameters of the same names."""
    own = dict(policy.named_parameters())
    for name, value in weights.items():
        own[name].copy_(value)


def off_the_gpu(module: nn.Module) -> None:
    module.to("cpu")
    free_gpu()


def free_gpu() -> None:
    """Give memory that no tensor uses any more back to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def clock_offset() -> float:
    """Seconds from ``time.perf_counter``, which is specific to a machine, to ``time.time``."""
    return time.time() - time.perf_counter()


def add_spans(timeline: Timeline, spans: Sequence[Span]) -> None:
    """Add spans of another process, in ``time.time``, to the timeline of this one."""
    for span in shifted(spans, -clock_offset()):
        timeline.add(*span)


def shifted(spans: Sequence[Span], seconds: float) -> list[Span]:
    return [span._replace(start=span.start + seconds, end=span.end + seconds) for span in spans]

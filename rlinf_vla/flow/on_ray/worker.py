"""What every worker on a cluster is: a plain class, which an actor is made of, and how it makes its parts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlinf_vla.algorithms.on_policy import OnPolicy
from rlinf_vla.flow.on_ray.wire import Packed
from rlinf_vla.protocols import EnvSpec, Policy, PolicySpec, VectorEnv
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.rewarded import Worth
from rlinf_vla.telemetry.timeline import Span

Threads = Callable[[], AbstractContextManager[None]]
HEALTH = "health"
"""The concurrency group in which a worker answers ``ping`` while it works."""
START_S = 60.0
"""For a process to start, before it can answer."""


@dataclass(frozen=True)
class Builders:
    """How a worker makes its parts; functions of importable modules, so that another machine finds them."""

    policy: Callable[[], Policy]
    """With the weights that the run begins with."""
    head: Callable[[], Policy]
    """What ``rollout.split.keep_head`` leaves of it, its weights still to be filled in."""
    environments: Callable[[Policy], AbstractContextManager[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]]
    """A rollout worker's groups: as they are, and worth what the recipe's reward says."""
    trainer: Callable[[Policy], Any]
    algorithm: Callable[[], OnPolicy]
    worth: Callable[[EnvSpec], Worth]
    """What steps are worth, for reward workers."""
    rewards_apart: bool
    """Reward workers say what steps are worth, not the rollout workers."""
    sharded: bool
    """The trainer's ranks share the policy's weights out among them."""
    device: str
    heartbeat_s: float
    call_timeout_s: float
    settings: Settings
    reuse_frozen: bool
    rollout_threads: Threads
    update_threads: Threads


@dataclass(frozen=True)
class Introduction:
    pid: int
    node: str
    """Its address in the cluster."""
    policy: PolicySpec | None
    weights: int = 0
    trained: int = 0
    env: EnvSpec | None = None


class Worker:
    def __init__(self, builders: Builders, place: int) -> None:
        """``place``: its number among the workers of its role."""
        self.builders, self.place = builders, place

    def ping(self) -> None:
        """Answered beside the work."""

    def pid(self) -> int:
        return os.getpid()


def asked(actor: Any, method: str, arguments: tuple[Any, ...], heartbeat_s: float) -> Any:
    """What another worker, which Ray itself restarts, answers. One that hangs is killed first."""
    import ray
    from ray import exceptions

    while True:
        ref = getattr(actor, method).remote(*arguments)
        try:
            while not ray.wait([ref], timeout=heartbeat_s)[0]:
                ray.get(actor.ping.options(concurrency_group=HEALTH).remote(), timeout=heartbeat_s + START_S)
            return ray.get(ref)
        except exceptions.GetTimeoutError:
            ray.kill(actor, no_restart=False)
        except exceptions.ActorUnavailableError:
            continue


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def followed(reference: Any) -> Packed:
    import ray

    return ray.get(reference)


@torch.no_grad()
def put(policy: Policy, weights: Packed) -> None:
    """Into the policy's parameters of the same names."""
    own = dict(policy.named_parameters())
    for name, value in weights.tensors().items():
        own[name].copy_(value)


def off_the_gpu(module: nn.Module) -> None:
    module.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def clock_offset() -> float:
    """Seconds from ``time.perf_counter``, which is one machine's own, to ``time.time``."""
    return time.time() - time.perf_counter()


def shifted(spans: Sequence[Span], seconds: float) -> list[Span]:
    return [span._replace(start=span.start + seconds, end=span.end + seconds) for span in spans]

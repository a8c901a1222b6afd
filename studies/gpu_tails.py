"""A part of studies/prove_gpu.py: in which phase the slowest policy calls lose time."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from gpu_kit import Kit
from numpy.typing import NDArray

from rlinf_vla.core.devices import computes_on_cuda, synchronise
from rlinf_vla.core.types import Episodes, Observation
from rlinf_vla.features.planner.synthetic import observation
from rlinf_vla.rollout.actor import Actor, Settings

SLOWEST = 0.01
WARMUP = 5
PHASES = ("preparation", "launch and copies", "the device computes")
"""Of a call: from the observation to the policy's inputs, then what the GPU does not, and does."""


def tails(kit: Kit) -> None:
    """Of OpenVLA-OFT and π₀: quantiles of each phase, and what differs in the slowest calls."""
    for model in ("oft", "pi0"):
        policy = kit.policy(kit.recipe(model, "model.lora.rank=0"))
        actor = Actor(policy, Settings(0, 0.0, 1))
        report(kit, model, measured(actor, observation(policy.spec, 1), kit))


def measured(actor: Actor, obs: Observation, kit: Kit) -> dict[str, NDArray[np.float64]]:
    """Milliseconds of each phase, and counts of what may have interrupted it, by call."""
    zero = torch.zeros(1, dtype=torch.int64)
    act = partial(actor.act, episodes=Episodes(zero, zero, zero), step=zero)
    for _ in range(WARMUP):
        act(actor.prepare(obs))
    rows: list[tuple[float, ...]] = []
    end = time.perf_counter() + kit.seconds
    with collections() as pauses:
        while len(rows) < 2 or time.perf_counter() < end:
            before = len(pauses)
            switched = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
            began = time.perf_counter()
            inputs = actor.prepare(obs)
            synchronise(kit.device)
            ready = time.perf_counter()
            with device_time(kit.device) as computed:
                act(inputs)
            rest = 1e3 * (time.perf_counter() - ready)
            switched = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - switched
            collected = 1e3 * sum(pauses[before:])
            rows.append((1e3 * (ready - began), rest, computed[0], collected, switched))
    preparation, rest, computing, collecting, switches = np.array(rows).T
    phases = (preparation, np.maximum(rest - computing, 0), computing)
    return dict(zip(PHASES, phases, strict=True)) | {
        "garbage collection": collecting,
        "switches to other threads": switches,
    }


@contextmanager
def collections() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each garbage collection in the context."""
    pauses: list[float] = []
    began = 0.0

    def hear(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - began)

    gc.callbacks.append(hear)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(hear)


@contextmanager
def device_time(device: torch.device) -> Iterator[list[float]]:
    """Yield a list that gets the milliseconds between the context's first and last work on a GPU.

    It is 0 on a CPU, where nothing is launched.
    """
    found = [0.0]
    if not computes_on_cuda(device):
        yield found
        return
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    yield found
    last.record()
    last.synchronize()
    found[0] = first.elapsed_time(last)


def report(kit: Kit, model: str, calls: dict[str, NDArray[np.float64]]) -> None:
    total = np.sum([calls[phase] for phase in PHASES], axis=0)
    slow = total >= np.quantile(total, 1 - SLOWEST)
    kit.add(f"{model}, {len(total)} calls: p50, p99, p99.9", quantiles(total))
    for phase in PHASES:
        kit.add(f"{model}, {phase}: p50, p99, p99.9", quantiles(calls[phase]))
    for name, values in calls.items():
        unit = "" if name.startswith("switches") else " ms"
        most, typical = values[slow].mean(), values[~slow].mean()
        kit.add(
            f"{model}, {name}: mean of the slowest hundredth of calls, and of the others",
            f"{most:.2f}{unit}, {typical:.2f}{unit}",
        )


def quantiles(values: NDArray[np.float64]) -> str:
    return ", ".join(f"{np.quantile(values, share):.2f} ms" for share in (0.5, 0.99, 0.999))

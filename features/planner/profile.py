"""Cost profile of one type of device: seconds (fixed + per item) and bytes, stored as JSON.

CPU costs are core-seconds as counted by the operating system: other load on the machine stretches
wall-clock seconds, but hardly these. GPU costs are seconds of GPU time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import parse_json, write_json

CPU, GPU = "cpu", "gpu"
POLICY = (
    "act",
    "value",
    "encode",
    "merge",
    "reference",
    "precompute",
    "update",
    "optimise",
    "publish",
)
SIMULATOR = ("simulate", "reset")
OPERATIONS = (*POLICY, *SIMULATOR, "reward")
"""Items are policy calls for act, value, encode, reference, precompute, reward, update (forward and
backward pass of a micro-batch), and environments of one simulator process for simulate (one chunk)
and reset. merge (adapters, once per rollout), optimise (one step) and publish (copying the trained
weights, once on either side) have a fixed cost only."""


@dataclass(frozen=True)
class Cost:
    """Cost of one operation, linear in its number of items."""

    fixed: float = 0.0
    per_item: float = 0.0
    cores: float = 1.0
    """Cores that one operation keeps busy if it runs on a CPU."""
    on: str = CPU
    least: float = 0.0
    """Cost of a call of any size at least."""

    def of(self, items: float) -> float:
        return max(self.least, self.fixed + self.per_item * items) if items else 0.0

    def times(self, factor: float) -> Cost:
        return replace(
            self,
            fixed=factor * self.fixed,
            per_item=factor * self.per_item,
            least=factor * self.least,
        )


def fit(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Fit non-negative (fixed, per item) costs with the least squared relative errors.

    Relative errors keep noise at large sizes from drowning small ones. One size: (0, per item).
    """
    costs = [max(cost, 1e-12) for cost in costs]
    rows = torch.tensor(
        [[1 / cost, size / cost] for size, cost in zip(sizes, costs, strict=True)],
        dtype=torch.float64,
    )
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    fits: list[tuple[float, float, float]] = []
    for columns in ([1], [0], [0, 1]):
        part = torch.zeros(2, 1, dtype=torch.float64)
        part[columns] = torch.linalg.lstsq(rows[:, columns], ones).solution
        if bool((part >= 0).all()):
            fits.append(
                (
                    round(float((rows @ part - ones).square().sum()), 12),
                    float(part[0]),
                    float(part[1]),
                )
            )
    _, fixed, per_item = min(fits, key=lambda candidate: candidate[0])
    return fixed, per_item


@dataclass(frozen=True)
class Bytes:
    """Memory needs of the measured policy and simulator, in bytes."""

    weights: float = 0.0
    """All weights of the policy."""
    trained: float = 0.0
    """Trained weights."""
    low: float = 0.0
    """Trained bfloat16 weights, which are part of ``trained``: they have float32 masters."""
    activations: float = 0.0
    """Memory that autograd keeps per policy call of a micro-batch."""
    call: float = 0.0
    """One policy call in a trajectory."""
    inputs: float = 0.0
    """Prepared inputs of one policy call."""
    features: float = 0.0
    """Backbone output for the action head, per policy call; 0: the policy cannot be split."""
    head: float = 0.0
    """Weights of the action head if the policy can be split."""
    process: float = 0.0
    """Resident memory of one simulator process."""

    @property
    def gradients(self) -> float:
        """Gradients take as much as their weights, in float32."""
        return self.trained + self.low

    @property
    def moments(self) -> float:
        """Adam's two moments, and masters."""
        return 2 * self.gradients + 2 * self.low


@dataclass(frozen=True)
class Profile:
    device: str
    """Device type, as given by the nodes of a cluster."""
    cores: int
    """CPU cores of the measured machine."""
    operations: dict[str, Cost]
    bytes: Bytes
    chunk: int
    episode_limit: int
    """Time limit of an episode in control steps."""
    episodes: tuple[tuple[int, bool], ...] = ()
    """(policy calls, cut off by time limit) of measured episodes; empty: all reach the limit."""
    crowding: float = 0.0
    """Relative increase in core-seconds of the same work when all cores are busy instead of one."""
    inline: bool = False
    """The simulator runs in the policy's process, so that only one of the two works at a time."""
    rounded: bool = False
    """Products are less exact than in float32, for which updates compute the first
    log-probabilities again (``algorithm.recompute_log_prob``)."""
    bus: float = 0.0
    """Bytes per second of an all-reduce in one machine; 0: as the node's ``gpu_link_gbps``."""
    note: str = ""
    """Where and on what the profile was measured, or what was assumed."""
    assumed: bool = False
    """Predicted from published numbers (``planner/published.py``)."""

    def cost(self, operation: str) -> Cost:
        return self.operations.get(operation, Cost())

    def crowded(self, busy: float, cores: float) -> float:
        """Slowdown factor of work on one core while ``busy`` of ``cores`` are busy."""
        return (
            1.0 + self.crowding * (min(busy, cores) - 1) / (cores - 1)
            if busy > 1 and cores > 1
            else 1.0
        )

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def of(document: Any) -> Profile:
        """Return the profile whose ``asdict`` is ``document``. Raises UserError if it is none."""
        try:
            nodes = {name: Cost(**cost) for name, cost in document["operations"].items()}
            fields = {**document, "operations": nodes, "bytes": Bytes(**document["bytes"])}
            profile = Profile(
                **{
                    **fields,
                    "episodes": tuple(
                        (int(calls), bool(cut)) for calls, cut in document["episodes"]
                    ),
                }
            )
            numbers = [
                value
                for cost in nodes.values()
                for value in (cost.fixed, cost.per_item, cost.cores, cost.least)
            ]
            numbers += [
                *asdict(profile.bytes).values(),
                profile.crowding,
                profile.bus,
                profile.cores,
                profile.chunk,
                profile.episode_limit,
            ]
            numbers += [calls for calls, _ in profile.episodes]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(f"not a profile's document: {type(error).__name__}: {error}") from None
        unknown = sorted(set(nodes) - set(OPERATIONS))
        if unknown:
            raise UserError(f"{unknown[0]} is no operation of a profile ({', '.join(OPERATIONS)})")
        if not all(
            isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
            for value in numbers
        ):
            raise UserError("every number of a profile is finite and at least 0")
        if (
            min(
                profile.cores,
                profile.chunk,
                profile.episode_limit,
                *(cost.cores for cost in nodes.values()),
            )
            <= 0
        ):
            raise UserError("cores, chunk and episode_limit of a profile are more than 0")
        if {cost.on for cost in nodes.values()} - {CPU, GPU}:
            raise UserError("an operation of a profile runs on cpu or gpu")
        return profile


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises UserError if the file cannot be read or holds no profile."""
    try:
        return Profile.of(parse_json(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"profile {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"profile {path} is not JSON ({error})") from None
    except UserError as error:
        raise UserError(f"profile {path}: {error}") from None

"""What operations cost on one type of device: seconds as fixed + per item, and bytes; measured, fitted, kept as JSON.

Costs of what runs on a CPU are core-seconds, as the operating system counts them: a busy neighbour stretches a clock's seconds, hardly
these. Costs on a GPU are its seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.flow.planning.plan import read_json
from rlinf_vla.types import UserError

CPU, GPU = "cpu", "gpu"
POLICY = ("act", "value", "encode", "merge", "reference", "fix", "update", "optimise", "publish")
SIMULATOR = ("simulate", "reset")
OPERATIONS = (*POLICY, *SIMULATOR, "reward")
"""Items: of act, value, encode, reference, fix, reward and of a micro-batch's update (forward and backward) policy calls; of simulate
(a chunk) and reset environments, in one simulator process. merge (adapters, once per rollout), optimise (a step) and publish (copying what
trains, once on either side) have a fixed cost alone."""


@dataclass(frozen=True)
class Cost:
    fixed: float = 0.0
    per_item: float = 0.0
    cores: float = 1.0
    """That one such operation keeps busy, where it runs on a CPU."""
    on: str = CPU

    def of(self, items: float) -> float:
        return self.fixed + self.per_item * items if items else 0.0

    def times(self, factor: float) -> Cost:
        return replace(self, fixed=factor * self.fixed, per_item=factor * self.per_item)


def fit(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """(fixed, per item), neither negative, with the least squared relative errors: a large size's noise must not drown a small one's.

    Of one size alone: (0, per item).
    """
    costs = [max(cost, 1e-12) for cost in costs]
    rows = torch.tensor([[1 / cost, size / cost] for size, cost in zip(sizes, costs, strict=True)], dtype=torch.float64)
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    found: list[tuple[float, float, float]] = []
    for columns in ([1], [0], [0, 1]):
        part = torch.zeros(2, 1, dtype=torch.float64)
        part[columns] = torch.linalg.lstsq(rows[:, columns], ones).solution
        if bool((part >= 0).all()):
            found.append((round(float((rows @ part - ones).square().sum()), 12), float(part[0]), float(part[1])))
    _, fixed, per_item = min(found, key=lambda each: each[0])
    return fixed, per_item


@dataclass(frozen=True)
class Bytes:
    """Of the measured policy and simulator."""

    weights: float = 0.0
    """All of the policy's."""
    trained: float = 0.0
    """Of those that train; gradients take as much again, Adam's moments twice."""
    activations: float = 0.0
    """That autograd keeps, per policy call of a micro-batch."""
    call: float = 0.0
    """Of one policy call in a trajectory."""
    inputs: float = 0.0
    """Of one policy call's prepared inputs."""
    features: float = 0.0
    """Of what an action head needs of the backbone, per policy call; 0: the policy does not split."""
    head: float = 0.0
    """Of the weights of an action head, where the policy splits."""
    process: float = 0.0
    """Resident in one simulator process."""


@dataclass(frozen=True)
class Profile:
    device: str
    """Type of device, by which a cluster's node says what it is."""
    cores: int
    """Of the machine that it was measured on."""
    operations: dict[str, Cost]
    bytes: Bytes
    chunk: int
    episode_limit: int
    """Control steps."""
    episodes: tuple[tuple[int, bool], ...] = ()
    """Policy calls of measured episodes, and whether each was cut off by its time limit; empty: all last for it."""
    crowding: float = 0.0
    """By what share the same work takes more core-seconds while all cores are busy than while one is."""
    inline: bool = False
    """The simulator runs in the policy's own process, so that neither works while the other does."""
    note: str = ""
    """Where and of what it was measured, or what was assumed."""
    assumed: bool = False

    def cost(self, operation: str) -> Cost:
        return self.operations.get(operation, Cost())

    def crowded(self, busy: float, cores: float) -> float:
        """By what factor work on one of ``busy`` cores of ``cores`` is slower than alone."""
        return 1.0 + self.crowding * (min(busy, cores) - 1) / (cores - 1) if busy > 1 and cores > 1 else 1.0

    def scaled(self, factor: float, device: str) -> Profile:
        """What ``device`` would be, if it did the policy's part ``factor`` times as fast as was measured; simulators stay as they are."""
        operations = {
            name: replace(cost.times(1 / factor), on=GPU, cores=1.0) if name in POLICY else cost for name, cost in self.operations.items()
        }
        note = f"ASSUMED, not measured: the policy {factor:g} times as fast as {self.note}"
        return replace(self, device=device, operations=operations, note=note, assumed=True)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def of(document: Any) -> Profile:
        """Raises UserError where this is no profile's document."""
        try:
            nodes = {name: Cost(**cost) for name, cost in document["operations"].items()}
            given = {**document, "operations": nodes, "bytes": Bytes(**document["bytes"])}
            profile = Profile(**{**given, "episodes": tuple((int(calls), bool(cut)) for calls, cut in document["episodes"])})
            numbers = [value for cost in nodes.values() for value in (cost.fixed, cost.per_item, cost.cores)]
            numbers += [*asdict(profile.bytes).values(), profile.crowding, profile.cores, profile.chunk, profile.episode_limit]
            numbers += [calls for calls, _ in profile.episodes]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(f"not a profile's document: {type(error).__name__}: {error}") from None
        unknown = sorted(set(nodes) - set(OPERATIONS))
        if unknown:
            raise UserError(f"{unknown[0]} is no operation of a profile ({', '.join(OPERATIONS)})")
        if not all(isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 for value in numbers):
            raise UserError("every number of a profile is finite and at least 0")
        if min(profile.cores, profile.chunk, profile.episode_limit, *(cost.cores for cost in nodes.values())) <= 0:
            raise UserError("cores, chunk and episode_limit of a profile are more than 0")
        if {cost.on for cost in nodes.values()} - {CPU, GPU}:
            raise UserError("an operation of a profile runs on cpu or gpu")
        return profile


def read_profile(path: Path) -> Profile:
    """Raises UserError."""
    try:
        return Profile.of(read_json(path, "profile"))
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"profile {path}: {error}") from None

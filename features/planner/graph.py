"""Build the graph of an algorithm's macro flow by tracing one iteration on synthetic data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.algorithms.value import Returns
from rlinf_vla.core.types import Episodes, Rollouts, Trajectory

ROLLOUT = "rollout"
REWARD = "reward"
REFERENCE = "reference"
TRAINER = "trainer"
STREAM, BARRIER = "stream", "barrier"

_ROLES = dict.fromkeys(
    (
        "collect",
        "collect_groups",
        "collect_transitions",
        "visit",
        "correct",
        "demonstrate",
        "label",
        "returns",
    ),
    ROLLOUT,
)
_ROLES |= {"score": REWARD, "reference": REFERENCE}
_ROLES |= dict.fromkeys(("update", "update_from_replay", "fit", "aggregate", "publish"), TRAINER)
_ONCE = ("demonstrate", "label", "returns")
_SOURCE = "source"
"""Input of a synthetic trajectory that holds the index of the operation that made it.

Algorithms pass inputs along unchanged."""
_SHARDS = 3
_CALLS = 4
_ENVIRONMENTS = 2
_EPISODES = 64


@dataclass(frozen=True)
class Operation:
    """An operation of a macro flow and the role that runs it."""

    name: str
    role: str
    once: bool = False
    """Whether it runs in the first iteration of a run only."""


@dataclass(frozen=True)
class Edge:
    """Data dependency of ``target`` on ``source``.

    ``kind``: stream if ``target`` begins on the first shard; barrier if it waits for all of them.
    ``lag``: number of iterations by which ``target`` is later.
    """

    source: str
    target: str
    kind: str
    lag: int = 0


@dataclass(frozen=True)
class Graph:
    """Macro flow of the algorithm ``name``: its operations and their data dependencies."""

    name: str
    operations: tuple[Operation, ...]
    edges: tuple[Edge, ...]

    def __contains__(self, operation: str) -> bool:
        return any(each.name == operation for each in self.operations)

    @property
    def lag(self) -> int:
        """Iterations from an update to the rollout with its weights: 1, or more with staleness."""
        return max((edge.lag for edge in self.edges if edge.source == "publish"), default=1)

    def streams_into(self, target: str) -> bool:
        """Whether ``target`` may begin before all of its input is available."""
        return any(edge.target == target and edge.kind == STREAM for edge in self.edges)

    def render(self) -> str:
        """One line per operation: its role and successors; ``~>`` streams, ``=>`` waits for all."""
        width, role = (
            max(len(getattr(node, key)) for node in self.operations) for key in ("name", "role")
        )
        lines = []
        for operation in self.operations:
            onward = [
                f"{'~>' if edge.kind == STREAM else '=>'} {edge.target}{_later(edge.lag)}"
                for edge in self.edges
                if edge.source == operation.name
            ]
            once = "  (once)" if operation.once else ""
            lines.append(
                f"  {operation.name:{width}}  {operation.role:{role}}  {', '.join(onward)}{once}".rstrip()
            )
        return "\n".join([f"macro flow of {self.name} (~> streams, => waits for all):", *lines])


def _later(lag: int) -> str:
    return "" if not lag else " of the next iteration" if lag == 1 else f" {lag} iterations later"


def trace(algorithm: Any) -> Graph:
    """Return the graph of ``algorithm.iteration``, of one after a phase without rollouts.

    Data that passes through a replay buffer or a dataset counts as input of the next operation.
    """
    tracer = _Tracer()
    tracer.iteration = getattr(algorithm.config, "offline_iterations", 0)
    algorithm.iteration(tracer)
    first = next(operation for operation in tracer.operations if not operation.once)
    edges = list(tracer.edges)
    if "publish" in tracer.names:
        edges.append(
            Edge("publish", first.name, BARRIER, 1 + getattr(algorithm.config, "staleness", 0))
        )
    return Graph(algorithm.config.name, tuple(tracer.operations), tuple(edges))


class _Tracer:
    """Macro flow with every operation, each of which only records where its input came from."""

    iteration = 0

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.edges: list[Edge] = []
        self._open: dict[str, int] = {}
        self._loose: list[str] = []

    @property
    def names(self) -> list[str]:
        return [operation.name for operation in self.operations]

    # on-policy

    def collect(self, horizon: int) -> Rollouts:
        return self._stream(
            "collect", (_made_up(index, (_CALLS, _ENVIRONMENTS)) for index in range(_SHARDS))
        )

    def collect_groups(self, groups: int, attempts: int, draw: int) -> Rollouts:
        shards = (_made_up(draw * groups + index, (attempts * _CALLS,)) for index in range(groups))
        return self._stream("collect_groups", shards)

    def score(self, rollouts: Rollouts) -> Rollouts:
        return self._stream("score", rollouts)

    def reference(self, rollouts: Rollouts) -> Rollouts:
        return self._stream("reference", rollouts, reference=True)

    def update(self, batch: Any, algorithm: Any, value_only: bool = False) -> bool:
        self._note("update")
        self._joined(batch.calls, "update")
        self._loose.append("update")
        return False

    # other algorithms

    def demonstrate(self, config: Any, augmented: bool = False) -> Demonstrations:
        self._sequel("demonstrate")
        return Demonstrations({}, torch.zeros(_EPISODES, 1, 1), torch.arange(_EPISODES))

    def label(self, config: Any) -> Frames:
        self._sequel("label")
        number = torch.arange(_EPISODES)
        return Frames({}, number % 2 == 0, number // 4)

    def returns(self, config: Any, failure: float) -> tuple[Returns, dict[str, int]]:
        self._sequel("returns")
        number = torch.arange(_EPISODES)
        return Returns({}, -torch.ones(_EPISODES), number), {}

    def collect_transitions(self, episodes: Episodes) -> int:
        self._note("collect_transitions")
        self._loose.append("collect_transitions")
        return len(episodes)

    def visit(self, episodes: Episodes, beta: float | None) -> None:
        self._note("visit")
        self._loose.append("visit")

    def training_episodes(self, count: int, draw: int) -> Episodes:
        return Episodes.first_attempts(torch.zeros(count, dtype=torch.int64), torch.arange(count))

    def update_from_replay(self, updates: int, algorithm: Any) -> None:
        self._sequel("update_from_replay")

    def fit(self, batch: Any, rate: float) -> None:
        self._sequel("fit")

    def correct(self, episodes: int) -> Demonstrations:
        self._sequel("correct")
        return Demonstrations({}, torch.zeros(_EPISODES, 1, 1), torch.arange(_EPISODES))

    def aggregate(self, batches: Any) -> None:
        self._sequel("aggregate")

    def publish(self) -> None:
        self._sequel("publish")

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def log(self, metrics: dict[str, float]) -> None: ...

    # recording

    def _note(self, name: str) -> None:
        if name not in self.names:
            self.operations.append(Operation(name, _ROLES[name], name in _ONCE))

    def _edge(self, source: str, target: str, kind: str) -> None:
        if not any((edge.source, edge.target) == (source, target) for edge in self.edges):
            self.edges.append(Edge(source, target, kind))

    def _sequel(self, name: str) -> None:
        """Record ``name`` as the successor of all operations that have none yet."""
        self._note(name)
        for source in self._loose:
            self._edge(source, name, BARRIER)
        self._loose = [name]

    def _joined(self, calls: Trajectory, target: str) -> None:
        """Record edges to ``target``: a stream if its source has more after the first shard."""
        for index in calls.inputs[_SOURCE].unique().tolist():
            source = self.names[index]
            self._edge(source, target, STREAM if self._open[source] else BARRIER)

    def _stream(self, name: str, shards: Rollouts, reference: bool = False) -> Iterator[Trajectory]:
        self._note(name)
        self._open[name] = self._open.get(name, 0) + 1
        return self._passed_on(name, shards, reference)

    def _passed_on(self, name: str, shards: Rollouts, reference: bool) -> Iterator[Trajectory]:
        iterator = iter(shards)
        shard = next(iterator, None)
        while shard is not None:
            if _SOURCE in shard.inputs:
                self._joined(shard, name)
            following = next(iterator, None)
            if following is None:
                self._open[name] -= 1
            changes: dict[str, Any] = {
                "inputs": {_SOURCE: torch.full_like(shard.seed, self.names.index(name))}
            }
            if reference:
                changes["reference"] = shard.log_prob
            yield replace(shard, **changes)
            shard = following


def _made_up(number: int, shape: tuple[int, ...]) -> Trajectory:
    """Synthetic ``[T, B]`` calls, or ``[N]`` calls of one episode in several attempts.

    Outcomes differ between attempts, so that an update has something to learn from.
    """
    random = torch.Generator().manual_seed(number)
    steps = (*shape, 1)
    false = torch.zeros(steps, dtype=torch.bool)
    zeros = torch.zeros(shape, dtype=torch.int64)
    call = torch.arange(shape[0]) % _CALLS
    attempt: Tensor = torch.arange(shape[0]) // _CALLS if len(shape) == 1 else zeros
    step = call if len(shape) == 1 else call[:, None].expand(shape)
    last = (step == _CALLS - 1)[..., None]
    return Trajectory(
        inputs={},
        latent={},
        log_prob=torch.randn((*shape, 1, 1), generator=random),
        value=torch.randn(shape, generator=random),
        bootstrap_value=torch.zeros(shape),
        cut=zeros.bool(),
        reward=torch.randn(steps, generator=random),
        terminated=last,
        truncated=false,
        success=last & (attempt[..., None] % 2 == 0),
        valid=~false,
        task_id=zeros,
        seed=zeros + number,
        attempt=attempt,
        step=step.clone(),
        policy_version=zeros,
        cost=torch.zeros(steps),
    )

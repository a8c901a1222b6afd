"""A handle to the trainer ranks of a cluster."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.runtime.base import Restart
from rlinf_vla.runtime.ray.notices import leaving_nodes
from rlinf_vla.runtime.ray.pool import HEALTH, Pool, WorkerLate, WorkerLost, wait
from rlinf_vla.runtime.ray.process_group import located, not_formed
from rlinf_vla.runtime.workers.base import Progress, WorkerInfo
from rlinf_vla.runtime.workers.shards import Packed

if TYPE_CHECKING:
    from rlinf_vla.runtime.ray.publisher import Publisher


class TrainerLost(Restart, RuntimeError):
    """A trainer rank was lost; its state exists only in the last complete checkpoint."""


class Trainers:
    """All trainer ranks; each call goes to all of them."""

    def __init__(self, actors: Sequence[Any], cluster: ClusterConfig) -> None:
        self._order = threading.Lock()
        patience = cluster.start_timeout_s
        self.actors = actors
        self._patience = replace(cluster, heartbeat_s=patience, call_timeout_s=patience)
        if len(actors) > 1:
            self._form_group(cluster)
        introduced = self.call("ready")
        self.worker_info: WorkerInfo = introduced[0][0]
        self._nodes = {info.node_id for (info,) in introduced}
        self._patience = cluster

    def _form_group(self, cluster: ClusterConfig) -> None:
        """Let the ranks form their process group. Raises UserError if it does not form."""
        addresses = [where["node"] for (where,) in self.call("where")]
        first = self.actors[0]
        (meeting_point,) = wait(first, [first.meeting_point.remote()], self._patience, "trainer 0")
        limit_s = cluster.start_timeout_s + cluster.heartbeat_s  # ranks that miss one say it first
        patience = self._patience
        self._patience = replace(patience, call_timeout_s=limit_s)
        try:
            self.call("join", meeting_point, len(self.actors))
        except TrainerLost as loss:
            if not isinstance(loss.__cause__, WorkerLate):
                raise
            why = f"{located(addresses)} did not connect within {limit_s:g} s (cluster.start_timeout_s)"
            raise not_formed(why, cluster) from None
        self._patience = patience

    def will_leave(self) -> bool:
        """Return whether the machine of a rank was told to leave the cluster."""
        return not self._nodes.isdisjoint(leaving_nodes())

    def call(self, method: str, *arguments: Any, returns: int = 1) -> list[list[Any]]:
        """Call ``method`` on all ranks; return each rank's references, the first as a value.

        Raises TrainerLost.
        """
        import ray

        with (
            self._order
        ):  # several threads call, and collectives need the same order of calls on all ranks
            refs = [
                getattr(actor, method).options(num_returns=returns).remote(*arguments)
                for actor in self.actors
            ]
        refs = refs if returns > 1 else [[ref] for ref in refs]
        waiting = {rank: rank_refs[0] for rank, rank_refs in enumerate(refs)}
        results = dict[int, list[Any]]()
        try:
            while (
                waiting
            ):  # for the rank that is ready first, because the others wait for one that was lost
                ready = ray.wait(list(waiting.values()), timeout=0)[0]
                rank = next((rank for rank, ref in waiting.items() if ref in ready), min(waiting))
                ref = waiting.pop(rank)
                values = wait(
                    self.actors[rank],
                    [ref],
                    self._patience,
                    f"trainer {rank}",
                    list(waiting.values()),
                )
                if values:
                    results[rank] = [*values, *refs[rank][1:]]
                else:
                    waiting[rank] = ref
            return [results[rank] for rank in range(len(refs))]
        except WorkerLost as loss:
            raise TrainerLost(str(loss)) from loss
        except Exception as error:
            lost = self._lost()
            if lost is None:
                raise
            raise TrainerLost(lost) from error  # the other ranks only failed to reach it

    def put(self, value: Any) -> Any:
        """Return a reference to ``value`` for calls: it is sent to each machine once."""
        import ray

        return ray.put(value)

    def heard(self, progress: Progress) -> AbstractContextManager[None]:
        """Within the context, a trainer of this process tells its progress; an actor cannot."""
        return nullcontext()

    def publisher(self, rollouts: Pool, split: bool = False, staleness: int = 0) -> Publisher:
        """Return what sends versions of the weights to the rollout workers."""
        from rlinf_vla.runtime.ray.publisher import Publisher

        return Publisher(rollouts, self, split, staleness)

    def restore(self, checkpoint: Path | None) -> dict[str, Any]:
        """Load a checkpoint, if there is one; return its state. Raises UserError, TrainerLost."""
        state: dict[str, Any] = (
            self.call("restore", checkpoint)[0][0] if checkpoint is not None else {}
        )
        return state

    def save(
        self,
        directory: Path,
        state: dict[str, Any],
        keep: int,
        earlier_weights: Mapping[int, Packed] = MappingProxyType({}),
    ) -> None:
        """Write a checkpoint on the first rank's machine. Raises TrainerLost."""
        self.call("save", directory, state, keep, dict(earlier_weights))

    def _lost(self) -> str | None:
        if len(self.actors) == 1:
            return None
        for rank, actor in enumerate(self.actors):
            try:
                wait(
                    actor,
                    [actor.ping.options(concurrency_group=HEALTH).remote()],
                    self._patience,
                    f"trainer {rank}",
                )
            except WorkerLost as loss:
                return str(loss)
        return None

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)

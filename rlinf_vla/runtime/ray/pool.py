"""Pool of Ray actors of one role, which replaces lost actors and repeats their work on others.

ray is imported on first use, because reading a recipe must not take seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.ray.notices import leaving_nodes
from rlinf_vla.runtime.ray.turns import Turns
from rlinf_vla.runtime.workers.base import Progress, ShardLost

HEALTH, WEIGHTS = "health", "weights"
"""Concurrency groups in which an actor answers ``ping`` and moves weights while it works."""
_LOOK = 0.2
"""Seconds between checks whether the run is to end."""


class WorkerLost(Exception):
    """A worker died or did not answer in time, or one of another role that it asked."""


class WorkerLate(WorkerLost):
    """A worker answers, but its call took too long."""


def wait(
    actor: Any, refs: Sequence[Any], cluster: ClusterConfig, what: str, unless: Sequence[Any] = ()
) -> list[Any]:
    """Return the values of ``refs``, which ``actor`` computes within the times of ``cluster``.

    Returns nothing as soon as one of ``unless`` is ready before them. Raises WorkerLost, ShardLost,
    or the error of the work itself.
    """
    import ray
    from ray import exceptions

    deadline = time.monotonic() + cluster.call_timeout_s
    pending: Any = None
    asked = time.monotonic()
    refs = list(refs)
    try:
        while True:
            ready, _ = ray.wait(
                refs, num_returns=len(refs), timeout=cluster.heartbeat_s / 4, fetch_local=False
            )
            if len(ready) == len(refs):
                return list(ray.get(refs, timeout=cluster.heartbeat_s))
            if unless and ray.wait(list(unless), timeout=0)[0]:
                return []
            now = time.monotonic()
            if now > deadline:
                raise WorkerLate(f"{what} took more than {cluster.call_timeout_s:g} s")
            if pending is None or ray.wait([pending], timeout=0)[0]:
                if pending is not None:
                    ray.get(pending)
                pending = actor.ping.options(concurrency_group=HEALTH).remote()
                asked = now
            elif now - asked > cluster.heartbeat_s:
                raise WorkerLost(f"{what} did not answer for {cluster.heartbeat_s:g} s")
    except exceptions.RayTaskError as error:
        raise raised_there(error) from None
    except exceptions.ObjectLostError as error:
        raise ShardLost(f"the input of {what} is lost") from error
    except exceptions.OutOfMemoryError as error:
        raise WorkerLost(f"{what} ran out of memory") from error
    except exceptions.RayError as error:
        raise WorkerLost(f"{what} was lost ({type(error).__name__})") from error


def raised_there(error: Any) -> BaseException:
    """Return the exception behind Ray's RayTaskError; all but UserError get its text as a note."""
    cause: BaseException = error.cause
    if not isinstance(cause, UserError):
        cause.add_note(str(error))
    return cause.with_traceback(None)


def _dismiss(refs: Sequence[Any]) -> None:
    """Look at results that have failed with another one; Ray would print those nobody looked at."""
    import ray
    from ray import exceptions

    for ref in refs:
        with suppress(exceptions.RayError):
            ray.get(ref, timeout=0)


class Pool:
    """``size`` interchangeable workers of one role."""

    inline = False
    """Other calls may be made before one has returned."""

    def __init__(
        self,
        role: str,
        spawn: Callable[[int], Any],
        size: int,
        cluster: ClusterConfig,
        say: Callable[[str], None],
    ) -> None:
        """``spawn(i)``: new actor in place ``i``; ``ready`` initialises and ``ping`` checks it."""
        self.role = role
        self._regular = size
        self.cluster = cluster
        self._spawn = spawn
        self._say = say
        self.faults = 0
        self._told = 0
        self._recovery_s = 0.0
        self.error: BaseException | None = None
        self._turns = Turns()
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._closing = False
        self.introduced: dict[int, Any] = {}
        """Result of ``ready`` of the current worker in each place."""
        self._started: set[int] = set()
        """Places in which a worker was ready once."""
        self._leaving: set[str] = set()
        """Ids of machines that were told to leave, of which some have left."""
        self._leave: dict[int, Callable[[], None]] = {}
        """Place of each additional worker -> what to do when it has left."""
        self._starts: list[threading.Thread] = []  # in which workers start
        self.actors = [spawn(place) for place in range(size)]
        for place, actor in enumerate(self.actors):
            self._start(place, actor, time.monotonic())

    def call(self, method: str, *arguments: Any, returns: int = 1) -> list[Any]:
        """Call ``method`` on a free worker; return references to its results.

        The first result is returned as a value. If the worker is lost, another repeats the call.
        Raises the error of the work itself.
        """
        self._turns.expect(1)
        return self._expected(method, arguments, returns)

    def _expected(self, method: str, arguments: tuple[Any, ...], returns: int = 1) -> list[Any]:
        while True:
            place, actor = self._take(method)
            what = f"{self.role} {place}"
            refs = getattr(actor, method).options(num_returns=returns).remote(*arguments)
            refs = refs if returns > 1 else [refs]
            try:
                results = [*wait(actor, refs[:1], self.cluster, what), *refs[1:]]
            except WorkerLost as loss:
                _dismiss(refs[1:])
                self._turns.expect(1)
                self._replace(place, actor, str(loss), ", its work is repeated")
                continue
            except BaseException:
                _dismiss(refs[1:])
                self._turns.done(place, actor, finished=False)
                raise
            self._turns.done(place, actor)
            return results

    def map(
        self, method: str, works: Sequence[tuple[Any, ...]], progress: Callable[[float], None]
    ) -> list[Any]:
        """Call ``method`` with the arguments of each of ``works``; return the results in order.

        ``progress`` gets the share that is done, several times a second; it may raise.
        """
        executor = ThreadPoolExecutor(max_workers=len(self.actors), thread_name_prefix=self.role)
        self._turns.expect(len(works))
        futures = [executor.submit(self._expected, method, arguments) for arguments in works]
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = wait_for(waiting, timeout=_LOOK, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                progress(1 - len(waiting) / len(futures))
            return [future.result()[0] for future in futures]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            self._turns.expect(-sum(future.cancelled() for future in futures))

    def answering(self, place: int) -> Any:
        """Return the worker in ``place`` for workers of another role, which call it themselves.

        One that does not answer is replaced; one that still starts is returned. Raises the error of
        a worker that cannot start.
        """
        with self._checking:
            if self.error is not None:
                raise self.error
            actor = self.actors[place]
            if place in self.introduced:
                ping = actor.ping.options(concurrency_group=HEALTH).remote()
                try:
                    wait(actor, [ping], self.cluster, f"{self.role} {place}")
                except WorkerLost as loss:
                    self._replace(place, actor, str(loss))
            return self.actors[place]

    def rest(self) -> None:
        """Move idle workers off the GPU, and return when all have left it.

        One that is lost meanwhile is replaced. A replacement takes the GPU while it starts, so it
        is waited for, too. Raises the error of a worker that cannot start.
        """
        resting: dict[int, Any] = {}
        while awake := self._awake(resting):
            if self.error is not None:
                raise self.error
            for place in awake & self.introduced.keys():
                actor = self.actors[place]
                try:
                    wait(actor, [actor.rest.remote()], self.cluster, f"{self.role} {place}")
                except WorkerLost as loss:
                    self._replace(place, actor, str(loss))
                else:
                    resting[place] = actor
            time.sleep(0 if awake <= resting.keys() else _LOOK)

    def _awake(self, resting: Mapping[int, Any]) -> set[int]:
        """Return the places of workers that are not in ``resting``, those that start included."""
        left = set(range(self._regular, len(self.actors))) - self._leave.keys()
        return {
            place
            for place, actor in enumerate(self.actors)
            if place not in left and resting.get(place) is not actor
        }

    def heard(self, progress: Progress) -> AbstractContextManager[None]:
        """Within the context, a worker of this process would tell its progress; an actor cannot."""
        return nullcontext()

    @property
    def size(self) -> int:
        """Number of workers, additional ones included."""
        return len(self.introduced)

    def add(self, spawn: Callable[[int], Any], leave: Callable[[], None]) -> None:
        """Start an additional worker, whose loss is no fault: ``leave`` is called then."""
        place = len(self.actors)
        self._leave[place] = leave
        self.actors.append(spawn(place))
        self._start(place, self.actors[place], time.monotonic())

    @property
    def additional(self) -> int:
        """Number of additional workers, also those that start."""
        return len(self._leave)

    def news(self) -> tuple[int, float]:
        """Workers lost since the last call, and the longest seconds from loss to replacement."""
        lost = self.faults - self._told
        longest = self._recovery_s
        self._told = self.faults
        self._recovery_s = 0.0
        return lost, longest

    def close(self) -> None:
        import ray

        self._closing = True
        for actor in self.actors:
            ray.kill(actor)
        for thread in (
            self._starts
        ):  # after the end of the connection, they would make Ray start another cluster
            thread.join(self.cluster.heartbeat_s)
        while self._leave:  # threads remove workers that leave now
            with suppress(KeyError):
                self._leave.popitem()[1]()

    def _take(self, method: str) -> tuple[int, Any]:
        while True:
            if self.error is not None or self._closing:
                self._turns.expect(-1)
                raise self.error or RuntimeError("the run is ending")
            turn = self._turns.take(method, _LOOK)
            if turn is None:
                continue
            place, actor = turn
            if not self._should_leave(place):
                return place, actor
            self._turns.expect(1)
            self._replace(place, actor, f"{self.role} {place} is on a machine that will leave")

    def _should_leave(self, place: int) -> bool:
        """Whether the worker's machine was told to leave, and that of another worker was not."""
        leaving = leaving_nodes()
        self._leaving.update(leaving)
        present = self.introduced.copy()
        return (
            bool(leaving)
            and present[place].node_id in leaving
            and any(info.node_id not in leaving for info in present.values())
        )

    def _replace(
        self, place: int, actor: Any, reason: str, then: str = "", fault: bool = True
    ) -> None:
        """Start another worker in ``place``; an additional one, or one that was told to leave, is
        no ``fault``."""
        import ray

        began = time.monotonic()
        ray.kill(actor)
        self._turns.forget(place)
        before = self.introduced.pop(place, None)
        if leave := self._leave.pop(place, None):
            if not self._closing:
                self._say(f"{reason}: it leaves{then}")
            leave()
            return
        if fault and (before is None or before.node_id not in self._leaving):
            with self._lock:
                self.faults += 1
                if self.faults > self.cluster.max_restarts:
                    self.error = RuntimeError(
                        f"{self.role} workers were lost {self.faults} times, the last time because {reason}"
                    )
        if self._closing or self.error is not None:
            return
        self._say(f"{reason}: replaced{then}")
        try:
            self.actors[place] = self._spawn(place)
        except Exception as error:  # of a worker of another role, which cannot start
            self.error = error
            return
        self._start(place, self.actors[place], began)

    def _start(self, place: int, actor: Any, began: float) -> None:
        """Initialise a worker in a thread; it is free once it is ready."""
        import ray

        thread = threading.Thread(target=self._until_ready, args=(place, actor, began), daemon=True)
        self._starts.append(thread)
        thread.start()
        if self._closing:
            ray.kill(actor)

    def _ready(self, place: int, actor: Any) -> Any:
        """Return what a worker says when it is ready. A replacement may take as long as there are
        others: its machine may have left, and another one may join. Raises Ray's errors."""
        import ray
        from ray import exceptions

        answer = actor.ready.remote()
        waits = False
        while True:
            try:
                return ray.get(answer, timeout=self.cluster.start_timeout_s)
            except exceptions.GetTimeoutError:
                if place not in self._started or not self.introduced:
                    raise
                if not waits:
                    self._say(
                        f"{self.role} {place} has no place in the cluster yet: the others do its work"
                    )
                waits = True

    def _until_ready(self, place: int, actor: Any, began: float) -> None:
        from ray import exceptions

        what = f"{self.role} {place}"
        try:
            worker_info = self._ready(place, actor)
        except exceptions.RayTaskError as error:
            cause = raised_there(error)
            if isinstance(cause, WorkerLost):  # a worker of another role, which it asked
                self._replace(place, actor, f"{what} cannot start ({cause})")
            else:  # a replacement would fail, too
                self._failed(place, actor, cause)
        except exceptions.GetTimeoutError:
            limit = f"{self.cluster.start_timeout_s:g} s"
            why = f"{what} did not start within {limit}: the cluster has no room for it, or its machine is too slow"
            self._failed(place, actor, RuntimeError(why))
        except exceptions.RayError as error:
            # Ray may have chosen a machine that was told to leave; only the error's text names it
            gone = any(node in str(error) for node in self._leaving.copy())
            self._replace(
                place,
                actor,
                f"{what} was lost while it started ({type(error).__name__})",
                fault=not gone,
            )
        else:
            self.introduced[place] = worker_info
            self._started.add(place)
            if place in self._leave:
                self._say(f"{what} joins at {worker_info.node}")
            elif self.faults:
                self._recovery_s = max(self._recovery_s, time.monotonic() - began)
            self._turns.add(place, actor)

    def _failed(self, place: int, actor: Any, error: BaseException) -> None:
        """Handle a worker that cannot start: an additional one leaves, any other ends the run."""
        if place in self._leave:
            self._replace(place, actor, f"{self.role} {place} cannot start ({error})")
        else:
            self.error = error

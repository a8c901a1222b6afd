"""Ray actors of one role, any of which may die, hang or be taken away: its work is done again by another, and it is replaced.

ray is imported when first used: reading a recipe must not take seconds.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vla.flow.on_ray.worker import HEALTH
from rlinf_vla.types import UserError

_LOOK = 0.2
"""Seconds between looks at whether the run is to end."""


@dataclass(frozen=True)
class Patience:
    """In seconds. heartbeat: without an answer, after which a worker counts as hung; call: for one piece of work; start: for a new worker.

    restarts: of one role in a run, after which the run gives up.
    """

    heartbeat: float = 30.0
    call: float = 3600.0
    start: float = 600.0
    restarts: int = 100


class WorkerLost(Exception):
    """It died, or did not answer in time."""


def wait(actor: Any, refs: Sequence[Any], patience: Patience, what: str) -> list[Any]:
    """The values of ``refs``, which ``actor`` is working on. Raises WorkerLost, ShardLost, or what the work itself raised."""
    import ray
    from ray import exceptions

    deadline = time.monotonic() + patience.call
    pending: Any = None
    asked = time.monotonic()
    refs = list(refs)
    try:
        while True:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=patience.heartbeat / 4, fetch_local=False)
            if len(ready) == len(refs):
                return list(ray.get(refs, timeout=patience.heartbeat))
            now = time.monotonic()
            if now > deadline:
                raise WorkerLost(f"{what} took more than {patience.call:g} s")
            if pending is None or ray.wait([pending], timeout=0)[0]:
                if pending is not None:
                    ray.get(pending)
                pending, asked = actor.ping.options(concurrency_group=HEALTH).remote(), now
            elif now - asked > patience.heartbeat:
                raise WorkerLost(f"{what} did not answer for {patience.heartbeat:g} s")
    except exceptions.RayTaskError as error:
        raise raised_there(error) from None
    except exceptions.ObjectLostError as error:
        raise ShardLost(f"what {what} was to work on is lost") from error
    except exceptions.OutOfMemoryError as error:
        raise WorkerLost(f"{what} ran out of memory") from error
    except exceptions.RayError as error:
        raise WorkerLost(f"{what} was lost ({type(error).__name__})") from error


def raised_there(error: Any) -> BaseException:
    """What a worker raised, from Ray's RayTaskError; unless it is a user's mistake, with a note that says where."""
    cause: BaseException = error.cause
    if not isinstance(cause, UserError):
        cause.add_note(str(error))
    return cause.with_traceback(None)


class ShardLost(Exception):
    """What a worker was to work on is nowhere any more: the machine that held it is gone."""


class Pool:
    """``size`` workers of one role."""

    def __init__(self, role: str, spawn: Callable[[int], Any], size: int, patience: Patience, say: Callable[[str], None]) -> None:
        """``spawn(i)``: a new actor in place ``i``; ``ready`` makes it fit for work, and it answers ``ping``."""
        self.role, self.patience, self._spawn, self._say = role, patience, spawn, say
        self.faults = 0
        self._told, self._recovery_s = 0, 0.0
        self.error: BaseException | None = None
        self._free: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self.introduced: dict[int, Any] = {}
        """What ``ready`` of each place's present worker returned."""
        self.actors = [spawn(place) for place in range(size)]
        for place, actor in enumerate(self.actors):
            self._start(place, actor, time.monotonic())

    def call(self, method: str, *arguments: Any, returns: int = 1) -> list[Any]:
        """References to what ``method`` returned, on whichever worker was free; again on another one while workers are lost.

        The first of them has been read: its value stands in its place. Raises what the work itself raised.
        """
        while True:
            place, actor = self._take()
            what = f"{self.role} {place}"
            try:
                refs = getattr(actor, method).options(num_returns=returns).remote(*arguments)
                refs = refs if returns > 1 else [refs]
                found = [*wait(actor, refs[:1], self.patience, what), *refs[1:]]
            except WorkerLost as loss:
                self._replace(place, actor, str(loss))
                continue
            except BaseException:
                self._free.put((place, actor))
                raise
            self._free.put((place, actor))
            return found

    def news(self) -> tuple[int, float]:
        """Workers lost since this was last asked, and the longest time in seconds from a loss to a stand-in that was ready."""
        lost, longest = self.faults - self._told, self._recovery_s
        self._told, self._recovery_s = self.faults, 0.0
        return lost, longest

    def close(self) -> None:
        import ray

        self._closing = True
        for actor in self.actors:
            ray.kill(actor)

    def _take(self) -> tuple[int, Any]:
        while True:
            if self.error is not None:
                raise self.error
            if self._closing:
                raise RuntimeError("the run is ending")
            try:
                return self._free.get(timeout=_LOOK)
            except queue.Empty:
                continue

    def _replace(self, place: int, actor: Any, reason: str) -> None:
        import ray

        began = time.monotonic()
        ray.kill(actor)
        with self._lock:
            self.faults += 1
            if self.faults > self.patience.restarts:
                self.error = RuntimeError(f"{self.role} workers were lost {self.faults} times, at last because {reason}")
        if self._closing or self.error is not None:
            return
        self._say(f"{reason}: replaced, its work is done again")
        self.introduced.pop(place, None)
        self.actors[place] = self._spawn(place)
        self._start(place, self.actors[place], began)

    def _start(self, place: int, actor: Any, began: float) -> None:
        """It is free once it is ready."""
        threading.Thread(target=self._until_ready, args=(place, actor, began), daemon=True).start()

    def _until_ready(self, place: int, actor: Any, began: float) -> None:
        import ray
        from ray import exceptions

        what = f"{self.role} {place}"
        try:
            introduction = ray.get(actor.ready.remote(), timeout=self.patience.start)
        except exceptions.RayTaskError as error:  # what it is made of is wrong: another one would fare no better
            self.error = raised_there(error)
        except exceptions.GetTimeoutError:
            self.error = RuntimeError(
                f"{what} did not start within {self.patience.start:g} s: the cluster has no room for it, or its machine is too slow"
            )
        except exceptions.RayError as error:
            self._replace(place, actor, f"{what} was lost while it started ({type(error).__name__})")
        else:
            self.introduced[place] = introduction
            if self.faults:
                self._recovery_s = max(self._recovery_s, time.monotonic() - began)
            self._free.put((place, actor))

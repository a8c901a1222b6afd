"""Connect the learner to a robot on another node of a Ray cluster.

An actor there starts the same robot process as on one machine and relays for it. Only text and
bytes are transferred: jobs and answers as JSON, weights and episodes as files. The arm's safety
does not depend on the actor: if it dies or loses the learner, the robot process stops the arm.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import user_dirs
from rlinf_vla.core.io import replacing
from rlinf_vla.features.realworld.client import LocalRobotLink, RobotClient
from rlinf_vla.features.realworld.episode import EVALUATION, Job
from rlinf_vla.features.realworld.process import END_S, WEIGHTS
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.places import Role
from rlinf_vla.runtime.ray.pool import raised_there
from rlinf_vla.runtime.run_directory import EPISODES, LOCK, RECIPE
from rlinf_vla.runtime.workers.base import node_address
from rlinf_vla.telemetry.run_files import CONTROL_FILE

SESSION = ".session"
"""File in a run directory with the run's name at the robot. A resumed run receives the episodes
that were not delivered before."""
POLL_S, SOON_S = 0.2, 10.0
NICE = "RAY_worker_niceness=0"
# by default Ray kills an actor's children with it; ours ends by itself, after writing its data
ORPHANS_LIVE = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}

Files = dict[str, bytes]
Say = Callable[[str], None]


@contextmanager
def robot_on_ray(recipe: Recipe, directory: Path, say: Say) -> Iterator[RobotClient]:
    """Yield a client of the robot process, on a node with the resources of ``cluster.roles.robot``.

    Raises UserError if there is none.
    """
    cluster = recipe.cluster
    role = Role(**vars(cluster.roles.robot), count=1, resource=cluster.ray_resource)
    with (
        connect_cluster(cluster.address, {"robot": role}, say),
        RobotClient(
            directory,
            partial(RayLink, directory, role, cluster, recipe.session.silence_s, say),
            say,
        ) as side,
    ):
        yield side


class RemoteRobotActor:
    """Ray actor that runs the robot process; a lock on the session's folder allows only one."""

    def __init__(self, session: str, recipe: str, silence_s: float, heartbeat_s: float) -> None:
        self._folder = user_dirs.state() / "sessions" / session
        self._episodes = self._folder / EPISODES
        self._episodes.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the process of the previous actor to end
        for path in self._episodes.glob(f"{EVALUATION}_*"):  # of weights that may be outdated
            path.unlink()
        _write(self._folder / RECIPE, recipe.encode())
        self._process = LocalRobotLink(self._folder, silence_s, lock)
        os.close(lock)
        self._had: list[dict[str, Any]] = []
        self._heartbeat = heartbeat_s
        self._called = time.monotonic()
        self._abandoned = False
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def where(self) -> tuple[str, int]:
        """Return the node's name and the nice value of processes there."""
        return f"{socket.gethostname()} ({node_address()})", os.nice(0)

    def give(self, job: str) -> None:
        order = Job(**json.loads(job))
        if (self._episodes / order.file).exists():
            self._had.append({"played": order.file})
        else:
            self._process.give(order)

    def publish(self, weights: bytes) -> None:
        _write(self._folder / WEIGHTS, weights)

    def hear(self) -> tuple[str, Files, str | None]:
        """Return new answers, files of new episodes, and why no more will come (None: alive)."""
        self._called = time.monotonic()
        answers = self._had + self._process.answers(0 if self._had else POLL_S)
        self._had = []
        names = [answer["played"] for answer in answers if "played" in answer]
        lost = self._process.lost()
        if self._abandoned:
            answers = [answer for answer in answers if "left" not in answer]  # ordered by us
            lost = lost and f"it received nothing from the learner for {self._heartbeat:g} s"
        return json.dumps(answers), self._files(names), lost

    def delivered(self, names: list[str]) -> None:
        """Delete these episodes, which are now on the learner's disk."""
        for name in names:
            (self._episodes / name).unlink(missing_ok=True)

    def end(self) -> Files:
        """Stop the arm, end the process, and return the files that were not delivered."""
        self._over.set()
        self._process.end()
        return self._files(path.name for path in self._episodes.glob("[!.]*"))

    def clear(self) -> None:
        shutil.rmtree(self._folder)

    def _files(self, episodes: Iterable[str]) -> Files:
        files = {name: (self._episodes / name).read_bytes() for name in episodes}
        control = self._folder / CONTROL_FILE
        return files | ({CONTROL_FILE: control.read_bytes()} if files and control.exists() else {})

    def _watch(self) -> None:
        """End the process if the learner has not called for ``heartbeat_s``."""
        while time.monotonic() - self._called < self._heartbeat:
            if self._over.wait(POLL_S):
                return
        self._abandoned = True
        self._process.child.channel.hang_up()  # it stops the arm, latches this, saves its data and ends


class RayLink:
    """Implement ``client.RobotLink``. A thread fetches answers, also during updates."""

    def __init__(
        self, directory: Path, role: Role, cluster: ClusterConfig, silence_s: float, say: Say
    ) -> None:
        """Create the actor without waiting. ``cluster`` has the time limits to place it on a node
        and for its answers."""
        import ray

        self._directory = directory
        self._role = role
        self._cluster = cluster
        self._say = say
        remote: Any = ray.remote
        kind = remote(
            max_restarts=0,
            runtime_env=ORPHANS_LIVE,
            label_selector=dict(role.labels),
            **role.options(),
        )(RemoteRobotActor)
        self.actor = kind.remote(
            _session(directory), _recipe(directory, role), silence_s, cluster.heartbeat_s
        )
        """Ray's handle of the RemoteRobotActor."""
        if (directory / WEIGHTS).exists():
            self.publish(directory / WEIGHTS)
        self._heard: queue.SimpleQueue[dict[str, Any] | str | Exception] = queue.SimpleQueue()
        """Answers; the last item is the reason why there are no more, or an exception to raise."""
        self._lost: str | None = None
        self._ending = threading.Event()
        self._reached = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def give(self, job: Job) -> None:
        self.actor.give.remote(json.dumps(asdict(job)))

    def publish(self, weights: Path) -> None:
        self.actor.publish.remote(weights.read_bytes())

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        with suppress(queue.Empty):
            item = self._heard.get(timeout=seconds)
            while isinstance(item, dict):
                answers.append(item)
                item = self._heard.get_nowait()
            if isinstance(item, Exception):
                raise item
            self._lost = item
        return answers

    def lost(self) -> str | None:
        return self._lost

    def end(self) -> None:
        import ray

        self._ending.set()
        if self._reached:
            self._thread.join()
        with suppress(ray.exceptions.RayError):  # undelivered files wait there for the next actor
            if self._reached:
                self._keep(
                    ray.get(self.actor.end.remote(), timeout=END_S + self._cluster.heartbeat_s)
                )
                ray.get(self.actor.clear.remote(), timeout=self._cluster.heartbeat_s)
        ray.kill(self.actor)
        self._thread.join(SOON_S)

    def _listen(self) -> None:
        import ray
        from ray import exceptions

        where = ""
        heartbeat = self._cluster.heartbeat_s
        try:
            where = self._met()
            while not self._ending.is_set():
                answers, files, lost = ray.get(self.actor.hear.remote(), timeout=heartbeat)
                self._keep(files)
                for answer in json.loads(answers):
                    self._heard.put(answer)
                if lost is not None:
                    self._heard.put(f"at {where}: {lost}")
                    return
        except exceptions.RayTaskError as error:
            cause = raised_there(error)
            self._heard.put(cause if isinstance(cause, Exception) else RuntimeError(str(cause)))
        except exceptions.GetTimeoutError:
            self._reached = False
            self._heard.put(f"the robot's node {where} did not answer for {heartbeat:g} s")
        except exceptions.RayError as error:
            why = type(error).__name__ if where else str(error).strip().splitlines()[-1]
            self._reached = False
            self._heard.put(f"the robot actor{where and f' at {where}'} was lost ({why})")
        except Exception as error:
            self._heard.put(error)

    def _met(self) -> str:
        """Wait until a node has room for the actor; return its name. Raises RuntimeError."""
        import ray

        began = time.monotonic()
        asked = self.actor.where.remote()
        requirement = f"a node with {dict(self._role.bundle)} free"
        limit = self._cluster.start_timeout_s
        if not ray.wait([asked], timeout=min(SOON_S, limit))[0]:
            self._say(f"the robot process waits for {requirement}, at most {limit:g} s")
        try:
            where, nice = ray.get(asked, timeout=max(0.0, began + limit - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise RuntimeError(
                f"the robot process did not start within {limit:g} s: the cluster never had {requirement}"
            ) from None
        self._reached = True
        self._say(
            f"the robot process runs at {where}"
            + (f", with nice value {nice}: begin `ray start` there with {NICE}" if nice > 0 else "")
        )
        return str(where)

    def _keep(self, files: Files) -> None:
        """Write the files to the run directory and disk, then let the actor delete its copies."""
        for name, content in files.items():
            folder = self._directory if name == CONTROL_FILE else self._directory / EPISODES
            _write(folder / Path(name).name, content)
        self.actor.delivered.remote(list(files))


def _session(directory: Path) -> str:
    path = directory / SESSION
    if not path.exists():
        _write(path, uuid.uuid4().hex.encode())
    return path.read_text()


def _recipe(directory: Path, role: Role) -> str:
    """Return the saved recipe; a robot process without a GPU computes on the CPU."""
    config = OmegaConf.load(directory / RECIPE)
    if not role.gpus:
        config.cluster.device = "cpu"
    return OmegaConf.to_yaml(config)


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as aside:
        aside.write_bytes(content)

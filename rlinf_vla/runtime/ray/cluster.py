"""Connect to a Ray cluster, or start one on this machine, and reserve places for workers."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlinf_vla.config.cluster import RoleConfig
from rlinf_vla.config.errors import UserError

TRAINER, FEATURE = "trainer", "feature"
_RAYS_OWN = ("CPU", "GPU")
_REACH_S = 5.0
"""Timeout of a connection to the address that the user gave."""


@dataclass(kw_only=True)
class Role(RoleConfig):
    """``count`` workers, with the resources that each of them takes."""

    count: int

    @property
    def bundle(self) -> dict[str, float]:
        wanted = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}

    @property
    def options(self) -> dict[str, Any]:
        """The same resources as options of a Ray actor."""
        own = {name: amount for name, amount in self.bundle.items() if name not in _RAYS_OWN}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": own}


@contextmanager
def connect_cluster(address: str | None, roles: Mapping[str, Role], say: Callable[[str], None]) -> Iterator[None]:
    """Connect to the cluster at ``address``, or start one on this machine if it is None.

    Raises UserError if it does not answer, runs another version, or has no room for ``roles``.
    """
    if address is None:
        _require_token()
    try:
        import ray
        from ray.job_config import JobConfig
    except ImportError:
        raise UserError("cluster.runtime=ray needs Ray: pip install 'rlinf-vla[ray]', or use cluster.runtime=in_process") from None

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # workers are the main work here; Ray's default is 15
    job = JobConfig()
    job._py_driver_sys_path = _Nothing()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "job_config": job}
    if address is None:
        wanted: dict[str, float] = {}
        for role in roles.values():
            wanted = _sum(wanted, {name: amount * role.count for name, amount in role.bundle.items()})
        own = {name: amount for name, amount in wanted.items() if name not in _RAYS_OWN}
        cpus = max(os.cpu_count() or 1, int(-(-wanted.get("CPU", 0.0) // 1)))
        with _hangup_ignored():
            context = ray.init(address="local", num_cpus=cpus, resources=own or None, include_dashboard=_has_dashboard(), **quiet)
    else:
        _reach(address)
        try:
            context = ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"cluster.address={address}: {explain(error)}") from None
    try:
        url = context.dashboard_url
        say(f"Ray {ray.__version__}, {_count(ray.nodes())}" + (f", dashboard http://{url}" if url else ""))
        require_room(ray.nodes(), roles)
        yield
    finally:
        ray.shutdown()


@contextmanager
def reserve_places(roles: Mapping[str, Role], patience_s: float, spread: bool = False) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Reserve places; yield, for each worker of each role, the options of a Ray actor in its place.

    ``spread``: use as many machines as possible rather than as few. Feature workers share places
    with the trainer ranks: the same machine, and the same GPU if each takes a part of it.
    Raises UserError if there is no room within ``patience_s``.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles, labels = list[dict[str, float]](), list[dict[str, str]]()
    where: dict[str, list[int]] = {}
    for name in sorted(roles, key=lambda name: name == FEATURE):
        role, where[name] = roles[name], []
        for number in range(role.count):
            if name == FEATURE:
                shared = where[TRAINER][number % len(where[TRAINER])]
                bundles[shared] = _sum(bundles[shared], role.bundle)
                where[name].append(shared)
            else:
                where[name].append(len(bundles))
                bundles.append(role.bundle or {"CPU": 0.001})
                labels.append(dict(role.labels))
    selectors = {"bundle_label_selector": labels} if any(labels) else {}
    group = placement_group(bundles, strategy="SPREAD" if spread else "PACK", **selectors)
    try:
        ray.get(group.ready(), timeout=patience_s)
    except ray.exceptions.GetTimeoutError:
        raise UserError(f"the cluster had no room within {patience_s:g} s for {_wanted(roles)}: lower cluster.*_workers") from None
    found: dict[str, list[dict[str, Any]]] = {}
    for name, role in roles.items():
        strategies = [PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=each) for each in where[name]]
        found[name] = [role.options | {"scheduling_strategy": strategy} for strategy in strategies]
    try:
        yield found
    finally:
        remove_placement_group(group)


class _Nothing(list[str]):
    """List that stays empty, of the folders that a job's Ray workers import from first.

    Ray adds the driver's current directory, which may contain any code. What workers need is
    installed or on PYTHONPATH."""

    def extend(self, folders: Iterable[str]) -> None:
        """Ignore ``folders``."""


def _require_token() -> None:
    """Require a secret token of this run for access to the Ray cluster that it starts.

    Ray's processes listen on all addresses of the machine and execute what they receive. Ray reads
    these variables when it is imported. A value set by the user is kept.
    """
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


@contextmanager
def _hangup_ignored() -> Iterator[None]:
    """Let processes started here survive SIGHUP, as this one does to write a last checkpoint."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in first.keys() | second.keys()}


def _has_dashboard() -> bool:
    """Whether Ray's dashboard is installed, which comes with ``ray[default]`` only."""
    from importlib.util import find_spec

    return find_spec("aiohttp_cors") is not None


def _reach(address: str) -> None:
    """Raise UserError if nothing listens at ``address``; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cluster.address={address}: nothing answers there ({reason}); is `ray start --head` running?") from None


def explain(error: Exception) -> str:
    import ray

    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        return f"that cluster runs another version of Ray or Python than this process (Ray {ray.__version__}): install the same everywhere"
    if "uthenticat" in text or "token" in text:
        return "that cluster needs another token: set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on the machine that started it"
    return f"{text}; is `ray start --head` running there?"


def require_room(nodes: Sequence[Mapping[str, Any]], roles: Mapping[str, Role]) -> None:
    """Raise UserError at once for roles that can never fit."""
    alive = [node for node in nodes if node["Alive"]]
    for name in sorted({each for role in roles.values() for each in role.bundle}):
        wanted = sum(role.count * role.bundle.get(name, 0.0) for role in roles.values())
        there = sum(node["Resources"].get(name, 0.0) for node in alive)
        if wanted > there:
            fix = "lower cluster.*_workers"
            if name not in _RAYS_OWN:
                fix = f"on the machine that has it, ray start --address=HOST:PORT --resources='{{\"{name}\": {wanted:g}}}'"
            raise UserError(f"the cluster has {there:g} {name}, the plan wants {wanted:g} ({_wanted(roles)}): {fix}")
    for name, role in roles.items():
        fits = [node for node in alive if all(node["Resources"].get(each, 0.0) >= amount for each, amount in role.bundle.items())]
        fits = [node for node in fits if all(node.get("Labels", {}).get(key) == value for key, value in role.labels.items())]
        if role.count and not fits:
            raise UserError(
                f"no node of the cluster can run a {name} worker, which needs {dict(role.bundle)} and labels {dict(role.labels)}"
            )


def _wanted(roles: Mapping[str, Role]) -> str:
    return ", ".join(f"{role.count} {name}" for name, role in roles.items() if role.count)


def _count(nodes: Sequence[Mapping[str, Any]]) -> str:
    alive = [node for node in nodes if node["Alive"]]
    cpus, gpus = (sum(node["Resources"].get(name, 0.0) for node in alive) for name in ("CPU", "GPU"))
    return f"{len(alive)} node{'s' if len(alive) > 1 else ''}, {cpus:g} CPUs, {gpus:g} GPUs"

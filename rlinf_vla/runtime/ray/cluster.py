"""Connect to a Ray cluster, or start one on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.ray.places import RAYS_OWN, Role, bundles_of, require_room, total

_REACH_S = 5.0
"""Timeout of a connection to the address that the user gave."""
NETWORK = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TP_")
"""Prefixes of the variables that choose how the workers connect to each other."""
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LONGEST_SOCKET = 107
logger = logging.getLogger(__name__)


@contextmanager
def connect_cluster(
    address: str | None,
    roles: Mapping[str, Role],
    say: Callable[[str], None],
    fake_gpus: int | None = None,
) -> Iterator[None]:
    """Connect to the cluster at ``address``, or start one on this machine if it is None.

    ``fake_gpus``: GPUs that a cluster started here claims to have; None: those that Ray finds.
    Raises UserError if it does not answer, runs another version, or has no room for ``roles``.
    """
    if address is None:
        _require_short_folder()
        if there := os.environ.get("RAY_ADDRESS"):
            raise UserError(
                f"RAY_ADDRESS={there} is not read: set cluster.address={there} to use that cluster, or unset it"
            )
        _require_token()
    try:
        import ray
        from ray.job_config import JobConfig
    except ImportError:
        raise UserError(
            "cluster.runtime=ray needs Ray: pip install 'rlinf-vla[ray]', or use cluster.runtime=in_process"
        ) from None

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # workers are the main work here; Ray's default is 15
    job = JobConfig()
    job._py_driver_sys_path = _Nothing()
    quiet: dict[str, Any] = {
        "log_to_driver": logger.isEnabledFor(logging.DEBUG),
        "logging_level": "ERROR",
        "job_config": job,
    }
    if address is None:
        resources = total(bundles_of(roles))
        own = {name: amount for name, amount in resources.items() if name not in RAYS_OWN}
        cpus = max(os.cpu_count() or 1, int(-(-resources.get("CPU", 0.0) // 1)))
        with _signals_left_to_us(), _all_visible() if fake_gpus else nullcontext():
            context = ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=fake_gpus,
                resources=own or None,
                include_dashboard=_has_dashboard(),
                **quiet,
            )
    else:
        _reach(address)
        # workers of a cluster that was there before inherit the variables of `ray start`, not ours
        passed = {key: value for key, value in os.environ.items() if key.startswith(NETWORK)}
        if passed:
            say(f"the cluster's workers get {', '.join(sorted(passed))} of this process")
        try:
            context = ray.init(
                address=address, runtime_env={"env_vars": passed} if passed else None, **quiet
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"cluster.address={address}: {explain(error)}") from None
    try:
        url = context.dashboard_url
        say(
            f"Ray {ray.__version__}, {_count(ray.nodes())}"
            + (f", dashboard http://{url}" if url else "")
        )
        require_room(ray.nodes(), roles)
        yield
    finally:
        ray.shutdown()


class _Nothing(list[str]):
    """List that stays empty, of the folders that a job's Ray workers import from first.

    Ray adds the driver's current directory, which may contain any code. What workers need is
    installed or on PYTHONPATH."""

    def extend(self, folders: Iterable[str]) -> None:
        """Ignore ``folders``."""


def _require_short_folder() -> None:
    """Require a folder in which the names of Ray's sockets have at most 107 bytes (``unix(7)``)."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or os.sep
    length = len(os.fsencode(str(Path(folder).absolute()) + _SOCKET))
    if length > _LONGEST_SOCKET:
        most = _LONGEST_SOCKET - len(_SOCKET)
        raise UserError(
            f"TMPDIR={folder} has {length - len(_SOCKET)} characters, for Ray's sockets at most {most}: set RAY_TMPDIR=/tmp"
        )


def _require_token() -> None:
    """Require a secret token of this run for access to the Ray cluster that it starts.

    Ray's processes listen on all addresses of the machine and execute what they receive. Ray reads
    these variables when it is imported. A value set by the user is kept.
    """
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


@contextmanager
def _signals_left_to_us() -> Iterator[None]:
    """Let processes started here survive SIGHUP and SIGTERM, as this one does for a checkpoint.

    Slurm, systemd and a terminal that closes send them to all processes of a job. Ray's processes
    handle SIGTERM, so it is blocked in them; ``ray.shutdown`` ends them after a second anyway.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with _hangup_ignored():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _hangup_ignored() -> Iterator[None]:
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # only the main thread may set signal handlers
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def _all_visible() -> Iterator[None]:
    """Unset CUDA_VISIBLE_DEVICES, in which Ray would look for the GPUs that it is told to claim."""
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


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
        raise UserError(
            f"cluster.address={address}: nothing answers there ({reason}); is `ray start --head` running?"
        ) from None


def explain(error: Exception) -> str:
    import ray

    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        return f"that cluster runs another version of Ray or Python than this process (Ray {ray.__version__}): install the same everywhere"
    if "uthenticat" in text or "token" in text:
        return "that cluster needs another token: set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on the machine that started it"
    return f"{text}; is `ray start --head` running there?"


def _count(nodes: Sequence[Mapping[str, Any]]) -> str:
    alive = [node for node in nodes if node["Alive"]]
    amounts = {name: sum(node["Resources"].get(name, 0.0) for node in alive) for name in RAYS_OWN}
    counts = (f"{amount:g} {name}s" for name, amount in amounts.items() if amount or name != "NPU")
    return ", ".join([f"{len(alive)} node{'s' if len(alive) > 1 else ''}", *counts])

"""Recipe node ``serve``: the policy server (docs/serving.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Annotated

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import OUTSIDE, Count, OneOf, Range, Seconds, Size

OBSERVATIONS = ("native", "libero", "droid")
ROOTS = ("openpi", "vla_eval")
LOCALHOST = "localhost"
_HOST_NAME = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*\.?|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", re.ASCII)


@dataclass
class ServeConfig:
    """The policy server of ``rlinf-vla serve``."""

    host: str = field(default="127.0.0.1", metadata=OUTSIDE)
    """Address to listen on. Any but a loopback address needs ``token_env`` or ``insecure``."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """TCP port; 0: any free one, which the first line of output names."""
    protocol: Annotated[str, OneOf(*ROOTS)] = "openpi"
    """What speaks at the path ``/``; every protocol also has paths of its own."""
    observation: Annotated[str, OneOf(*OBSERVATIONS)] = "native"
    """Keys of openpi's observations: those of openpi's LIBERO or DROID examples, or our own."""
    images: dict[str, str] = field(default_factory=dict)
    """Image of the policy -> key of the observation; empty: as ``observation`` says."""
    state: list[str] = field(default_factory=list)
    """Keys of the observation that make up the state, in order; empty: as ``observation`` says."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """Sampling temperature of requests that name none; 0 is greedy."""
    max_batch_size: Size | None = None
    """Most rows of a policy call, and so of a request; null: rollout.batch_size."""
    max_wait_ms: Annotated[float, Range(0, 1000)] = 2.0
    """Longest wait for requests of other clients that join a policy call. One client alone never
    waits."""
    max_queue: Count = 64
    """Requests that may wait for the policy; more are refused as busy."""
    max_connections: Size = 64
    """Connections that are kept at the same time."""
    max_message_bytes: Annotated[int, Range(1024, 1 << 30)] = 16 << 20
    """Bytes of a message, and of all its arrays once decompressed."""
    handshake_timeout_s: Seconds = 10.0
    """For the head of a request, and for the rest of it. When connections run out, the oldest one
    without a complete request is closed earlier."""
    idle_timeout_s: Seconds = 300.0
    """Close a WebSocket on which neither a message, nor a ping, nor the answer to a ping came for
    this long, or whose client does not read."""
    drain_s: Seconds = 30.0
    """After SIGTERM, finish running requests for at most this long."""
    token_env: str | None = field(default=None, metadata=OUTSIDE)
    """Environment variable that holds the token that clients must send."""
    insecure: bool = field(default=False, metadata=OUTSIDE)
    """Listen on other than loopback addresses without a token."""
    allowed_hosts: list[str] = field(default_factory=list, metadata=OUTSIDE)
    """More host names by which clients ask for the server, such as a proxy's or a container's;
    ``*.NAME`` allows all names below one, ``*`` any name."""
    certificate: str | None = field(default=None, metadata=OUTSIDE)
    """PEM file of the TLS certificate chain; needs ``private_key``."""
    private_key: str | None = field(default=None, metadata=OUTSIDE)
    """PEM file of its key."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to ``host``, as far as its text tells."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == LOCALHOST


def check_serve(config: ServeConfig, token: str | None) -> None:
    """Raise UserError if the settings contradict each other; ``token``: value of ``token_env``."""
    if config.token_env is not None and not token:
        raise UserError(
            f"serve.token_env={config.token_env}: this environment variable is not set: export it with a secret of your choice"
        )
    if not is_loopback(config.host) and token is None and not config.insecure:
        raise UserError(
            f"serve.host={config.host} can be reached from other machines: set serve.token_env=NAME (of an environment variable with a "
            "token), or serve.insecure=true if everyone there may use the policy"
        )
    for name in config.allowed_hosts:
        if name != "*" and not _HOST_NAME.fullmatch(name):
            raise UserError(
                f"serve.allowed_hosts: {name!r} is no host name: write it without scheme, port and path, or *.NAME, or *"
            )
    if (config.certificate is None) != (config.private_key is None):
        raise UserError(
            "serve.certificate and serve.private_key go together: give both, or neither"
        )

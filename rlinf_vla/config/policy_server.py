"""Recipe keys of the address of a policy server: a part of several nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import OUTSIDE, Label, Matches, Range, Seconds

URL = Matches(
    r"wss?://[^\s/?#@]+(/[^\s?#]*)?",
    "ws://HOST:PORT or wss://HOST:PORT, with a path if the server has one",
)


@dataclass
class ServerAddress:
    """Where a policy server is, and how long to wait for it."""

    node: ClassVar[str]
    """Where the recipe has these keys, for messages."""

    url: Annotated[str, URL] | None = field(default=None, metadata=OUTSIDE)
    """Address of the server: ws://HOST:PORT, or wss://HOST:PORT with TLS."""
    timeout_s: Seconds = 60.0
    """Seconds that an answer, or a connection, may take."""
    retries: Annotated[int, Range(0, 100)] = 3
    """Further attempts if the connection is lost or an answer is late; none in a control loop."""
    token_env: Label | None = field(default=None, metadata=OUTSIDE)
    """Environment variable that holds the server's token; null: send none."""
    ca_file: Label | None = field(default=None, metadata=OUTSIDE)
    """Certificates (PEM) to trust for wss://; null: the system's."""

    @property
    def address(self) -> str:
        """The ``url``. Raises UserError if there is none."""
        if self.url is None:
            raise UserError(
                f"{self.node}.url has no value: give the address of a policy server, such as ws://127.0.0.1:8000"
            )
        return self.url


@dataclass
class BackboneConfig(ServerAddress):
    """Recipe node ``rollout.backbone``: the server that runs the backbone of a split policy."""

    node: ClassVar[str] = "rollout.backbone"

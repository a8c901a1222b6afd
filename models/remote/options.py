"""Recipe options of a policy on a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rlinf_vla.config.ranges import OUTSIDE, Label, Matches, OneOf, Range, Seconds, Size, SizeOrZero

OPENPI, VLLM_OMNI, SGLANG = "openpi", "vllm_omni", "sglang"
DIALECTS = (OPENPI, VLLM_OMNI, SGLANG)
NATIVE, LIBERO, DROID, LEROBOT = "native", "libero", "droid", "lerobot"
KEYS = (NATIVE, LIBERO, DROID, LEROBOT)
URL = Matches(r"wss?://[^\s/?#@]+(/[^\s?#]*)?", "ws://HOST:PORT or wss://HOST:PORT, with a path if the server has one")


@dataclass
class RemoteOptions:
    """Recipe node ``model.options``. What our server says of its policy needs no option."""

    lora_targets: ClassVar[tuple[str, ...]] = ()

    url: Annotated[str, URL] | None = field(default=None, metadata=OUTSIDE)
    """Address of the server: ws://HOST:PORT, or wss://HOST:PORT with TLS."""
    dialect: Annotated[str, OneOf(*DIALECTS)] | None = None
    """What the server speaks; null: as the path of the url says, else openpi."""
    keys: Annotated[str, OneOf(*KEYS)] | None = None
    """Names of what a row holds: ``native``, of our server; ``libero`` and ``droid``, of openpi's
    configurations; ``lerobot``: observation.images.CAMERA, observation.state, task. null: native if
    the server is ours, lerobot in the dialect sglang."""
    images: dict[str, Label] = field(default_factory=dict)
    """Camera of the environment -> the server's key for it, for a server that is not ours; empty:
    as ``keys`` says."""
    chunk: Annotated[int, Range(1, 1024)] | None = None
    """Actions to execute of each answer; null: all, which only our server tells in advance."""
    action_dim: Size | None = None
    """Numbers of an action; null: as the server or ``keys`` says."""
    state_dim: SizeOrZero | None = None
    """Numbers of the state; 0: the policy reads none; null: as the server or ``keys`` says."""
    image_size: Size | None = None
    """Side of the images that a foreign server gets, in pixels; null: 224."""
    timeout_s: Seconds = 60.0
    """Seconds that an answer, or a connection, may take."""
    retries: Annotated[int, Range(0, 100)] = 3
    """Further attempts if the connection is lost or an answer is late; none in a control loop."""
    connections: Annotated[int, Range(1, 256)] = 4
    """Rows that a foreign server gets at the same time, each over its own connection."""
    token_env: Label | None = field(default=None, metadata=OUTSIDE)
    """Environment variable that holds the server's token; null: send none."""
    ca_file: Label | None = field(default=None, metadata=OUTSIDE)
    """Certificates (PEM) to trust for wss://; null: the system's."""

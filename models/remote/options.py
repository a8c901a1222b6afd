"""Recipe options of a policy on a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from rlinf_vla.config.policy_server import ServerAddress
from rlinf_vla.config.ranges import Label, OneOf, Range, Size, SizeOrZero

OPENPI, VLLM_OMNI, SGLANG = "openpi", "vllm_omni", "sglang"
DIALECTS = (OPENPI, VLLM_OMNI, SGLANG)
NATIVE = "native"
LIBERO = "libero"
DROID = "droid"
LEROBOT = "lerobot"
KEYS = (NATIVE, LIBERO, DROID, LEROBOT)
PATHS = {"/v1/realtime/robot/openpi": VLLM_OMNI, "/openpi/policy": SGLANG}
"""Path of an address -> the dialect spoken there."""


@dataclass
class RemoteOptions(ServerAddress):
    """Recipe node ``model.options``. What our server says of its policy needs no option."""

    node: ClassVar[str] = "model.options"
    lora_targets: ClassVar[tuple[str, ...]] = ()

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
    connections: Annotated[int, Range(1, 256)] = 4
    """Rows that a foreign server gets at the same time, each over its own connection."""

    @property
    def spoken(self) -> str:
        """The dialect that the options name, or the path of the address."""
        return self.dialect or PATHS.get(urlsplit(self.address).path.rstrip("/"), OPENPI)

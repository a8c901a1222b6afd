"""The server of ``rlinf-vla serve``, which describes its policy and takes a batch per request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import Failure
from rlinf_vla.core.protocols import KeyedNoise, Noise, PolicySpec
from rlinf_vla.core.types import MAX_TASKS, Inputs, Observation

from .answers import checked
from .connection import Connections, address
from .description import spec_of
from .instructions import as_bytes, as_text
from .options import NATIVE, OPENPI, RemoteOptions

OURS = "rlinf_vla"
"""Key of the metadata that only our server has."""


def is_ours(metadata: Mapping[str, Any], options: RemoteOptions) -> bool:
    """Whether the server is ours, and the options do not treat it as another project's."""
    return isinstance(metadata.get(OURS), dict) and options.keys in (None, NATIVE) and options.dialect in (None, OPENPI)


def provenance(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of ``Policy.provenance``."""
    said = metadata[OURS].get("policy", {})
    return {"sha256": said.get("sha256"), "device": said.get("device"), "server": said}


class OurServer:
    """Rows of a call go in one request, with the keys of their noise."""

    def __init__(self, options: RemoteOptions, metadata: dict[str, Any]) -> None:
        """Raises UserError if the description of the policy is not valid."""
        said = metadata[OURS]
        self._url = address(options)
        self.spec: PolicySpec = spec_of(said.get("spec"), options)
        self.real_time_chunking = said.get("real_time_chunking") is True
        self._connections = Connections(options, metadata, 1)

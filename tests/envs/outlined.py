"""What a plug-in knows of an environment before it starts, against the environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf_vla.core.protocols import HasOutline, VectorEnv


def outlined(plugin: HasOutline, env: VectorEnv, config: Any) -> bool:
    """Whether the spec of ``env`` was known before it started, but for its share of ``num_envs``, and its stack."""
    known = plugin.outline(config)
    assert known is not None
    return replace(known, num_envs=env.spec.num_envs, stack=env.spec.stack) == env.spec

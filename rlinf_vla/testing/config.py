"""Check the ``Config`` of a plug-in: a dataclass that recipes can hold and read back."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vla.config.ranges import check_values


def assert_recipe_node(config: Any) -> None:
    """Check that ``config`` is typed, within its own ranges, refuses unknown keys, and survives a
    recipe file: YAML, and back."""
    kind = type(config)
    assert is_dataclass(kind), f"{kind.__name__} must be a dataclass"
    schema = OmegaConf.structured(kind)  # of the class: the engine makes a node from its defaults
    written = OmegaConf.to_yaml(OmegaConf.structured(config))
    restored = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.create(written)))
    assert restored == config, f"{kind.__name__} changes when it is written to YAML and read again"
    check_values(config)
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(schema, {"no_such_key": 1})

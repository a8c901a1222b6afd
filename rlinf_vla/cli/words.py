"""Read the ``KEY=VALUE`` words of a command without a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core import plugins

Config = TypeVar("Config")


def read_words(command: str, schema: type[Config], words: Sequence[str], example: str) -> Config:
    """Return the dataclass ``schema`` with the values of ``words``; others are left to the caller.

    Raises UserError, which names the ``command`` and the ``example`` of it.
    """
    known = [each.name for each in fields(schema)]  # type: ignore[arg-type]
    given = [word for word in words if "=" in word]
    for word in given:
        key = word.partition("=")[0]
        if key not in known:
            raise UserError(
                f"{command} has no key {key}{plugins.nearest(key, known)} (keys: {', '.join(known)})"
            )
    try:
        node = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.from_dotlist(given))
        config = OmegaConf.to_object(node)
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{command}: {str(error).splitlines()[0]} ({example})") from None
    assert isinstance(config, schema)
    check_values(config)
    return config

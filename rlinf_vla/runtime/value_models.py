"""Load a model of values that ``algorithm=value`` trained and ``export`` wrote."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vla.algorithms.value import LONGEST, ValueConfig, ValuePolicy, ValueTraining
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core import plugins
from rlinf_vla.core.io import read_document
from rlinf_vla.core.protocols import Policy
from rlinf_vla.training.checkpoint import load_heads
from rlinf_vla.training.checkpoint_files import HEADS

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TrainedValues:
    """What a directory says of its model. ``model``: the recipe's node."""

    directory: Path
    model: dict[str, Any]
    training: ValueTraining


def read_value_model(location: str, key: str) -> TrainedValues:
    """Read what is beside the weights. Raises UserError, which names ``key``, if it is no model of
    values."""
    directory = Path(location).expanduser()
    wanted = "give the directory `value` of a run with algorithm=value, or one that rlinf-vla export wrote of it"
    if not (directory / MANIFEST).is_file() or not (directory / HEADS).is_file():
        raise UserError(f"{key}={location} holds no model of values: {wanted}")
    document = read_document(directory / MANIFEST, wanted)
    try:
        recipe = document["recipe"]
        model, algorithm = recipe["model"], recipe["algorithm"]
        longest = document["algorithm"][LONGEST]
        is_value = algorithm["name"] == ValueConfig.name
    except (KeyError, TypeError):
        raise UserError(f"{directory / MANIFEST} lacks what was trained: {wanted}") from None
    if not is_value:
        raise UserError(f"{key}={location} was trained by another algorithm: {wanted}")
    training = ValueTraining(_read(ValueConfig, algorithm, directory))
    training.restore({LONGEST: longest})
    return TrainedValues(directory, model, training)


def load_value_model(location: str, key: str) -> tuple[ValuePolicy, ValueTraining]:
    """Return the model in the directory ``location``, on the CPU, and how it was trained.

    Raises UserError, which names ``key``, if there is none.
    """
    trained = read_value_model(location, key)
    directory = trained.directory
    name = str(trained.model.get("name"))
    plugin: type[Policy] = plugins.choose("model", name, plugins.models())
    options = _read(plugin.Config, trained.model.get("options"), directory)
    if hasattr(options, "random_weights"):
        options = replace(options, random_weights=False)
    with torch.random.fork_rng(devices=[]):
        base = plugin.load(directory, options)
    policy = trained.training.wrap(base, 0)
    assert isinstance(policy, ValuePolicy)
    load_heads(policy, directory, base)
    return policy.requires_grad_(False).eval(), trained.training


def _read(schema: type, values: Any, directory: Path) -> Any:
    """Return ``values`` of a manifest as the dataclass ``schema``. Raises UserError."""
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        raise UserError(
            f"{directory / MANIFEST}: {str(error).splitlines()[0]}: it was written by another version of this package"
        ) from None
    check_values(config)
    return config

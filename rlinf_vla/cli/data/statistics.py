"""Run ``rlinf-vla data statistics``: write what scales the states and actions of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rlinf_vla.cli.words import read_words
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, Label, OneOf, Range
from rlinf_vla.data import checkpoint_statistics as statistics
from rlinf_vla.data.checkpoint_statistics import FILES, OPENPI, OPENVLA, Numbers

Run = Annotated[int, Range(-1024, 1024)]
"""Dimensions in a row, true or, if negative, false."""
EXAMPLE = "rlinf-vla data statistics DATASET output=DIR layout=openpi horizon=50"


@dataclass
class StatisticsConfig:
    """Keys of the command."""

    output: Label = ""
    """Directory in which the files are written."""
    layout: Annotated[str, OneOf(*FILES)] = OPENPI
    """Family of checkpoints that read them."""
    horizon: Count | None = None
    """Actions of a chunk, as the checkpoint's action_horizon; needed for openpi."""
    action_key: Label = "action"
    """Name of the dataset's feature of actions."""
    state_key: Label | None = "observation.state"
    """Name of the dataset's feature of states; null for openvla: none."""
    delta_mask: list[Run] = field(default_factory=list)
    """Actions relative to the state, as model.options.delta_mask: [6,-1] is six that are and one
    that is not."""
    mask: list[Run] | None = None
    """OpenVLA's dimensions that are scaled, as delta_mask; null: all."""


def run(arguments: Sequence[str]) -> None:
    """Write the files. Raises UserError, with nothing written."""
    paths = [Path(word).expanduser() for word in arguments if "=" not in word]
    if not paths:
        raise UserError(f"data statistics needs a dataset: {EXAMPLE}")
    config = read_words("data statistics", StatisticsConfig, arguments, EXAMPLE)
    if config.layout == OPENPI and config.horizon is None:
        raise UserError(
            "layout=openpi needs horizon=N, the action_horizon of the model: its statistics are those of whole chunks"
        )
    if config.layout == OPENVLA and (config.delta_mask or config.horizon is not None):
        raise UserError(
            "layout=openvla has statistics of single, absolute actions: leave horizon and delta_mask out"
        )
    if config.layout != OPENVLA and (config.mask is not None or config.state_key is None):
        raise UserError(
            f"layout={config.layout} scales all dimensions of states and actions: leave mask and state_key=null out"
        )
    output = Path(config.output).expanduser()
    for name in FILES[config.layout]:
        if (output / name).exists():
            raise UserError(f"{output / name} is there: delete it, or choose another output")
    datasets = [Numbers.read(path, config.action_key, config.state_key) for path in paths]
    joined = Numbers.joined(datasets)
    if config.layout == OPENVLA:
        statistics.write_openvla(output, datasets, config.mask)
    else:
        write = statistics.write_openpi if config.layout == OPENPI else statistics.write_lerobot
        write(output, joined, config.horizon or 1, config.delta_mask)
    print(
        f"{len(joined.lengths)} episodes, {len(joined.actions)} frames, states of {joined.states.shape[1]} and "
        f"actions of {joined.actions.shape[1]} numbers: {', '.join(str(output / name) for name in FILES[config.layout])}"
    )

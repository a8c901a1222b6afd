"""Run ``rlinf-vla label``: write values and advantages into a copy of a LeRobotDataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from rlinf_vla.algorithms.base import WeightedDataset
from rlinf_vla.cli.words import read_words
from rlinf_vla.config.cluster import CPU, CUDA
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, Label, OneOf, Range
from rlinf_vla.core.io import replacing_directory
from rlinf_vla.data.lerobot_copy import copy_with_features
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.value_labels import FEATURES, POSITIVE, Labelling, value_labels
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.value_models import load_value_model
from rlinf_vla.telemetry.console import stages

EXAMPLE = "rlinf-vla label DATASET value=RUN/value output=DIR"


@dataclass
class LabelConfig:
    """Keys of the command."""

    value: Label | None = None
    """Directory of the model of values."""
    output: Label | None = None
    """New directory of the labelled copy."""
    steps: Count = 10
    """Actions whose advantage counts."""
    positive: Annotated[float, Range(0, 1, above=True)] = 0.3
    """Share of each task's frames, those of the largest advantages, that are labelled positive."""
    human_key: Label | None = None
    """Feature that is true where a person acted; these frames are positive in any case."""
    all_succeed: bool = False
    """Every episode succeeds, and ``next.success`` is not read."""
    action_key: Label | None = None
    """Name of the feature of actions; null: as in the model's training."""
    state_key: Label | None = None
    """Name of the feature of states; null: as in the model's training."""
    cameras: list[Label] | None = None
    """Camera names that differ, as model:dataset pairs; null: as in the model's training."""
    device: Annotated[str, OneOf(CPU, CUDA)] = CPU
    """Where the model computes."""


def run(arguments: Sequence[str]) -> None:
    """Write the copy, whole or not at all. Raises UserError."""
    config = read_words("label", LabelConfig, arguments, EXAMPLE)
    paths = [Path(word).expanduser() for word in arguments if "=" not in word]
    if not paths or not config.value or not config.output:
        raise UserError(f"label needs a dataset, a model and an output: {EXAMPLE}")
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        raise UserError(
            f"two of the datasets are called {max(names, key=names.count)}, and so would be their copies: rename one"
        )
    output = builders.new_directory(config.output)
    for path in paths:
        if path.resolve() in (output.resolve(), *output.resolve().parents):
            raise UserError(
                f"output={config.output} is inside of {path}, which is copied: choose another output"
            )
    if config.device == CUDA and not torch.cuda.is_available():
        raise UserError("device=cuda: PyTorch sees no GPU here: leave device out")
    for path in paths:
        LeRobotReader(path)  # refuse what is no dataset before weights are loaded
    model, training = load_value_model(config.value, "value")
    trained = training.config.demonstrations
    datasets = [
        WeightedDataset(
            str(path),
            1.0,
            config.action_key or trained.action_key,
            config.state_key or trained.state_key,
            trained.cameras if config.cameras is None else config.cameras,
            config.all_succeed,
        )
        for path in paths
    ]
    labelling = Labelling(
        training.config.failure, training.longest, config.steps, config.positive, config.human_key
    )
    with stages() as progress:
        labelled = value_labels(
            model.to(config.device),
            datasets,
            labelling,
            lambda fraction: progress("values", fraction),
        )
    with replacing_directory(output) as aside:
        for name, (reader, columns) in zip(names, labelled, strict=True):
            target = aside if len(names) == 1 else aside / name
            copy_with_features(reader, target, FEATURES, columns)
    for name, (_, columns) in zip(names, labelled, strict=True):
        frames = sum(len(episode[POSITIVE]) for episode in columns)
        positive = sum(int(episode[POSITIVE].sum()) for episode in columns)
        where = output if len(names) == 1 else output / name
        print(
            f"{len(columns)} episodes, {frames} frames, {positive} of them positive: {builders.relative(where)}"
        )
    print("use them as algorithm.demonstrations.dataset or .mixture of algorithm=recap")

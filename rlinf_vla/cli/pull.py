"""Download what ``push`` shared, or another model or dataset of the Hub, and check it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlinf_vla.cli.shared_files import check_tensors
from rlinf_vla.config.arguments import Parser
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import replacing_directory
from rlinf_vla.data.lerobot_format import INFO
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.runtime import builders, hub
from rlinf_vla.runtime.run_directory import CHECKPOINTS, RECIPE, saved_recipe
from rlinf_vla.training.checkpoint_files import verify


def run(arguments: Sequence[str]) -> None:
    """Write the repository to a new directory, whole and checked, or not at all.

    Raises UserError or Failure.
    """
    parser = Parser("pull", "rlinf-vla pull ORG/NAME DIRECTORY")
    parser.add_argument("repository")
    parser.add_argument("directory")
    options = parser.parse_args(arguments)
    match = re.fullmatch(f"(?:hf://)?{hub.REPOSITORY_AT}", options.repository)
    if match is None:
        raise UserError(
            f"pull: {options.repository} names no repository: write ORG/NAME or ORG/NAME@REVISION"
        )
    directory = builders.new_directory(options.directory)
    with replacing_directory(directory) as aside:
        commit = hub.fetch(match[1], match[2], aside)
        try:
            use = checked(aside)
        except UserError as error:
            raise UserError(
                f"{options.repository}: {str(error).replace(str(aside), commit[:12])}"
            ) from None
    print(
        f"{options.repository} at {commit[:12]}: {builders.relative(directory)} (use it as {use.format(builders.relative(directory))})"
    )


def checked(directory: Path) -> str:
    """Return how to use what was downloaded. Raises UserError if it is damaged or incomplete."""
    check_tensors(directory)
    if (directory / RECIPE).exists():
        saved_recipe(directory)
        checkpoints = sorted((directory / CHECKPOINTS).glob("*"))
        for checkpoint in checkpoints:
            verify(checkpoint)
        if not checkpoints:
            raise UserError(f"{directory} is a run without a checkpoint: take another revision")
        return "run={}"
    if (directory / INFO).exists():
        LeRobotReader(directory)
        return "algorithm.demonstrations.dataset={}"
    if any(directory.rglob("*.safetensors")) or (directory / "params").is_dir():
        return "model.checkpoint={}"
    raise UserError(f"{directory} has no checkpoint, model or LeRobotDataset: check the name")

"""Export a run's checkpoint, with its adapter merged, in the model's official layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import replacing_directory, write_json
from rlinf_vla.core.protocols import Learner
from rlinf_vla.core.types import DTYPES
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.training.checkpoint import load_checkpoint, save_heads
from rlinf_vla.training.lora import merge_lora


def run(config: DictConfig) -> None:
    """Write the merged model to ``output``, whole or not at all. Raises UserError."""
    recipe = recipes.read(config)
    if not recipe.checkpoint or not recipe.output:
        raise UserError(
            "export needs a run and an output: rlinf-vla export run=RUN output=DIR, or checkpoint=RUN/checkpoints/step_N"
        )
    builders.require_whole(recipe, "nothing to export")
    output = builders.new_directory(recipe.output)
    checkpoint = run_directory.checkpoint_at(recipe.checkpoint, "checkpoint")
    policy = builders.build_policy(recipe)
    state = load_checkpoint(checkpoint, policy)
    algorithm = builders.build_algorithm(recipe)
    algorithm.restore(state)
    merge_lora(policy.backbone)
    with replacing_directory(output) as aside:
        dtype = DTYPES[recipe.output_dtype] if recipe.output_dtype else None
        write_policy(
            policy,
            aside,
            OmegaConf.to_container(config),
            dtype,
            iteration=state["iteration"],
            algorithm=algorithm.state(),
        )
        save_heads(policy, aside)
    print(
        f"iteration {state['iteration']} of {recipe.name}, merged: {builders.relative(output)} (use it as model.checkpoint)"
    )


def write_policy(
    policy: Learner, directory: Path, recipe: Any, dtype: torch.dtype | None = None, **facts: Any
) -> None:
    """Write a trained model in its own layout, with a manifest.json of how it was made."""
    policy.save(directory, dtype)
    write_json(
        directory / "manifest.json",
        {"command": " ".join(sys.argv), "recipe": recipe} | facts | {"environment": fingerprint()},
    )

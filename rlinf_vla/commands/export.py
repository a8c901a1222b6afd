"""``rlinf-vla export``: a run's checkpoint, merged into the model's official layout."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_vla import recipe as recipes
from rlinf_vla.atomic import write_json
from rlinf_vla.commands import session
from rlinf_vla.protocols import Learner
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import load_checkpoint, save_heads
from rlinf_vla.training.lora import merge_lora
from rlinf_vla.types import DTYPES, UserError


def run(config: DictConfig) -> None:
    recipe = recipes.read(config)
    if not recipe.checkpoint or not recipe.output:
        raise UserError("export wants to know what and where: rlinf-vla export run=RUN output=DIR, or checkpoint=RUN/checkpoints/step_N")
    output = session.new_directory(recipe.output)
    checkpoint = run_directory.checkpoint_at(recipe.checkpoint, "checkpoint")
    policy = session.build_policy(recipe)
    state = load_checkpoint(checkpoint, policy)
    merge_lora(policy.backbone)
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        dtype = DTYPES[recipe.output_dtype] if recipe.output_dtype else None
        write_policy(policy, aside, OmegaConf.to_container(config), dtype, iteration=state["iteration"])
        save_heads(policy, aside)
        aside.rename(output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    print(f"iteration {state['iteration']} of {recipe.name}, merged: {session.relative(output)} (use it as model.checkpoint)")


def write_policy(policy: Learner, directory: Path, recipe: Any, dtype: torch.dtype | None = None, **facts: Any) -> None:
    """What learnt, in its own layout, with a manifest that says how it was made."""
    policy.save(directory, dtype)
    write_json(directory / "manifest.json", {"command": " ".join(sys.argv), "recipe": recipe} | facts | {"environment": fingerprint()})

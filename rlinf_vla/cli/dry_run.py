"""Run ``rlinf-vla train ... --dry-run``, and choose ``cluster.micro_batch_size=null``.

A dry run prints recipe, plan and memory and loads nothing. A missing resource ends it in one line.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import NO_ALGORITHM, Recipe
from rlinf_vla.core import plugins
from rlinf_vla.planner.budget import budget, choose, device_memory, setting_of, show_budget
from rlinf_vla.planner.memory import MemoryModel, is_counted
from rlinf_vla.planner.search import plan_of
from rlinf_vla.runtime import recipes, run_directory
from rlinf_vla.runtime.recipes import asset_path


def run(config: DictConfig) -> None:
    """Print recipe, plan and memory. Raises UserError if something is missing."""
    recipe = recipes.read(config)
    if recipe.algorithm.name == NO_ALGORITHM:
        raise UserError(f"recipe={recipe.name} trains nothing (algorithm={NO_ALGORITHM}): rlinf-vla eval recipe={recipe.name}")
    device_memory(recipe)
    if recipe.robot is None:
        plugins.choose("env", recipe.env.name, plugins.envs())
    choose_rows(config)
    recipe = recipes.read(config)
    print(f"recipe {recipe.name}: {recipe.algorithm.name}, model {recipe.model.name} of {recipe.model.checkpoint}, {recipe.env.name}")
    print(f"cluster {recipe.cluster.name} ({recipe.cluster.device}): {plan_of(recipe)}")
    if is_counted(recipe):
        model = MemoryModel(recipe)
        _require_weights(recipe, model)
        budget(model, setting_of(recipe), device_memory(recipe)).show()
    else:
        show_budget(recipe)
    print("dry run: nothing was loaded or started")


def _require_weights(recipe: Recipe, model: MemoryModel) -> None:
    read = getattr(model.policy, "read_state", None)
    if read is not None and not recipe.model.options.random_weights:
        read(asset_path(recipe.model.checkpoint))


def choose_rows(config: DictConfig, resumed: Path | None = None) -> None:
    """Set ``cluster.micro_batch_size`` in ``config`` if it is null: to what fits the device.

    ``resumed``: run directory of a run that continues, and so keeps its micro-batches. Raises
    UserError, with the fix, if nothing fits under the recipe's other keys.
    """
    if config.cluster.micro_batch_size is not None:
        return
    if resumed is not None:
        config.cluster.micro_batch_size = run_directory.saved_recipe(resumed).get("cluster", {}).get("micro_batch_size")
    recipe = recipes.read(config)
    if config.cluster.micro_batch_size is None:
        chosen = recipe.cluster.rows
        if recipe.cluster.device == "cuda" and is_counted(recipe):
            setting = choose(MemoryModel(recipe), device_memory(recipe), given=setting_of(recipe))
            chosen = setting.micro_batch_size
        config.cluster.micro_batch_size = chosen

"""Run ``rlinf-vla train ... --dry-run``, and choose ``cluster.micro_batch_size=null``.

A dry run prints recipe, plan and memory and loads no weights. What is missing ends it, in one line.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from rlinf_vla.config.cluster import AUTO, GIVEN
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import ON_POLICY, Recipe
from rlinf_vla.features.planner.monitor import planned
from rlinf_vla.features.planner.preview import Preview, preview_of
from rlinf_vla.features.planner.search import plan_of
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.runtime.recipes import ASSET, HUB, asset_path

CHOSEN = ("micro_batch_size", "reuse_frozen")
"""Keys of ``cluster`` that are chosen where they are null."""


def run(config: DictConfig) -> None:
    """Print recipe, plan and memory. Raises UserError if something is missing."""
    recipe = run_directory.read(config)
    builders.require_training(recipe)
    print(
        f"recipe {recipe.name}: {recipe.algorithm.name}, model {recipe.model.name} of {recipe.model.checkpoint}, {recipe.env.name}"
    )
    recipe, preview = choose_rows(config)
    if recipe.cluster.plan == AUTO and (recipe.cluster.nodes or recipe.profile):
        recipe, _ = planned(recipe, print, preview.model)
    elif recipe.cluster.plan == AUTO:
        print(
            "cluster.plan=auto: the plan will be chosen from measurements of this machine; without it:"
        )
    print(f"cluster {recipe.cluster.name} ({recipe.cluster.device}): {plan_of(recipe)}")
    preview.show(recipe)
    _look_for_weights(recipe, preview)
    if recipe.robot is None and (missing := builders.missing_simulator(recipe)) is not None:
        preview.missing.append(missing)
    preview.require_nothing()
    print("dry run: no weights were loaded, and no run was started")


def _look_for_weights(recipe: Recipe, preview: Preview) -> None:
    """Add a local checkpoint's missing files; those of the Hub are downloaded when a run starts."""
    read = (
        None
        if preview.model is None or preview.model.missing
        else getattr(preview.model.policy, "read_state", None)
    )
    if (
        read is None
        or recipe.model.options.random_weights
        or recipe.model.checkpoint.startswith(HUB)
    ):
        return
    try:
        read(asset_path(recipe.model.checkpoint))
    except UserError as error:
        preview.missing.append(str(error))


def _require_fit(preview: Preview) -> None:
    """Raise UserError if the policy does not fit what is known of the environments.

    The package has sizes of published checkpoints, without weights and with made-up statistics:
    such a policy need not have the checkpoint's spec, and is not checked.
    """
    recipe, model = preview.recipe, preview.model
    if model is None or recipe.robot is not None or not builders.needs_environments(recipe):
        return
    if recipe.model.checkpoint.startswith(ASSET):
        described = any(asset_path(recipe.model.checkpoint).glob("*.safetensors"))
    else:
        described = model.missing is None or getattr(
            builders.model_of(recipe), "described_by_json", False
        )
    if described:
        builders.require_fit(recipe, model.policy)


def choose_rows(config: DictConfig, resumed: Path | None = None) -> tuple[Recipe, Preview]:
    """Set ``cluster.micro_batch_size`` in ``config`` if it is null: to what fits the device; and
    ``cluster.reuse_frozen``.

    Returns the recipe and its counted memory, whose ``missing`` says, with the fix, if nothing fits
    under the recipe's other keys. ``resumed``: run directory of a run that continues, and so keeps
    both. With ``cluster.plan=auto`` the plan has them.
    """
    saved = {} if resumed is None else run_directory.saved_recipe(resumed).get("cluster", {})
    for key in CHOSEN:
        if config.cluster[key] is None:
            config.cluster[key] = saved.get(key)
    preview = preview_of(config, _require_fit)
    if preview.recipe.cluster.plan == GIVEN or preview.recipe.algorithm.family != ON_POLICY:
        config.cluster.micro_batch_size = preview.rows()
        if preview.processes is not None:
            config.env.processes = preview.processes
    return recipes.read(config), preview

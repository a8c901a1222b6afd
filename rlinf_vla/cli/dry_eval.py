"""Run ``rlinf-vla eval ... --dry-run``: say what would be played, and refuse what would not fit."""

from __future__ import annotations

from omegaconf import DictConfig

from rlinf_vla.cli.dry_run import missing_simulator
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.robot import ROBOT
from rlinf_vla.evaluation.blocks import Sweep, fixed, require_fit
from rlinf_vla.runtime import recipes, run_directory


def run(config: DictConfig) -> None:
    """Print policies and episodes; load and start nothing. Raises UserError for what is missing."""
    recipe = recipes.read(config)
    if recipe.checkpoint is not None:
        recipe.checkpoint = str(run_directory.checkpoint_at(recipe.checkpoint, "checkpoint"))
    print(f"recipe {recipe.name}: model {recipe.model.name} of {recipe.model.checkpoint}, {recipe.env.name}")
    if recipe.sweep.policies:
        recipe.sweep.policies = fixed(recipe.sweep.policies)
        sweep = Sweep.of(recipe)
        sweep.require_fit()
        for suite in sweep.suites:
            print(f"{suite.name}: {len(suite.tasks)} tasks, {recipe.episodes} episodes each")
        print(f"policies: {', '.join(policy.column for policy in sweep.policies)}")
    else:
        print(f"{recipe.episodes} episodes, {' and '.join(recipe.evaluation.modes)}")
        if recipe.env.name != ROBOT:
            require_fit(recipe, [recipe.env])
    if recipe.env.name != ROBOT and (missing := missing_simulator(recipe)) is not None:
        raise UserError(missing)
    print("dry run: nothing was loaded or started")

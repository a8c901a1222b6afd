"""Run ``rlinf-vla eval ... --dry-run``: say what would be played, and refuse what would not fit."""

from __future__ import annotations

from omegaconf import DictConfig

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.robot import ROBOT
from rlinf_vla.features.sweeps.blocks import Sweep, fixed
from rlinf_vla.features.sweeps.sweep_fit import require_fit
from rlinf_vla.runtime import builders, run_directory


def run(config: DictConfig) -> None:
    """Print policies and episodes; load and start nothing. Raises UserError for what is missing."""
    recipe = run_directory.read(config)
    print(
        f"recipe {recipe.name}: model {recipe.model.name} of {recipe.model.checkpoint}, {recipe.env.name}"
    )
    if recipe.sweep.policies:
        recipe.sweep.policies = fixed(recipe.sweep.policies)
        sweep = Sweep.of(recipe)
        require_fit(sweep)
        for suite in sweep.suites:
            print(f"{suite.name}: {len(suite.tasks)} tasks, {recipe.episodes} episodes each")
        print(f"policies: {', '.join(policy.column for policy in sweep.policies)}")
    else:
        print(f"{recipe.episodes} episodes, {' and '.join(recipe.evaluation.modes)}")
        if (
            recipe.env.name != ROBOT
            and recipe.model.name != NO_MODEL
            and builders.model_of(recipe).learns
        ):
            builders.require_fit(recipe, builders.outline(recipe))
    if recipe.env.name != ROBOT and (missing := builders.missing_simulator(recipe)) is not None:
        raise UserError(missing)
    print("dry run: nothing was loaded or started")

"""What a sweep refuses before a simulator starts and before weights are downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import START, Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import HasOutline, Policy
from rlinf_vla.features.sweeps.blocks import EXPERT, SCRIPTED, Sweep, directory_of
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.fit import fitted
from rlinf_vla.runtime.recipes import HUB
from rlinf_vla.training.checkpoint_files import COMPLETE


def require_fit(sweep: Sweep) -> None:
    """Raise UserError if a policy does not fit a suite, if policies need different environments, or
    if a task is listed without a scripted expert. The policy of a server is not judged."""
    recipe = sweep.recipe
    envs = [suite.config for suite in sweep.suites]
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    sources = dict.fromkeys(policy.source for policy in sweep.policies)
    if EXPERT in sources:
        _require_experts(plugin, [task for suite in sweep.suites for task in suite.tasks])
    pairs: list[tuple[str, Any]] = []
    outlines: dict[str, Policy] = {}
    for source in sources:
        env = envs[0]
        if source not in SCRIPTED:
            if not builders.model_of(recipe).learns:
                continue
            model = model_location(recipe, source)
            if model not in outlines:
                outlines[model] = builders.outline(with_model(recipe, model))
                for suite_env in envs:
                    builders.require_fit(replace(recipe, env=suite_env), outlines[model])
            env = fitted(env, outlines[model].spec)
        pairs.append((source, env))
        _require_equal(plugin, pairs[0], pairs[-1])


def run_checkpoint(recipe: Recipe, source: str) -> Path | None:
    """Return the directory of a policy that is a checkpoint of a run; None if it is a model."""
    if source == START or source.startswith(HUB):
        return None
    directory = directory_of(recipe, source)
    return directory if (directory / COMPLETE).exists() else None


def model_location(recipe: Recipe, source: str) -> str:
    """Return ``model.checkpoint`` of a policy: its own, or that of the run that wrote it."""
    return (
        recipe.model.checkpoint
        if source == START or run_checkpoint(recipe, source) is not None
        else source
    )


def with_model(recipe: Recipe, location: str) -> Recipe:
    return replace(recipe, model=replace(recipe.model, checkpoint=location))


def _require_experts(plugin: Any, tasks: Sequence[str]) -> None:
    without = {task.name for task in plugin.tasks() if not task.has_expert}
    if lacking := [task for task in tasks if task in without]:
        raise UserError(
            f"sweep.policies lists {EXPERT}, and {lacking[0]} has no scripted expert: leave {EXPERT} out"
        )


def _require_equal(plugin: Any, one: tuple[str, Any], other: tuple[str, Any]) -> None:
    """Raise UserError if two policies, each with its node ``env``, need different environments."""
    if one[1] == other[1] or (
        isinstance(plugin, HasOutline) and plugin.outline(one[1]) == plugin.outline(other[1])
    ):
        return
    keys = []
    for key in (field.name for field in fields(one[1])):
        values = [getattr(env, key) for _, env in (one, other)]
        stated = [value for value in values if value not in (None, [])]
        if values[0] != values[1] and len(stated) == 1:
            keys.append(f"env.{key}={str(stated[0]).replace(' ', '')}")
    remedy = f"set {' '.join(keys)}, or leave one out" if keys else "leave one out"
    raise UserError(
        f"policies of a sweep play in the same environments, {one[0]} and {other[0]} do not: {remedy}"
    )

"""Record the machine, software and weights of a result, and require the same for all its parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import START, Recipe
from rlinf_vla.core.io import digest_of, read_json, write_json
from rlinf_vla.evaluation.evaluate import temperature_of
from rlinf_vla.features.sweeps.blocks import SCRIPTED, EvalPolicy, directory_of
from rlinf_vla.runtime import builders, hooks
from rlinf_vla.telemetry.environment import FILE, SOFTWARE, differing, fingerprint
from rlinf_vla.training.checkpoint_files import COMPLETE, verify


def identities(recipe: Recipe, policies: Sequence[EvalPolicy]) -> dict[str, Any]:
    """Return policy name -> source, SHA-256 of the files it is loaded from, mode and unnorm_key.

    Of weights that are elsewhere, what is known of them (``Policy.provenance``).
    """
    digest = functools.cache(digest_of)
    result: dict[str, Any] = {}
    for policy in policies:
        if policy.probe is not None:
            continue  # its policy is listed without it, too
        if policy.source in SCRIPTED:
            result[policy.name] = {"policy": policy.source, "sha256": None, "mode": None}
            continue
        directory = directory_of(recipe, policy.source)
        plugin = builders.model_of(recipe)
        weights = (
            {"sha256": digest(directory)}
            if plugin.learns
            else plugin.provenance(recipe.model.options)
        )
        identity: dict[str, Any] = {
            "policy": policy.source,
            **weights,
            "mode": policy.mode,
            "model": recipe.model.name,
        }
        if recipe.rollout.backbone.url is not None:
            identity |= hooks.backbones().provenance(recipe.rollout.backbone)
        model = directory
        if (directory / COMPLETE).exists():
            verify(directory)
            model = directory_of(recipe, START)
            identity["model_sha256"] = digest(model)
        identity["temperature"] = temperature_of(recipe, policy.mode)
        identity["unnorm_key"] = (
            plugin.dataset_of(model, recipe.model.options)
            if hasattr(plugin, "dataset_of")
            else None
        )
        result[policy.name] = identity
    return result


def same_provenance(directory: Path, policies: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint stored in ``directory``; store this machine's if there is none.

    Raises UserError if software or weights differ from those that the sweep began with.
    """
    now = fingerprint() | {"policies": policies}
    path = directory / FILE
    try:
        before = read_json(path)
        changes = differing(before, now, (*SOFTWARE, "policies"))
    except FileNotFoundError:
        write_json(path, now)
        before = now
        changes = []
    except (ValueError, AttributeError):
        raise UserError(f"{path} is damaged: start a new run_dir") from None
    if changes:
        raise UserError(
            f"run_dir={directory} was begun with other software or weights: {changes[0]}; restore them, or start a new run_dir"
        )
    if str(now["cpu"]) not in str(before.get("cpu")).split(
        " and "
    ):  # then verify does not expect identical episodes
        before["cpu"] = f"{before.get('cpu')} and {now['cpu']}"
        write_json(path, before)
    return {name: value for name, value in before.items() if name != "policies"}

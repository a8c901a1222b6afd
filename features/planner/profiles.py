"""Find the profile of each type of device in a cluster: given, measured here, or published."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from rlinf_vla.config.recipe import Recipe
from rlinf_vla.features.planner.measure import measure_profile
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.profile import Profile, read_profile
from rlinf_vla.features.planner.published import (
    CountedWork,
    measured_simulation,
    published,
    rates_of,
    simulation_of,
)
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.machines import Cluster
from rlinf_vla.telemetry.console import stages


def profiles_for(
    recipe: Recipe, cluster: Cluster, model: MemoryModel | None = None
) -> tuple[dict[str, Profile], Profile | None]:
    """Return the profile of each device type of the cluster, and the one measured here, if any.

    A profile is given by ``profile``, measured on this machine if the recipe lists no other, or
    predicted from published numbers. ``model``: the recipe's, if it is there already. Raises
    UserError if a device type has none.
    """
    files = [recipe.profile] if isinstance(recipe.profile, str) else list(recipe.profile or ())
    profiles = {
        profile.device: profile
        for profile in (read_profile(Path(str(file)).expanduser()) for file in files)
    }
    measured = None
    if not profiles and not recipe.cluster.nodes:
        with stages() as show:
            measured = measure_profile(
                recipe, builders.build_policy(recipe), lambda text: show(text, 0.0)
            )
        profiles = {measured.device: measured}
    missing = {node.device: node for node in cluster.nodes if node.device not in profiles}
    if missing:
        with stages() as show:
            show("counting the work of the policy", 0.0)
            work = CountedWork(model or MemoryModel(recipe))
            measured_here = cache(partial(measured_simulation, work.model))
            for device, node in missing.items():
                rates, remark = rates_of(node)
                show(f"rates of {recipe.env.name}", 0.0)
                simulation = simulation_of(work.model, node) or measured_here()
                profile = published(work, node, simulation, rates)
                note = profile.note if remark is None else f"{profile.note}; {remark}"
                profiles[device] = replace(profile, note=note)
    return {
        device: profiles[device] for device in sorted({node.device for node in cluster.nodes})
    }, measured

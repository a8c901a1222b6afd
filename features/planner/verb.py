"""The verb ``plan``."""

from __future__ import annotations

from rlinf_vla.core.verb import JSON, MACHINE, RECIPE, WITH_RECIPE, Help, Verb

PLAN = Verb(
    MACHINE,
    "predict the fastest placement on a cluster and its speed",
    "rlinf_vla.features.planner.search",
    Help(
        WITH_RECIPE,
        (
            *RECIPE,
            ("output=FILE", "write the recipe under the chosen plan; train plan=FILE"),
            *JSON,
        ),
        (
            "recipe=maniskill_ppo",
            "recipe=maniskill_ppo env.backend=gpu cluster=8gpu",
            "recipe=maniskill_ppo output=plan.yaml --json",
        ),
    ),
    composed=True,
    keys=True,
)

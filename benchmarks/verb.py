"""The verb ``bench``."""

from __future__ import annotations

from rlinf_vla.core.verb import MACHINE, RECIPE, Help, Verb

BENCHES = ("rollout", "throughput", "policy", "update", "control", "load", "memory", "env", "soak")
UNCOMPOSED_BENCHES = ("env", "soak")
"""They compare several simulators, so they have no recipe."""
BENCH = Verb(
    MACHINE,
    "measure this machine",
    "rlinf_vla.benchmarks",
    Help(
        (
            "{rollout|throughput|policy|update|control|memory} recipe=NAME",
            "{env|soak} env=NAME[,NAME ...] [env.KEY=VALUE ...]",
            "load",
        ),
        RECIPE,
        ("rollout recipe=maniskill_ppo", "env env=maniskill env.num_envs=8", "load"),
    ),
    composed=True,
    keys=True,
    words=BENCHES,
    programs=True,
    uncomposed=UNCOMPOSED_BENCHES,
)

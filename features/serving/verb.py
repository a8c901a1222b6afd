"""The verb ``serve``."""

from __future__ import annotations

from rlinf_vla.core.verb import DATA, RECIPE, WITH_RECIPE, Help, Verb

SERVE = Verb(
    DATA,
    "serve a policy over websockets and HTTP",
    "rlinf_vla.features.serving.command",
    Help(
        WITH_RECIPE,
        RECIPE,
        (
            "run=RUN",
            "run=RUN serve.port=9000 serve.protocol=openpi",
            "run=RUN serve.max_batch_size=8",
        ),
    ),
    composed=True,
    keys=True,
)

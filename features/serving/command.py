"""Serve a policy over websockets and HTTP (docs/serving.md)."""

from __future__ import annotations

import os
from importlib.util import find_spec

from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.serve import check_serve
from rlinf_vla.features.serving.array_messages import INSTALL
from rlinf_vla.runtime import builders, recipes

PACKAGES = ("starlette", "uvicorn", "websockets", "msgpack", "prometheus_client")


def run(config: DictConfig) -> None:
    """Serve the recipe's policy, or its ``checkpoint``, until SIGINT or SIGTERM.

    Raises UserError.
    """
    recipe = recipes.read(config)
    if absent := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"serve needs {', '.join(absent)}: {INSTALL}")
    token = os.environ.get(recipe.serve.token_env) if recipe.serve.token_env else None
    check_serve(recipe.serve, token)
    builders.require_whole(recipe, "nothing to serve")
    from rlinf_vla.features.serving.server import serve

    serve(recipe, token)

"""As much of gymnasium's registry as Isaac Lab uses, for machines without gymnasium."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Error(Exception):
    pass


class NameNotFound(Error):
    pass


error = SimpleNamespace(Error=Error, NameNotFound=NameNotFound)
_registry: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}


class OrderEnforcing:
    """Gymnasium's wrapper, whose ``reset`` takes no rows."""

    def __init__(self, env: Any) -> None:
        self.unwrapped = env

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.unwrapped.reset(seed=seed, options=options)


def register(id: str, entry_point: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    _registry[id] = (entry_point, kwargs)


def spec(id: str) -> SimpleNamespace:
    if id not in _registry:
        raise NameNotFound(f"Environment `{id}` doesn't exist.")
    return SimpleNamespace(kwargs=_registry[id][1])


def make(id: str, cfg: Any) -> OrderEnforcing:
    spec(id)
    return OrderEnforcing(_registry[id][0](cfg))

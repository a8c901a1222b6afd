"""Read what our server says of its policy, which anybody may have sent, into a ``PolicySpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlinf_vla.config.errors import UserError, printable
from rlinf_vla.core.protocols import Convention, PolicySpec, ToolUnits

from .options import RemoteOptions

GREATEST = {"chunk": 1024, "action_dim": 4096, "state_dim": 4096}
SIDE = 4096
IMAGES = 16
REMARKS = 16
LONGEST = 300
MEANINGS = {
    "gripper": ("open_positive", "close_positive", "zero_to_one"),
    "state": ("quaternion", "axis_angle", "qpos"),
    "images": ("upright", "rot180", "none"),
}
ENV = ("convention",)
"""Keys of the node ``env`` that a server may fill in; others name programs or files."""


class _Wrong(Exception):
    """An entry that is not valid."""


def spec_of(said: Any, options: RemoteOptions) -> tuple[PolicySpec, int]:
    """Return the spec, its chunk cut to ``options.chunk``, and the chunk that the server sends.

    Raises UserError if it is not valid.
    """
    try:
        spec = _spec(_map(said, "spec"))
    except _Wrong as wrong:
        raise UserError(
            f"{options.url} describes its policy wrongly ({wrong}): the server needs another version of rlinf-vla"
        ) from None
    for name in ("action_dim", "state_dim"):
        expected, actual = getattr(options, name), getattr(spec, name)
        if expected not in (None, actual):
            raise UserError(
                f"model.options.{name}={expected}: the policy of {options.url} has {actual}: leave it out"
            )
    if options.chunk is not None and options.chunk > spec.chunk:
        raise UserError(
            f"model.options.chunk={options.chunk}: the policy of {options.url} gives {spec.chunk} actions: use at most these"
        )
    return replace(spec, chunk=options.chunk or spec.chunk), spec.chunk


def _spec(document: Mapping[str, Any]) -> PolicySpec:
    chunk, action_dim, state_dim = (
        _number(document, name, 0 if name == "state_dim" else 1, most)
        for name, most in GREATEST.items()
    )
    images = _map(document.get("images"), "images")
    if len(images) > IMAGES:
        raise _Wrong(f"more than {IMAGES} images")
    sizes = {_text(name, "images"): _size(size) for name, size in images.items()}
    env = {
        key: _text(value, "env")
        for key, value in _map(document.get("env", {}), "env").items()
        if key in ENV
    }
    cameras = {"cameras": list(sizes)} if env else {}
    remarks = document.get("remarks", [])
    if not isinstance(remarks, list) or len(remarks) > REMARKS:
        raise _Wrong("remarks")
    lines = tuple(_text(line, "remarks") for line in remarks)
    bars = document.get("bars")
    if bars is not None and not (type(bars) in (int, float) and 0 <= bars <= 1):
        raise _Wrong("bars")
    convention = _convention(_map(document.get("convention", {}), "convention"))
    suite = document.get("suite")
    suite_name = None if suite is None else _text(suite, "suite")
    return PolicySpec(
        chunk, action_dim, state_dim, sizes, convention, env | cameras, lines, bars, suite_name
    )


def _convention(document: Mapping[str, Any]) -> Convention:
    """Return the meaning of actions; whether images pass through JPEG is the server's affair."""
    tool = document.get("tool")
    if tool is not None:
        tool = _map(tool, "tool")
        tool = ToolUnits(*(_length(tool.get(name)) for name in ("translation_m", "rotation_rad")))
    meanings: dict[str, Any] = {name: document.get(name) for name in MEANINGS}
    for name, value in meanings.items():
        if value is not None and not (isinstance(value, str) and value in MEANINGS[name]):
            raise _Wrong(f"convention.{name}")
    return Convention(tool, **meanings)


def _map(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(name)
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST:
        raise _Wrong(name)
    return " ".join(printable(value).split())


def _number(document: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = document.get(name)
    if type(value) is not int or not least <= value <= most:
        raise _Wrong(name)
    return value


def _size(value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(type(side) is not int or not 1 <= side <= SIDE for side in value)
    ):
        raise _Wrong("images")
    return value[0], value[1]


def _length(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1e3:
        raise _Wrong("convention.tool")
    return float(value)

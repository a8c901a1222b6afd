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
        given, found = getattr(options, name), getattr(spec, name)
        if given not in (None, found):
            raise UserError(
                f"model.options.{name}={given}: the policy of {options.url} has {found}: leave it out"
            )
    if options.chunk is not None and options.chunk > spec.chunk:
        raise UserError(
            f"model.options.chunk={options.chunk}: the policy of {options.url} gives {spec.chunk} actions: use at most these"
        )
    return replace(spec, chunk=options.chunk or spec.chunk), spec.chunk


def _spec(said: Mapping[str, Any]) -> PolicySpec:
    chunk, action_dim, state_dim = (
        _number(said, name, 0 if name == "state_dim" else 1, most)
        for name, most in GREATEST.items()
    )
    images = _map(said.get("images"), "images")
    if len(images) > IMAGES:
        raise _Wrong(f"more than {IMAGES} images")
    sizes = {_text(name, "images"): _size(size) for name, size in images.items()}
    env = {
        key: _text(value, "env")
        for key, value in _map(said.get("env", {}), "env").items()
        if key in ENV
    }
    cameras = {"cameras": list(sizes)} if env else {}
    remarks = said.get("remarks", [])
    if not isinstance(remarks, list) or len(remarks) > REMARKS:
        raise _Wrong("remarks")
    lines = tuple(_text(each, "remarks") for each in remarks)
    bars = said.get("bars")
    if bars is not None and not (type(bars) in (int, float) and 0 <= bars <= 1):
        raise _Wrong("bars")
    convention = _convention(_map(said.get("convention", {}), "convention"))
    suite = said.get("suite")
    known = None if suite is None else _text(suite, "suite")
    return PolicySpec(
        chunk, action_dim, state_dim, sizes, convention, env | cameras, lines, bars, known
    )


def _convention(said: Mapping[str, Any]) -> Convention:
    """Return the meaning of actions; whether images pass through JPEG is the server's affair."""
    tool = said.get("tool")
    if tool is not None:
        tool = _map(tool, "tool")
        tool = ToolUnits(*(_length(tool.get(name)) for name in ("translation_m", "rotation_rad")))
    found: dict[str, Any] = {name: said.get(name) for name in MEANINGS}
    for name, value in found.items():
        if value is not None and not (isinstance(value, str) and value in MEANINGS[name]):
            raise _Wrong(f"convention.{name}")
    return Convention(tool, **found)


def _map(said: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(said, dict):
        raise _Wrong(name)
    return said


def _text(said: Any, name: str) -> str:
    if not isinstance(said, str) or len(said) > LONGEST:
        raise _Wrong(name)
    return " ".join(printable(said).split())


def _number(said: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = said.get(name)
    if type(value) is not int or not least <= value <= most:
        raise _Wrong(name)
    return value


def _size(said: Any) -> tuple[int, int]:
    if (
        not isinstance(said, list)
        or len(said) != 2
        or any(type(each) is not int or not 1 <= each <= SIDE for each in said)
    ):
        raise _Wrong("images")
    return said[0], said[1]


def _length(said: Any) -> float:
    if type(said) not in (int, float) or not 0 <= said <= 1e3:
        raise _Wrong("convention.tool")
    return float(said)

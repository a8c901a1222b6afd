"""Read cell files: YAML to :class:`Cell`, with a one-line error for each mistake."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from rlinf_vla.features.realworld.camera_geometry import PARENTS, Mount
from rlinf_vla.features.realworld.robot import CellError

from . import cell, joint_cell
from .arm_cell import ArmCell
from .cell import Cell
from .joint_cell import ANY, JointCell

CELLS = Path(__file__).parent / "cells"
"""Shipped cells; they explain each key."""
SHIPPED = "cell://"
_EXAMPLE: dict[type[ArmCell], str] = {
    Cell: "cells/franka_sim.yaml",
    JointCell: "cells/so101_sim.yaml",
}
AnyCell = TypeVar("AnyCell", bound=ArmCell)


def read(location: str, kind: type[AnyCell]) -> AnyCell:
    """Return the cell at a path or ``cell://NAME``. Raises CellError."""
    if location.startswith(SHIPPED):
        return load(CELLS / f"{location[len(SHIPPED) :]}.yaml", kind)
    return load(Path(location).expanduser(), kind)


def load(path: Path, kind: type[AnyCell]) -> AnyCell:
    """Return the checked cell of a file.

    Raises CellError: one line with the file, the key, what is wrong and the fix.
    """
    import yaml  # not used in the arm's process, which receives the cell as JSON

    class Strict(yaml.SafeLoader):
        """Loader that rejects duplicate keys instead of keeping the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise yaml.MarkedYAMLError(
                            problem=f"{key.value} is given twice; keep one",
                            problem_mark=key.start_mark,
                        )
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        with path.open(encoding="utf-8") as file:
            values = Strict(file).get_single_data()
    except FileNotFoundError:
        shipped = ", ".join(sorted(str(example) for example in CELLS.glob("*.yaml")))
        raise CellError(
            f"{path}: no such cell file; copy and adapt a shipped one: {shipped}"
        ) from None
    except (OSError, ValueError) as error:  # not UTF-8, a number with thousands of digits, month 13
        raise CellError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise CellError(f"{path}{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise CellError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    try:
        if not isinstance(values, dict):
            raise CellError(
                "is not a mapping of keys to values; write lines like max_speed_m_s: 0.2"
            )
        return of(values, path.stem, kind)
    except CellError as error:
        raise CellError(f"{path}: {error}") from None


def of(values: Mapping[Any, Any], name: str, kind: type[AnyCell]) -> AnyCell:
    """Return the checked cell of ``values``. Raises CellError, which does not name the file."""
    keys = {field.name: field for field in fields(kind) if field.name != "name"}
    for key in values:
        if key not in keys:
            close = difflib.get_close_matches(str(key), list(keys), n=1, cutoff=0.5)
            raise CellError(
                f"{key}: no such key; {f'did you mean {close[0]}?' if close else 'remove it'}"
            )
    missing = [key for key in keys if key not in values]
    if missing:
        raise CellError(
            f"{', '.join(missing)}: missing; a cell file must give every key, {_EXAMPLE[kind]} explains each"
        )
    read: dict[str, Any] = {
        key: values[key] if field.metadata == {} else _read(key, values[key], **field.metadata)
        for key, field in keys.items()
    }
    if "cameras" in keys:
        read["cameras"] = _mounts(read["cameras"])
    instance = kind(name=name, **read)
    if isinstance(instance, Cell):
        cell.check(instance)
    elif isinstance(instance, JointCell):
        joint_cell.check(instance)
    return instance


def as_json(cell: ArmCell) -> dict[str, Any]:
    """Return ``cell`` as JSON values, which ``of`` turns back into the same cell."""
    return {key: value for key, value in asdict(cell).items() if key != "name"}


def _mounts(values: Any) -> dict[str, Mount]:
    if not isinstance(values, dict):
        raise CellError(
            f"cameras: {values!r} is not a mapping of names to poses; write {{}} if they are not known"
        )
    return {str(name): _mount(f"cameras: {name}", value) for name, value in values.items()}


def _mount(key: str, value: Any) -> Mount:
    keys = [field.name for field in fields(Mount)]
    if not isinstance(value, dict) or sorted(map(str, value)) != sorted(keys):
        raise CellError(f"{key}: {value!r} must give exactly {', '.join(keys)}")
    if value["parent"] not in PARENTS:
        raise CellError(
            f"{key}.parent: {value['parent']!r} is not known; one of {', '.join(PARENTS)}"
        )
    position = _read(f"{key}.position_m", value["position_m"], -10, 10, 3)
    quaternion = _read(f"{key}.quaternion_wxyz", value["quaternion_wxyz"], -1, 1, 4)
    assert isinstance(position, tuple) and isinstance(quaternion, tuple)  # of this length
    if abs(math.hypot(*quaternion) - 1) > 1e-3:
        raise CellError(
            f"{key}.quaternion_wxyz: {list(quaternion)} is not of length 1; divide it by its length"
        )
    return Mount(value["parent"], position, quaternion)


def _read(
    key: str, value: Any, low: float, high: float, length: int | None
) -> float | tuple[float, ...]:
    if length is None:
        return _number(key, value, low, high)
    if length == ANY and isinstance(value, list | tuple):
        length = len(value)
    if not isinstance(value, list | tuple) or len(value) != length:
        raise CellError(
            f"{key}: {value!r} is not a list of {length} numbers; write [{', '.join(['…'] * length)}]"
        )
    return tuple(_number(key, element, low, high) for element in value)


def _number(key: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = (
            "; YAML needs a decimal point, as in 1.0e-3"
            if isinstance(value, str) and _is_number(value)
            else "; write one"
        )
        raise CellError(f"{key}: {value!r} is not a number{hint}")
    try:
        number = float(value)
    except OverflowError:  # an integer with hundreds of digits
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise CellError(
            f"{key}: {number} is not finite; write a number between {low:g} and {high:g}"
        )
    if not low <= number <= high:
        fix = "lower" if number > high else "raise"
        raise CellError(
            f"{key}: {number:g} is not between {low:g} and {high:g}, the allowed range; {fix} it"
        )
    return number


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

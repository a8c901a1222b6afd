"""Read a column of a dataset as what ``meta/info.json`` says of it, and refuse anything else.

Whatever a file holds is compared before memory is allocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import ImageSize
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column, Feature, Frame

NUMBERS = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
"""The dtypes of features that are numbers."""
_MOST_ROWS = 10_000_000
_FORMATS = ("PNG", "JPEG")
_PNG = b"\x89PNG"
_DEPTH = 24
"""How a PNG file begins, and the place of its bits per channel. Pillow cuts 16 bits to 8."""


def require_size(metadata: pq.FileMetaData, schema: pa.Schema, key: str, feature: Feature) -> None:
    """Raise ValueError if a column has more values in the whole file than ``feature`` allows."""
    before = schema.get_field_index(key)
    leaf = sum(_leaves(schema.field(index).type) for index in range(before))
    held = sum(
        metadata.row_group(group).column(leaf).num_values
        for group in range(metadata.num_row_groups)
    )
    if held > metadata.num_rows * (1 if feature.is_camera else max(1, math.prod(feature.shape))):
        raise ValueError(f"{metadata.num_rows} rows hold {held} values")


def _leaves(kind: pa.DataType) -> int:
    return (
        sum(_leaves(kind.field(index).type) for index in range(kind.num_fields))
        if kind.num_fields
        else 1
    )


def values(column: pa.ChunkedArray, feature: Feature) -> Column:
    """Return ``[L]`` of a scalar feature or strings, else ``[L, *shape]``.

    Raises ValueError, which names the row, for another type or shape, a null, or a number that the
    dtype cannot hold.
    """
    if feature.dtype not in (*NUMBERS, "string"):
        raise ValueError(f"{feature.dtype} cannot be read")
    array = column.combine_chunks()
    shape = () if feature.shape == (1,) else feature.shape
    per_row = 1
    for size in shape or ((1,) if _is_list(array.type) else ()):
        if not _is_list(array.type):
            raise ValueError(f"it holds {array.type}")
        _refuse_null(array, per_row)
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        if (lengths != size).any():
            row = int((lengths != size).argmax())
            raise ValueError(f"row {row // per_row} has {lengths[row]} values where {size} belong")
        array = array.flatten()
        per_row = per_row * size
    _refuse_null(array, per_row)
    if _kind(array.type) != (
        "U" if feature.dtype == "string" else np.dtype(feature.dtype).kind.replace("u", "i")
    ):
        raise ValueError(f"it holds {array.type}")
    if feature.dtype == "string":
        return np.array(array.to_pylist(), dtype=object)
    stored = array.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # a float too large becomes infinite, which is refused later
        numbers = stored.astype(feature.dtype)
    if stored.dtype.kind != "f" and (numbers != stored).any():
        raise ValueError(
            f"row {int((numbers != stored).argmax()) // per_row} has a number out of range"
        )
    return numbers.reshape(len(column), *shape)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _kind(kind: pa.DataType) -> str:
    """Return the kind of an Arrow type as numpy calls it, empty for all but numbers and strings."""
    tests = {
        "b": pa.types.is_boolean,
        "i": pa.types.is_integer,
        "f": pa.types.is_floating,
        "U": pa.types.is_string,
    }
    return next(
        (name for name, is_one in tests.items() if is_one(kind)),
        "U" if pa.types.is_large_string(kind) else "",
    )


def _refuse_null(array: pa.Array, per_row: int) -> None:
    if array.null_count:
        raise ValueError(
            f"row {int(array.is_null().to_numpy(zero_copy_only=False).argmax()) // per_row} is null"
        )


def picture(stored: Any, size: ImageSize) -> Frame:
    """Return the image of a row, uint8 ``[H, W, 3]``. Raises ValueError unless it is PNG or JPEG of
    this size with 8 bits of red, green and blue; the size is read before the pixels."""
    data = stored.get("bytes") if isinstance(stored, dict) else None
    if not isinstance(data, bytes):
        raise ValueError("is no image: the file must hold its bytes")
    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
        fits = (image.height, image.width) == size
        pixels = np.asarray(image) if fits and image.mode == "RGB" else None
    except (
        Exception
    ):  # Pillow raises OSError, SyntaxError, ValueError, struct.error, DecompressionBombError ...
        raise ValueError("is no image in PNG or JPEG") from None
    if not fits:
        raise ValueError(f"has {image.height}x{image.width} pixels, {size[0]}x{size[1]} belong")
    bits = data[_DEPTH] if data.startswith(_PNG) else 8
    if pixels is None or bits != 8:
        raise ValueError(f"is {image.mode} of {bits} bits, RGB of 8 bits is needed: convert it")
    return pixels


def read_table(
    path: Path,
    columns: Sequence[str] | None = None,
    filters: list[tuple[str, str, int]] | None = None,
    most: int = _MOST_ROWS,
) -> pa.Table:
    """Read those ``columns`` that the file has; None reads all. Raises UserError if unreadable, or
    if the file has more than ``most`` rows."""
    metadata, schema = opened(path)
    if metadata.num_rows > most:
        raise UserError(
            f"{path} has {metadata.num_rows} rows, {form.INFO} says {most}: copy the dataset again"
        )
    names = None if columns is None else [name for name in schema.names if name in columns]
    with _readable(path):
        table = pq.read_table(path, columns=names, filters=filters, partitioning=None)
        table.validate(full=True)  # of texts that they are UTF-8
    return table


def opened(path: Path) -> tuple[pq.FileMetaData, pa.Schema]:
    """Return what a parquet file says of itself. Raises UserError if unreadable."""
    with _readable(path), pq.ParquetFile(path) as file:
        return file.metadata, file.schema_arrow


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise UserError for what pyarrow raises about a file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} is missing: copy the dataset again") from None
    except (pa.ArrowException, OSError, MemoryError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} cannot be read ({reason}): it was cut short or changed, copy the dataset again"
        ) from None

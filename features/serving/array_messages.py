"""Arrays in msgpack and JSON messages of policy servers, read safely from anybody.

Markers of openpi (binary keys ``__ndarray__``), of vla-eval (the same as text, and ``__image__``)
and of json-numpy (``__numpy__``). Whatever arrives is checked before memory is allocated for it:
only numbers and booleans, sizes that agree, and limits on everything that may be repeated. Nothing
is unpickled. Needs numpy, and msgpack and Pillow where used.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.config.errors import UserError
from rlinf_vla.features.serving.message_images import MODES, read_image, write_png
from rlinf_vla.features.serving.message_images import MessageError as MessageError

INSTALL = "pip install 'rlinf-vla[serve]'"
_KINDS = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
_TYPES = [
    dtype
    for kind in _KINDS
    for dtype in (np.dtype(kind).newbyteorder("<"), np.dtype(kind).newbyteorder(">"))
]
DTYPES: dict[str, np.dtype[Any]] = {
    name: dtype for dtype in _TYPES for name in (dtype.str, dtype.name)
} | {kind: np.dtype(kind) for kind in _KINDS}
"""All names that a message may give a dtype: ``<f4``, ``>f4``, ``float32`` ..."""


@dataclass(frozen=True)
class Limits:
    """What a message may hold."""

    size: int = 64 << 20
    """Bytes of the message; also of all its arrays after decompression."""
    arrays: int = 64
    dims: int = 5
    depth: int = 8
    """Nested maps and lists."""
    items: int = 4096
    """Entries of all maps and lists together."""


LIMITS = Limits()


def pack(message: Any, text_keys: bool = False, png: bool = False) -> bytes:
    """Return ``message`` in msgpack: maps, lists, strings, numbers and arrays.

    An array is C-ordered, with openpi's binary marker keys, or the same as text (``text_keys``).
    vla-eval has no numpy scalars, so they become plain numbers with ``text_keys``, and with ``png``
    uint8 ``[H, W, 1, 3 or 4]`` become its PNG images. Raises MessageError for anything else, such
    as arrays of objects.
    """

    def encoded(value: Any) -> Any:
        if text_keys and isinstance(value, np.generic):
            return value.item()
        if (
            png
            and isinstance(value, np.ndarray)
            and value.dtype == np.uint8
            and value.ndim == 3
            and value.shape[2] in MODES
        ):
            return {
                "__image__": True,
                "format": "png",
                "data": write_png(value),
                "shape": value.shape,
            }
        if isinstance(value, np.ndarray):
            fields = {
                "__ndarray__": True,
                "data": value.tobytes(),
                "dtype": _allowed(value.dtype).str,
                "shape": value.shape,
            }
        elif isinstance(value, np.generic):
            fields = {
                "__npgeneric__": True,
                "data": value.item(),
                "dtype": _allowed(value.dtype).str,
            }
        else:
            raise MessageError(
                f"{type(value).__name__} cannot be sent: send numbers, strings, arrays, lists and maps"
            )
        return fields if text_keys else {key.encode(): field for key, field in fields.items()}

    try:
        packed: bytes = _msgpack().packb(message, default=encoded)
    except (OverflowError, TypeError, ValueError) as error:
        raise (
            error
            if isinstance(error, MessageError)
            else MessageError(f"not to be sent in msgpack: {error}")
        ) from None
    return packed


def unpack(data: bytes, limits: Limits = LIMITS) -> Any:
    """Return the message that ``data`` holds in msgpack, with either kind of marker keys.

    Arrays are read-only and in the machine's byte order; binary data that mark no array must be
    text. Raises MessageError.
    """
    if len(data) > limits.size:
        raise MessageError(f"the message has {len(data)} bytes: at most {limits.size} are accepted")
    reader = _Reader(limits)
    msgpack = _msgpack()
    try:
        # raw: some versions of Python never free a text key, which msgpack interns
        tree = msgpack.unpackb(
            data,
            raw=True,
            object_pairs_hook=reader.pairs,
            list_hook=reader.counted,
            ext_hook=_no_extension,
            max_array_len=limits.items,
            max_map_len=limits.items,
            max_ext_len=0,
        )
    except MessageError:
        raise
    except Exception as error:  # its exceptions have no common base
        raise MessageError(f"not a msgpack message: {str(error) or type(error).__name__}") from None
    return reader.read(tree)


def json_pack(message: Any) -> str:
    """Return ``message`` as JSON with json-numpy's arrays. Raises MessageError."""

    def encoded(value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic):
            raise MessageError(
                f"{type(value).__name__} cannot be sent: send numbers, strings, arrays, lists and maps"
            )
        array = np.asarray(value)
        return {
            "__numpy__": base64.b64encode(array.tobytes()).decode(),
            "dtype": _allowed(array.dtype).str,
            "shape": array.shape,
        }

    try:
        return json.dumps(message, default=encoded)
    except (TypeError, ValueError) as error:
        raise (
            error
            if isinstance(error, MessageError)
            else MessageError(f"not to be sent as JSON: {error}")
        ) from None


def json_unpack(text: str | bytes, limits: Limits = LIMITS) -> Any:
    """Return the message that JSON ``text`` with json-numpy's arrays holds. Raises MessageError."""
    if len(text) > limits.size:
        raise MessageError(f"the message has {len(text)} bytes: at most {limits.size} are accepted")
    try:
        message = text.decode() if isinstance(text, bytes) else text
        if (
            message.count(",") + message.count("[") + message.count("{") > limits.items
        ):  # also those in strings
            raise MessageError(f"the message has more than {limits.items} entries")
        tree = json.loads(message, parse_constant=_no_constant)
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not a JSON message: {str(error).splitlines()[0]}") from None
    return _Reader(limits).read(tree)


class _Reader:
    """Read one message: count what it holds, and turn marked maps into arrays."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._items = 0
        self._arrays = 0
        self._bytes = 0

    def counted(self, items: Any) -> Any:
        self._items += 1 + len(items)
        if self._items > self.limits.items:
            raise MessageError(f"the message has more than {self.limits.items} entries")
        return items

    def pairs(self, pairs: Any) -> dict[bytes, Any]:
        return dict(self.counted(pairs))

    def read(self, tree: Any, depth: int = 0) -> Any:
        if depth > self.limits.depth:
            raise MessageError(f"the message is nested more than {self.limits.depth} deep")
        if isinstance(tree, bytes):
            return _text(tree)
        if isinstance(tree, list):
            return [self.read(child, depth + 1) for child in tree]
        if not isinstance(tree, dict):
            return tree
        fields = {_text(key): value for key, value in tree.items()}
        for mark, read in self._marks().items():
            if mark in fields:
                self._arrays += 1
                if self._arrays > self.limits.arrays:
                    raise MessageError(f"the message has more than {self.limits.arrays} arrays")
                return read(fields)
        return {key: self.read(value, depth + 1) for key, value in fields.items()}

    def _marks(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "__ndarray__": self._array,
            "__npgeneric__": _scalar,
            "__image__": self._image,
            "__numpy__": self._json_array,
        }

    def _array(self, fields: dict[str, Any]) -> NDArray[Any]:
        data = fields.get("data")
        dtype = _dtype(fields)
        shape = self._shape(fields)
        if not isinstance(data, bytes):
            raise MessageError("an array without data")
        self._allocate(math.prod(shape) * dtype.itemsize, len(data))
        if dtype.kind == "b":  # a byte other than 0 and 1 is no boolean
            array = np.frombuffer(data, np.uint8) != 0
            array.flags.writeable = False
        else:
            array = np.frombuffer(data, dtype)
        if not dtype.isnative:
            array = array.astype(dtype.newbyteorder("="))
            array.flags.writeable = False
        return array.reshape(shape)

    def _json_array(self, fields: dict[str, Any]) -> NDArray[Any]:
        try:
            data = base64.b64decode(fields["__numpy__"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise MessageError("an array whose data is not base64") from None
        return self._array({**fields, "data": data})

    def _image(self, fields: dict[str, Any]) -> NDArray[np.uint8]:
        """Decode an image; its header, which is read first, must agree with the shape."""
        data = fields.get("data")
        shape = self._shape(fields)
        name = fields.get("format")
        name = _text(name) if isinstance(name, bytes) else name
        if name == "raw":
            return self._array(fields)
        if (
            name not in ("png", "jpeg")
            or not isinstance(data, bytes)
            or len(shape) != 3
            or shape[2] not in MODES
        ):
            raise MessageError("an image is raw, png or jpeg, of shape [H, W, 1, 3 or 4]")
        self._allocate(math.prod(shape))
        image = read_image(data, math.prod(shape), (name.upper(),), shape[2])
        if image.shape != shape:
            raise MessageError(f"an image of another size than its shape, {shape[0]}x{shape[1]}")
        return image

    def _shape(self, fields: dict[str, Any]) -> tuple[int, ...]:
        shape = fields.get("shape")
        if not isinstance(shape, list | tuple) or len(shape) > self.limits.dims:
            raise MessageError(
                f"the shape of an array is a list of at most {self.limits.dims} numbers"
            )
        if any(type(size) is not int or not 0 <= size <= self.limits.size for size in shape):
            raise MessageError(
                f"the shape of an array has a number that is not an integer from 0 to {self.limits.size}"
            )
        return tuple(shape)

    def _allocate(self, size: int, byte_count: int | None = None) -> None:
        if byte_count is not None and size != byte_count:
            raise MessageError(f"an array has {byte_count} bytes, its shape and dtype need {size}")
        self._bytes += size
        if self._bytes > self.limits.size:
            raise MessageError(f"the arrays of the message have more than {self.limits.size} bytes")


def _scalar(fields: dict[str, Any]) -> Any:
    dtype = _dtype(fields)
    value = fields.get("data")
    if not isinstance(value, bool | int | float):
        raise MessageError("a scalar that is not a number")
    try:
        return dtype.type(value)
    except (OverflowError, ValueError):
        raise MessageError(f"a scalar that is no {dtype.name}") from None


def _dtype(fields: dict[str, Any]) -> np.dtype[Any]:
    name = fields.get("dtype")
    name = _text(name) if isinstance(name, bytes) else name
    if not isinstance(name, str) or name not in DTYPES:
        raise MessageError(
            f"an array of dtype {str(name)[:20]!r}: only booleans, integers and floats are accepted"
        )
    return DTYPES[name]


def _allowed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.str not in DTYPES:
        raise MessageError(
            f"an array of dtype {dtype} cannot be sent: only booleans, integers and floats"
        )
    return dtype


def _text(data: Any) -> str:
    try:
        return data if isinstance(data, str) else bytes.decode(data)
    except (TypeError, UnicodeDecodeError):
        raise MessageError("binary data that is neither text nor an array") from None


def _no_extension(code: int, data: bytes) -> NoReturn:
    raise MessageError("msgpack extensions are not accepted")


def _no_constant(name: str) -> NoReturn:
    raise MessageError(f"{name} is not a JSON number")


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError:
        raise UserError(f"msgpack is not installed: {INSTALL}") from None
    return msgpack

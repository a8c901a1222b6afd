"""Messages of policy servers: golden frames, refusals, and no other exception on any bytes."""

from __future__ import annotations

import base64
import io
import json
import math
import sys
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vla.features.serving.array_messages import (
    DTYPES,
    LIMITS,
    Limits,
    MessageError,
    json_pack,
    json_unpack,
    pack,
    unpack,
)
from tests.skips import NOT_INSTALLED, missing

if missing("serve"):
    pytest.skip(f"{NOT_INSTALLED}serve", allow_module_level=True)
import msgpack

GOLDEN = bytes.fromhex(
    "81 b16f62736572766174696f6e2f7374617465 84 c40b5f5f6e6461727261795f5f c3 c40464617461 c408000000000000803f "
    "c4056474797065 a33c6634 c4057368617065 9102"
)
"""What openpi-client 0.1.2 sends for ``{"observation/state": np.array([0, 1], np.float32)}``."""
STATE = {"observation/state": np.array([0, 1], np.float32)}
GOLDEN_SCALAR = bytes.fromhex(
    "81a178 83 c40d5f5f6e7067656e657269635f5f c3 c40464617461 03 c4056474797065 a33c6938"
)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(
            same(found[key], wanted[key]) for key in wanted
        )
    if isinstance(wanted, np.ndarray):
        return (
            found.dtype == wanted.dtype
            and found.shape == wanted.shape
            and found.tobytes() == wanted.tobytes()
        )
    return type(found) is type(wanted) and found == wanted


def test_openpis_frames_byte_for_byte() -> None:
    assert pack(STATE) == GOLDEN
    assert same(unpack(GOLDEN), STATE)
    assert pack({"x": np.int64(3)}) == GOLDEN_SCALAR
    assert same(unpack(GOLDEN_SCALAR), {"x": np.int64(3)})
    assert pack({}) == b"\x80"
    assert pack({"x": np.float64(0.5)}) == pack({"x": 0.5}), "a float64 scalar is a float"


def test_vla_evals_frame_has_text_keys() -> None:
    frame = pack(STATE, text_keys=True)
    assert msgpack.unpackb(frame) == {
        "observation/state": {
            "__ndarray__": True,
            "data": STATE["observation/state"].tobytes(),
            "dtype": "<f4",
            "shape": [2],
        }
    }
    assert same(unpack(frame), STATE)
    assert pack({"x": np.int32(3)}, text_keys=True) == pack({"x": 3})


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_as_png(channels: int) -> None:
    image = np.random.default_rng(0).integers(256, size=(5, 7, channels), dtype=np.uint8)
    frame = pack({"image": image}, text_keys=True, png=True)
    assert msgpack.unpackb(frame)["image"]["format"] == "png"
    assert same(unpack(frame), {"image": image})


def test_images_as_jpeg_and_raw() -> None:
    from PIL import Image

    image = np.full((8, 6, 3), 100, np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG")
    marked = {"__image__": True, "format": "jpeg", "data": file.getvalue(), "shape": [8, 6, 3]}
    assert same(unpack(msgpack.packb(marked)), image)
    assert same(
        unpack(msgpack.packb({**marked, "format": "raw", "data": image.tobytes(), "dtype": "|u1"})),
        image,
    )


def test_json_numpy() -> None:
    said = json.loads(json_pack(STATE["observation/state"]))
    assert said == {
        "__numpy__": base64.b64encode(bytes.fromhex("000000000000803f")).decode(),
        "dtype": "<f4",
        "shape": [2],
    }
    assert same(json_unpack(json_pack(STATE).encode()), STATE)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_dtype_arrives_in_the_machines_byte_order(name: str, shape: tuple[int, ...]) -> None:
    array = np.arange(6)[: int(np.prod(shape))].reshape(shape).astype(DTYPES[name])
    found = unpack(
        msgpack.packb({"__ndarray__": True, "data": array.tobytes(), "dtype": name, "shape": shape})
    )
    assert found.dtype.isnative and found.shape == shape and not found.flags.writeable
    assert np.array_equal(found, array)


def array(**changes: Any) -> bytes:
    """The frame of an array of two float32, with changes."""
    return msgpack.packb(
        {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]} | changes
    )


def image(width: int, height: int, shape: list[int], data: bytes = b"") -> bytes:
    """The frame of a PNG of one chunk."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            len(content).to_bytes(4, "big")
            + name
            + content
            + zlib.crc32(name + content).to_bytes(4, "big")
        )

    header = chunk(
        b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    )
    png = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return msgpack.packb({"__image__": True, "format": "png", "data": png, "shape": shape})


BAD = {
    "empty": (b"", "not a msgpack message"),
    "truncated": (GOLDEN[:-1], "not a msgpack message"),
    "more after it": (GOLDEN + b"\x00", "not a msgpack message"),
    "reserved byte": (b"\xc1", "not a msgpack message"),
    "list of 4 billion": (b"\xdd\xff\xff\xff\xff", "not a msgpack message"),
    "map of 4 billion": (b"\xdf\xff\xff\xff\xff", "not a msgpack message"),
    "text of 4 billion": (b"\xdb\xff\xff\xff\xff", "not a msgpack message"),
    "extension": (msgpack.packb(msgpack.ExtType(5, b"")), "not accepted"),
    "time": (msgpack.packb(msgpack.Timestamp(5)), "not a msgpack message"),
    "number as key": (msgpack.packb({1: 2}), "not a msgpack message"),
    "binary that is no text": (msgpack.packb(b"\xff"), "neither text nor an array"),
    "key that is no text": (msgpack.packb({b"\xff": 1}), "neither text nor an array"),
    "deep": (b"\x91" * 9 + b"\x90", "nested"),
    "very deep": (b"\x91" * 100_000 + b"\x90", "not a msgpack message"),
    "many entries": (msgpack.packb([[0] * 2000] * 3), "entries"),
    "many arrays": (msgpack.packb([msgpack.unpackb(array())] * 65), "64 arrays"),
    "objects": (array(dtype="|O"), "dtype '|O'"),
    "records": (array(dtype="V8"), "dtype 'V8'"),
    "text dtype": (array(dtype="<U1"), "dtype '<U1'"),
    "dates": (array(dtype="<M8[s]"), "dtype '<M8"),
    "complex": (array(dtype="<c8", shape=[1]), "dtype '<c8'"),
    "a list as dtype": (array(dtype=[["f", "<f4"]]), "dtype"),
    "no dtype": (
        msgpack.packb({"__ndarray__": True, "data": bytes(8), "shape": [2]}),
        "dtype 'None'",
    ),
    "no data": (array(data=None), "without data"),
    "too little data": (array(data=bytes(7)), "7 bytes"),
    "too much data": (array(data=bytes(9)), "9 bytes"),
    "negative": (array(shape=[-2]), "not an integer"),
    "two negative": (array(shape=[-1, -2]), "not an integer"),
    "huge and empty": (array(shape=[2**62, 0], data=b""), "not an integer"),
    "fraction": (array(shape=[2.0]), "not an integer"),
    "boolean": (array(shape=[True, 2]), "not an integer"),
    "shape is a number": (array(shape=2), "a list"),
    "six dimensions": (array(shape=[1, 1, 1, 1, 1, 2]), "at most 5"),
    "scalar list": (
        msgpack.packb({"__npgeneric__": True, "data": [1], "dtype": "<f4"}),
        "not a number",
    ),
    "scalar out of range": (
        msgpack.packb({"__npgeneric__": True, "data": 300, "dtype": "|u1"}),
        "no uint8",
    ),
    "image of another size": (image(2, 2, [2, 3, 3]), "image"),
    "bomb": (image(30_000, 30_000, [30_000, 30_000, 3]), "more than"),
    "bomb that denies it": (image(30_000, 30_000, [2, 2, 3]), "image"),
    "damaged image": (image(2, 2, [2, 2, 3], b"xx"), "damaged"),
    "image of two channels": (image(2, 2, [2, 2, 2]), "of shape"),
    "unknown image": (
        msgpack.packb({"__image__": True, "format": "tiff", "data": b"", "shape": [1, 1, 3]}),
        "raw, png",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused_in_one_line(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(MessageError) as caught:
        unpack(data)
    assert (
        reason in str(caught.value)
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 200
    )


BAD_JSON = {
    "nothing": ("", "not a JSON"),
    "deep": ("[" * 3000 + "]" * 3000, "not a JSON"),
    "many": ("[" + "0," * 5000 + "0]", "entries"),
    "huge number": ("1" * 5000, "not a JSON"),
    "not a number": ("NaN", "NaN"),
    "not unicode": (b'"\xff"', "not a JSON"),
    "not base64": ('{"__numpy__": "?", "dtype": "<f4", "shape": []}', "base64"),
    "objects": ('{"__numpy__": "", "dtype": "|O", "shape": [0]}', "dtype"),
    "record": ('{"__numpy__": "", "dtype": [["x", "<f4"]], "shape": [0]}', "dtype"),
    "length": ('{"__numpy__": "AAAA", "dtype": "<f4", "shape": [1]}', "3 bytes"),
    "list as data": ('{"__numpy__": [1], "dtype": "<f4", "shape": [1]}', "base64"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json_is_refused_in_one_line(name: str) -> None:
    data, reason = BAD_JSON[name]
    with pytest.raises(MessageError) as caught:
        json_unpack(data)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_limits_on_size() -> None:
    small = Limits(size=100)
    for read, data in ((unpack, bytes(101)), (json_unpack, " " * 101)):
        with pytest.raises(MessageError, match="101 bytes"):
            read(data, small)
    big = np.zeros((100, 100, 3), np.uint8)
    with pytest.raises(MessageError, match="more than 20000 bytes"):  # compressed, it is small
        unpack(pack({"image": big}, text_keys=True, png=True), Limits(size=20_000))


def test_objects_are_not_sent() -> None:
    for thing in (np.array([None]), np.array(["a"]), object(), np.datetime64("2020"), {1}, 2**70):
        with pytest.raises(MessageError):
            pack({"x": thing})
    for thing in (np.array([None]), object(), np.array(["a"])):
        with pytest.raises(MessageError):
            json_pack({"x": thing})


def test_a_boolean_is_zero_or_one() -> None:
    found = unpack(array(data=b"\x02\x00", dtype="|b1"))
    assert found.view(np.uint8).tolist() == [1, 0]


def test_without_msgpack_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_vla.config.errors import UserError

    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(UserError, match=r"rlinf-vla\[serve\]"):
        unpack(GOLDEN)


arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: np.ones(shape, DTYPES[name].newbyteorder("="))
    )
)


def messages(infinity: bool) -> st.SearchStrategy[Any]:
    numbers = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=infinity)
    leaves = st.none() | st.booleans() | numbers | st.text(max_size=20) | arrays
    return st.recursive(
        leaves,
        lambda each: (
            st.lists(each, max_size=3) | st.dictionaries(st.text("abc/_", max_size=5), each)
        ),
        max_leaves=8,
    )


@given(messages(infinity=True))
def test_messages_arrive_as_sent(message: Any) -> None:
    for text_keys in (False, True):
        found = unpack(pack(message, text_keys), Limits(depth=20))
        assert pack(found) == pack(message)


@given(messages(infinity=False))
def test_messages_arrive_as_sent_in_json(message: Any) -> None:
    assert json_pack(json_unpack(json_pack(message), Limits(depth=20))) == json_pack(message)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_in_json_is_refused(number: float) -> None:
    with pytest.raises(MessageError, match="is not a JSON number"):
        json_unpack(json_pack({"x": number}))


seeds = st.sampled_from(
    [
        GOLDEN,
        pack(STATE, text_keys=True),
        *(data for data, _ in BAD.values() if 0 < len(data) < 1000),
    ]
)


@settings(max_examples=1000)
@given(
    st.binary(max_size=200) | seeds,
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 200),
)
def test_any_bytes_are_read_or_refused(
    data: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    changed = bytearray(data)
    for place, value in changes:
        if changed:
            changed[place % len(changed)] = value
    for frame in (bytes(changed), bytes(changed[:cut])):
        try:
            unpack(frame)
        except MessageError as error:
            assert "\n" not in str(error)


@given(
    st.text(max_size=200)
    | st.sampled_from(
        [json_pack(STATE), *(text for text, _ in BAD_JSON.values() if isinstance(text, str))]
    )
)
def test_any_json_is_read_or_refused(text: str) -> None:
    for each in (text, text[:-1], text.replace("[", "{", 1)):
        try:
            json_unpack(each)
        except MessageError as error:
            assert "\n" not in str(error)


def test_no_small_message_takes_much_memory() -> None:
    """The worst: lists in lists, each one byte on the wire and 56 bytes in memory."""
    frames = [
        msgpack.packb([[]] * 4000),
        b"\xdc\x0f\xa0" * 1000,
        *(data for data, _ in BAD.values()),
    ]
    for frame in frames:
        tracemalloc.start()
        try:
            unpack(frame)
        except MessageError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 48 << 20, frame[:20]
    assert LIMITS.size == 64 << 20

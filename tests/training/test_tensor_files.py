"""Files that are written and read one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from rlinf_vla.training.checkpoint import opened, write_parts
from rlinf_vla.training.ranks import Spread

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    spread = Spread(tensors)
    write_parts(spread, spread.parts(), path)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_the_library_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, described: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    tensors = {
        name: (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)
        for name, (dtype, shape) in described.items()
    }
    path = tmp_path_factory.mktemp("file") / "some.safetensors"
    write(tensors, path)
    read = load_file(path)
    with opened(path) as stored:
        again = dict(stored)
    for loaded in (read, again):
        assert loaded.keys() == tensors.keys()
        for name, value in tensors.items():
            assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value)


def test_the_file_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "b.x": torch.randn(3, 4),
        "a": torch.randn(5),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "step": torch.tensor(3.0),
        "é": torch.arange(3),
    }
    write(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_view_is_written_as_it_is_seen(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    write({"view": whole.T[1:]}, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["view"], whole.T[1:])


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    write({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "file")
    with opened(tmp_path / "file") as stored:
        assert list(stored) == ["a", "b"] and len(stored) == 2 and "c" not in stored
        assert torch.equal(stored["b"], torch.zeros(3))
        with pytest.raises(KeyError):
            stored["c"]


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    write({"a": torch.ones(200)}, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content[: len(content) // 2])
    with pytest.raises(SafetensorError), safe_open(tmp_path / "file", "pt"):
        pass

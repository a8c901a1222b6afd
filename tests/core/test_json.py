"""JSON of strangers is never nested more deeply than Python can follow: one line says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import parse_json, read_document
from rlinf_vla.features.planner.profile import read_profile
from rlinf_vla.training.checkpoint_files import verify

DEEP = ("[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000)


@pytest.mark.parametrize("text", DEEP)
def test_deeply_nested_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json(text)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


def recorded(path: Path) -> Any:
    return read_document(path, "give another")


def complete(path: Path) -> None:
    (path.parent / "COMPLETE").write_text(path.read_text())
    verify(path.parent)


@pytest.mark.parametrize("read", [recorded, read_profile, complete])
@pytest.mark.parametrize("text", DEEP[:2])
def test_files_that_are_nested_deeply_are_refused_in_one_line(
    tmp_path: Path, read: Callable[[Path], Any], text: str
) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read(tmp_path / "file.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300

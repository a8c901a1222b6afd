from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_vla.core import user_dirs


def test_state_has_one_folder_with_and_without_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_dirs.state() == tmp_path / ".local/state/rlinf-vla"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_dir=str(tmp_path)))
    assert user_dirs.state() == tmp_path / ".local/state/rlinf-vla"
    for given, found in (("/srv", Path("/srv/rlinf-vla")), ("~/kept", tmp_path / "kept/rlinf-vla")):
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert user_dirs.state() == found
    for none in ("", "relative"):  # relative to the current directory
        monkeypatch.setenv("XDG_STATE_HOME", none)
        assert user_dirs.state() == tmp_path / ".local/state/rlinf-vla"

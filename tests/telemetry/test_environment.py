from __future__ import annotations

import getpass
import json
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlinf_vla.telemetry import environment


def test_the_fingerprint_is_json_and_names_the_software() -> None:
    found = json.loads(json.dumps(environment.fingerprint()))
    assert found["packages"]["numpy"] == np.__version__
    assert found["cores"] >= 1 and found["memory_gb"] > 0 and found["cpu"]
    assert isinstance(found["gpus"], list) and isinstance(found["argv"], list)


def test_absent_software_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    monkeypatch.setattr(environment, "run", lambda *command: None)
    found = environment.fingerprint()
    assert found["packages"] == {"no-such-package": None}
    assert found["gpus"] == [] and found["git"] is None


def test_it_names_neither_the_machine_nor_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rlinf-vla", "train"])
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host")
    monkeypatch.setattr("platform.node", lambda: "secret-host")
    monkeypatch.setattr(getpass, "getuser", lambda: "secret-user")
    assert "secret" not in json.dumps(environment.fingerprint())


def test_the_commit_is_that_of_this_checkout_only(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert environment.git(tmp_path) is None
    git("init")
    assert environment.git(tmp_path) is None, "no commit yet"
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert environment.git(tmp_path) == {"commit": commit, "uncommitted_changes": False}
    (tmp_path / "file").write_text("2")
    assert environment.git(tmp_path) == {"commit": commit, "uncommitted_changes": True}
    inside = tmp_path / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert environment.git(inside) is None, "installed inside the checkout of another project"

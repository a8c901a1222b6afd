"""``rlinf-vla view`` on the command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.cli import main as cli
from rlinf_vla.core.sockets import listening_at
from rlinf_vla.features.view import command
from rlinf_vla.testing.algorithm import as_before
from tests.features.view.conftest import log
from tests.skips import needs


@pytest.fixture
def complaint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """The one line that a mistake is told in."""
    monkeypatch.chdir(tmp_path)

    def told(*arguments: str) -> str:
        with as_before():
            assert cli.run(["view", *arguments]) == 2
        found = capsys.readouterr().err
        assert found.count("\n") == 1
        return found.removeprefix("rlinf-vla: ").rstrip("\n")

    return told


def test_mistakes_are_one_line(
    complaint: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complaint().startswith("view: the following arguments are required: RUN|SWEEP|DATASET")
    assert complaint("--port", "x", ".").startswith("view: argument --port: invalid int value: 'x'")
    assert complaint("--port", "70000", ".").startswith(
        "view: --port 70000 is not between 0 and 65535"
    )
    monkeypatch.setattr(command, "PACKAGES", ("starlettt",))
    assert complaint(".") == "view needs starlettt: pip install 'rlinf-vla[serve]'"
    monkeypatch.setattr(command, "PACKAGES", ())
    for host in ("0.0.0.0", "::", "example.org"):
        assert complaint(".", "--host", host) == (
            f"--host {host} can be reached from other machines: give --token, which makes the address secret"
        )
    assert "no run in runs/ has a name that begins so" in complaint("nothing")


@needs("serve")
def test_what_cannot_be_shown_is_one_line(complaint: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").touch()
    assert complaint("notes").startswith("notes holds no run, no sweep and no dataset")
    (tmp_path / "run").mkdir()
    with listening_at("127.0.0.1", 0, "") as taken:
        port = str(taken.getsockname()[1])
        assert complaint("run", "--port", port) == (
            f"--host 127.0.0.1 --port {port}: Address already in use: choose another port, or an address of this machine"
        )


@needs("serve")
@pytest.mark.parametrize(
    ("options", "signum"), [((), signal.SIGINT), (("--token", "--host", "0.0.0.0"), signal.SIGTERM)]
)
def test_a_signal_ends_it_with_exit_code_0(
    tmp_path: Path, options: tuple[str, ...], signum: signal.Signals
) -> None:
    """Found by its short name; the printed address shows the page."""
    log(tmp_path / "runs" / "ppo" / "20261120-120000", range(1, 3))
    (tmp_path / "runs" / "ppo" / "20261120-120000" / "recipe.yaml").write_text("name: ppo\n")
    arguments = [sys.executable, "-m", "rlinf_vla.cli.main", "view", "ppo", "--port", "0", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True, **pipes
    ) as program:
        try:
            assert program.stdout is not None and program.stderr is not None
            line = program.stdout.readline()
            found = re.fullmatch(
                r"runs/ppo/20261120-120000: http://[\d.]+(:\d+/\S*) \(Ctrl-C ends\)\n", line
            )
            assert found is not None and ("token=" in line) == ("--token" in options), (
                line + program.stderr.read()
            )
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(f"http://127.0.0.1{found[1]}", timeout=60) as answer:
                assert b"Learning curves" in answer.read()
            program.send_signal(signum)
            out, err = program.communicate(timeout=60)
            assert (out, err, program.returncode) == ("", "", 0)
        finally:
            program.kill()


@needs("serve")
def test_a_browser_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import uvicorn

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    with as_before():
        assert cli.run(["view", str(tmp_path), "--port", "0", "--open"]) == 0
    assert opened and opened[0] in capsys.readouterr().out

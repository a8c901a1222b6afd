"""A program whose output nobody reads any more, as when Ctrl-C ends ``| tee log`` as well."""

from __future__ import annotations

import os
import subprocess
import sys


def unread(program: str) -> tuple[str, int]:
    """What it says on its standard error, and its exit code. When its input ends, nobody reads its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        said = process.stderr.read()
    return said, process.returncode

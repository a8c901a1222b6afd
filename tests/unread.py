"""Runs a program whose output is no longer read, as when Ctrl-C also ends ``| tee log``."""

from __future__ import annotations

import os
import subprocess
import sys


def unread(program: str) -> tuple[str, int]:
    """Its standard error and its exit code. After its input ends, its output is not read."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, text=True, **pipes
    ) as process:
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        process.stdout.close()
        process.stdin.close()
        said = process.stderr.read()
    return said, process.returncode

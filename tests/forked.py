"""Command lines in processes that are forked from one which has imported PyTorch, Hydra and Ray already.

For tests whose subject is what a command does. Tests of how a process begins or ends start one of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

IMPORTED = ("torch", "transformers", "hydra", "ray", "rlinf_vla.cli.main")


class Forked:
    """Runs command lines one after the other; the process that they are forked from lives until ``close``."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.forked"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, **pipes, text=True, start_new_session=True)  # type: ignore[call-overload]

    def __call__(
        self, words: Sequence[str], folder: Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``rlinf-vla`` with these words in ``folder`` until it ends, with changes to the environment variables."""
        with tempfile.TemporaryDirectory() as written:
            files = [Path(written, name) for name in ("out", "err")]
            known = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith("RAY_AUTH_")
            }  # Ray is imported there
            request = {
                "words": words,
                "folder": folder,
                "environment": known | environment,
                "path": sys.path,
                "files": files,
            }
            print(json.dumps(request, default=str), file=self._server.stdin, flush=True)
            child = None
            try:
                child = int(self._server.stdout.readline())
                code = int(self._server.stdout.readline())
            except (
                BaseException
            ):  # such as the time limit of a test; the next test is answered again
                with suppress(ProcessLookupError):
                    os.killpg(child or int(self._server.stdout.readline()), signal.SIGKILL)
                self._server.stdout.readline()
                raise
            return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))

    def close(self) -> None:
        self._server.communicate()


def serve() -> None:
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            run(**json.loads(line))
        os.setpgid(child, child)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(
    words: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    path: Sequence[str],
    files: Sequence[str],
) -> NoReturn:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate((os.devnull, *files)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    found = environment.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, found.split(os.pathsep)), *path]
    sys.argv = ["rlinf-vla", *words]
    from rlinf_vla.cli.main import main

    code = 1
    try:
        main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()

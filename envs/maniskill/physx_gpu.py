"""Fetch PhysX's GPU library, which SAPIEN's wheel lacks, before simulators start.

SAPIEN would download it itself, in ``enable_gpu`` of ``sapien/physx/__init__.py``: in every process
that finds none, at once, into its final place, and without looking at the status of the answer.
"""

from __future__ import annotations

import fcntl
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import child_process
from rlinf_vla.core.io import fsync

RELEASES = "https://github.com/sapien-sim/physx-precompiled/releases/download"
NAME = "libPhysXGpu_64.so"
PATIENCE_S = 20.0
"""Seconds to connect, and between two pieces of the download."""
_VERSION = "import sapien.physx; print(sapien.physx.version())"


@cache
def version() -> str:
    """Return the version of PhysX that the installed SAPIEN contains.

    Asked in a process of its own: SAPIEN loads Vulkan, which reads its environment only once.
    """
    program = child_process.command(["-c", _VERSION])
    environment = child_process.environment()
    asked = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def library() -> Path:
    """Return the file that SAPIEN loads; of this user and machine."""
    return Path.home() / ".sapien" / "physx" / version() / NAME


def address() -> str:
    """Return where the archive with the library is; a zip file with the library at its top."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    return f"{RELEASES}/{version()}/{'linux-aarch64-so.zip' if is_arm else 'linux-so.zip'}"


def fetch() -> None:
    """Download the library unless it is there. Of several processes, one does and others wait.

    Raises UserError if that is not possible.
    """
    path = library()
    if path.exists():
        return
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _download(folder)
    except (OSError, BadZipFile) as error:  # errors of requests are OSErrors
        raise UserError(
            f"PhysX's GPU library cannot be fetched ({error}): unzip {address()} into {folder}, or use env.backend=cpu"
        ) from None


def _download(folder: Path) -> None:
    import requests  # a requirement of SAPIEN

    # beside its final place, so that a rename moves it there, and only when it is whole
    with (
        tempfile.TemporaryDirectory(prefix="fetching-", dir=folder) as aside,
        requests.get(address(), stream=True, timeout=PATIENCE_S) as answer,
    ):
        answer.raise_for_status()
        size = int(answer.headers.get("Content-Length", 0))
        print(
            f"fetching PhysX's GPU library, once: {address()} ({size / 1e6:.0f} MB) into {folder}",
            file=sys.stderr,
            flush=True,
        )
        archive = Path(aside, "archive.zip")
        with archive.open("wb") as file:
            for piece in answer.iter_content(1 << 20):
                file.write(piece)
        unpacked = Path(aside, "unpacked")
        with ZipFile(archive) as opened:
            opened.extractall(unpacked)
        if not (unpacked / NAME).is_file():
            raise BadZipFile(f"no {NAME} in the archive")
        for path in sorted(unpacked.iterdir(), key=lambda path: path.name == NAME):
            fsync(path)
            path.rename(folder / path.name)  # the library last: whoever finds it finds all

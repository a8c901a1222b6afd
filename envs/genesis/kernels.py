"""Compile Genesis' kernels once per kind of scene and cache them on disk (about two minutes).

Genesis writes its kernels on an orderly shutdown, but simulator processes are killed. A separate
process therefore compiles first, once for all groups and workers of a machine. The cache also holds
Genesis' prepared meshes as pickles, so no other user may write to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import child_process

TIMEOUT_S = 1800.0


def cache_dir(configured: str | None) -> Path:
    """Folder of everything that Genesis and its graphics drivers cache between runs."""
    if configured:
        return Path(configured).expanduser().absolute()
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root or Path.home() / ".cache").expanduser().absolute() / "rlinf-vla" / "genesis"


def environment(folder: Path) -> dict[str, str]:
    """Variables added to the environment of a simulator process."""
    return {
        "XDG_CACHE_HOME": str(folder),
        "GS_CACHE_FILE_PATH": str(folder / "genesis"),
        "WANDB_MODE": "disabled",
    }


def compile_once(options: dict[str, Any], num_envs: int, folder: Path) -> None:
    """Compile the kernels of the scene unless they are cached.

    Raises UserError if the folder cannot be written or compiling takes too long, and RuntimeError
    if Genesis fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / f"compiled-{_fingerprint(options)}"
        with (folder / "lock").open("w") as lock:
            if marker.exists():
                return
            fcntl.flock(lock, fcntl.LOCK_EX)
            if marker.exists():
                return
            print(
                f"Genesis compiles its kernels for this scene: about 2 minutes, once (kept in {folder})",
                file=sys.stderr,
                flush=True,
            )
            _compile(options, num_envs, folder)
            marker.touch()
    except OSError as error:
        raise UserError(
            f"env.cache_dir={folder} cannot be written ({error.strerror}): set it to a folder of your own"
        ) from error


def _compile(options: dict[str, Any], num_envs: int, folder: Path) -> None:
    job = json.dumps({"options": options, "num_envs": num_envs})
    try:
        process = subprocess.run(
            child_process.command(["-m", "rlinf_vla.envs.genesis.simulator", "compile"]),
            input=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_process.environment({"OMP_NUM_THREADS": "1", **environment(folder)}),
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"Genesis did not compile its kernels within {TIMEOUT_S / 60:.0f} minutes (an idle core takes two): reduce the load"
        ) from None
    if process.returncode:
        words = "\n".join(process.stdout.splitlines()[-20:])
        raise RuntimeError(
            f"Genesis failed with exit code {process.returncode} while it compiled its kernels.\n{words}"
        )


def _fingerprint(options: dict[str, Any]) -> str:
    """Hash of everything that makes Genesis recompile.

    Which shapes can touch counts; their sizes and the cameras do not.
    """
    things = options["scene"]["objects"].values()
    shapes = sorted(
        f"{thing['shape']} {thing.get('fixed', False)} {thing.get('collision', True)}"
        for thing in things
    )
    facts = [
        options["backend"],
        version("genesis-world"),
        version("quadrants"),
        sys.version,
        *shapes,
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

"""Genesis' kernels: compiled once for a kind of scene, in about two minutes, and kept on disk.

They are written when Genesis shuts down in an orderly way. Simulator processes are ended without ceremony, so a process of its own compiles
first, once for all groups and workers of a machine. The folder also holds Genesis' prepared meshes, as pickles: it must be yours alone.
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

from rlinf_vla import child_process
from rlinf_vla.types import UserError

TIMEOUT_S = 1800.0


def cache_dir(configured: str | None) -> Path:
    """Where everything lies that Genesis (and the drivers that draw for it) keep between runs."""
    if configured:
        return Path(configured).expanduser().absolute()
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root or Path.home() / ".cache").expanduser().absolute() / "rlinf-vla" / "genesis"


def environment(folder: Path) -> dict[str, str]:
    """Added to a simulator process's environment variables."""
    return {"XDG_CACHE_HOME": str(folder), "GS_CACHE_FILE_PATH": str(folder / "genesis"), "WANDB_MODE": "disabled"}


def compile_once(options: dict[str, Any], num_envs: int, folder: Path) -> None:
    """Make sure that the scene's kernels are compiled. Raises UserError where the folder cannot be written or Genesis does not run here."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / f"compiled-{_fingerprint(options)}"
        with (folder / "lock").open("w") as lock:
            if marker.exists():
                return
            fcntl.flock(lock, fcntl.LOCK_EX)
            if marker.exists():
                return
            print(f"Genesis compiles its kernels for this scene: about 2 minutes, once (kept in {folder})", file=sys.stderr, flush=True)
            _compile(options, num_envs, folder)
            marker.touch()
    except OSError as error:
        raise UserError(f"env.cache_dir={folder} cannot be written ({error.strerror}): set it to a folder of your own") from error


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
            f"Genesis has compiled its kernels for {TIMEOUT_S / 60:.0f} minutes; a free core takes two: is the machine overloaded?"
        ) from None
    if process.returncode:
        words = "\n".join(process.stdout.splitlines()[-20:])
        raise RuntimeError(f"Genesis failed with exit code {process.returncode} while it compiled its kernels.\n{words}")


def _fingerprint(options: dict[str, Any]) -> str:
    """Changes with whatever Genesis may compile anew for: which shapes can touch, not how large they are or who looks."""
    things = options["scene"]["objects"].values()
    shapes = sorted(f"{thing['shape']} {thing.get('fixed', False)} {thing.get('collision', True)}" for thing in things)
    facts = [version("genesis-world"), version("quadrants"), sys.version, *shapes]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

"""Check the Genesis installation for ``rlinf-vla doctor``."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from rlinf_vla.core.protocols import Diagnosis

from .kernels import cache_dir

INSTALL = "pip install 'rlinf-vla[genesis]'"
NO_GL = "Genesis renders with OpenGL (EGL or OSMesa), which is missing: apt-get install libegl1 libgl1 libgl1-mesa-dri"


def gl() -> str | None:
    """Name of the OpenGL library that Genesis renders with; None if there is none."""
    return next((name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)), None)


def checks() -> Iterator[Diagnosis]:
    if find_spec("genesis") is None:
        yield Diagnosis("Genesis", False, "optional: not installed", INSTALL)
        return
    yield Diagnosis("Genesis", True, version("genesis-world"))
    yield Diagnosis("Genesis drawing", gl() is not None, gl() or "optional: neither EGL nor OSMesa", NO_GL)
    folder = cache_dir(None)
    compiled = len(list(folder.glob("compiled-*")))
    writable = os.access(next(parent for parent in (folder, *folder.parents) if parent.exists()), os.W_OK)
    detail = f"{compiled} kinds of scene compiled in {folder}" if writable else f"optional: {folder} cannot be written"
    yield Diagnosis("Genesis kernels", writable, detail, "set env.cache_dir to a folder of your own")

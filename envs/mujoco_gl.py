"""Find an OpenGL backend that renders without a display: EGL (GPU or llvmpipe), else OSMesa (CPU).

EGL and OSMesa render the same images.
"""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import dataclass

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import child_process

BACKENDS = ("egl", "osmesa")
NONE = "no OpenGL that renders without a screen: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6"
_PROBE = """
import mujoco
context = mujoco.GLContext(64, 64)
context.make_current()
from OpenGL import GL
print(GL.glGetString(GL.GL_RENDERER).decode())
"""


@dataclass(frozen=True)
class Renderer:
    backend: str
    name: str
    """Renderer name as reported by OpenGL."""


def environment(backend: str) -> dict[str, str]:
    """Environment variables of a simulator process; ``none`` disables rendering.

    EGL does not read CUDA_VISIBLE_DEVICES: all ranks would render on GPU 0.
    """
    if backend == "none":
        return {"MUJOCO_GL": "disable"}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    device = (
        {"MUJOCO_EGL_DEVICE_ID": os.environ.get("MUJOCO_EGL_DEVICE_ID", first)}
        if first.isdigit()
        else {}
    )
    # Mesa would otherwise write compiled shaders to the user's home directory.
    return {
        "MUJOCO_GL": backend,
        "PYOPENGL_PLATFORM": backend,
        "MESA_SHADER_CACHE_DISABLE": "true",
    } | device


def find(wanted: str, python: str | None, needed: bool = True) -> Renderer:
    """Find the renderer ``egl`` or ``osmesa``, or for ``auto`` the first that works.

    Raises UserError if none works and one is ``needed``.
    """
    for backend in BACKENDS if wanted == "auto" else (wanted,):
        name = renderer(backend, python)
        if name is not None:
            return Renderer(backend, name)
    if not needed:
        return Renderer("none", "none")
    raise UserError(
        NONE
        if wanted == "auto"
        else f"env.renderer={wanted} does not work here: use env.renderer=auto, or {NONE}"
    )


@functools.cache
def renderer(backend: str, python: str | None) -> str | None:
    """Test in a separate process: OpenGL makes later forks unsafe, and a driver may crash."""
    program = child_process.command(["-c", _PROBE], python)
    variables = child_process.environment(environment(backend))
    try:
        done = subprocess.run(
            program,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""Find an OpenGL backend that renders without a display: EGL (GPU or llvmpipe), else OSMesa (CPU).

EGL and OSMesa render the same images. EGL numbers GPUs in an order of its own, and on some drivers
several processes that draw on one GPU, or one that draws while CUDA computes there, hang or abort
(google-deepmind/mujoco issue 3444, allenai/vla-evaluation-harness pull request 106). So a GPU is
tried as it will be used.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import child_process

logger = logging.getLogger(__name__)

BACKENDS = ("egl", "osmesa")
NONE = "no OpenGL that renders without a screen: apt-get install libegl1 libgl1-mesa-dri, or libosmesa6"
ON_THE_CPU = ("llvmpipe", "softpipe", "swrast")
"""Parts of the names of renderers that use no GPU."""
DEVICE = "MUJOCO_EGL_DEVICE_ID"
MOST_AT_ONCE = 8
"""Processes of a trial, which is enough to see a driver hang."""
TRIAL_S = 120.0
"""Time limit of a trial: imports and 100 pictures per process."""

_PROBE = """
import ctypes, json, os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)

def cuda_devices():
    # EGL_EXT_device_query and EGL_NV_device_cuda: the CUDA device of each of EGL's, or None
    library = ctypes.CDLL("libEGL.so.1")
    library.eglGetProcAddress.restype = ctypes.c_void_p
    library.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    def function(name, *arguments):
        address = library.eglGetProcAddress(name)
        return ctypes.CFUNCTYPE(ctypes.c_uint, *arguments)(address) if address else lambda *_: 0
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_ssize_t
    query = function(b"eglQueryDevicesEXT", integer, pointer, pointer)
    attribute = function(b"eglQueryDeviceAttribEXT", pointer, integer, pointer)
    devices, count = (pointer * 64)(), integer()
    if not query(64, devices, ctypes.byref(count)):
        return []
    found = []
    for device in devices[:count.value]:
        cuda = number(-1)
        known = attribute(device, 0x323A, ctypes.byref(cuda))
        found.append(cuda.value if known else None)
    return found

import mujoco
context = mujoco.GLContext(64, 64)
context.make_current()
from OpenGL import GL
name = GL.glGetString(GL.GL_RENDERER).decode()
devices = []
if os.environ["MUJOCO_GL"] == "egl":
    try:
        devices = cuda_devices()
    except OSError:
        pass
print(json.dumps([name, devices]))
"""
_DRAW = """
import os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 256, 256)
for _ in range(100):
    renderer.update_scene(data)
    renderer.render()
getattr(renderer, "close", lambda: None)()
"""
CONTEXT = 0.25e9
"""Estimated bytes of a driver's context on a GPU, per process."""
COMPUTE = """
import torch
matrix = torch.rand(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("computing", flush=True)
while True:
    product = matrix @ matrix
    torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class Renderer:
    backend: str
    name: str
    """Renderer name as reported by OpenGL."""
    device: int | None = None
    """EGL's number of the GPU; None: EGL's first device."""

    @property
    def on_gpu(self) -> bool:
        return self.backend == "egl" and not any(part in self.name for part in ON_THE_CPU)

    def environment(self) -> dict[str, str]:
        """Environment variables of a simulator process; ``none`` disables rendering."""
        if self.backend == "none":
            return {"MUJOCO_GL": "disable"}
        device = {} if self.device is None else {DEVICE: str(self.device)}
        # Mesa would otherwise write compiled shaders to the user's home directory.
        return {
            "MUJOCO_GL": self.backend,
            "PYOPENGL_PLATFORM": self.backend,
            "MESA_SHADER_CACHE_DISABLE": "true",
        } | device


def find(wanted: str, python: str | None, needed: bool = True, processes: int = 1) -> Renderer:
    """Find the renderer ``egl`` or ``osmesa``, or for ``auto`` the first that works.

    ``processes``: those that will render at once. Raises UserError if none works and one is
    ``needed``.
    """
    for backend in BACKENDS if wanted == "auto" else (wanted,):
        probed = renderer(backend, python)
        if probed is None:
            continue
        name, devices = probed
        device = device_for(devices, os.environ) if backend == "egl" else None
        if device is not None:
            chosen = renderer(backend, python, device)
            if chosen is None:
                continue
            name, _ = chosen
        found = Renderer(backend, name, device)
        if not needed or not found.on_gpu or works_at_once(found, python, processes):
            return found
        trouble = (
            f"{name}: {min(processes, MOST_AT_ONCE)} processes that render there while CUDA "
            "computes hang or abort"
        )
        if wanted != "auto":
            raise UserError(f"env.renderer=egl: {trouble}; use env.renderer=auto or osmesa")
        logger.warning("%s: rendering with OSMesa on the CPU instead", trouble)
    if not needed:
        return Renderer("none", "none")
    raise UserError(
        NONE
        if wanted == "auto"
        else f"env.renderer={wanted} does not work here: use env.renderer=auto, or {NONE}"
    )


def device_for(devices: Sequence[int | None], variables: Mapping[str, str]) -> int | None:
    """Return EGL's number of the GPU to render on: the user's choice, else this process's GPU.

    ``devices``: for each of EGL's, the CUDA device that it is. A choice by MUJOCO_EGL_DEVICE_ID
    counts for all processes. Raises UserError if there is no such device.
    """
    chosen = variables.get(DEVICE, "")
    if chosen:
        if not chosen.isdecimal() or int(chosen) >= (len(devices) or 64):
            count = f"0 to {len(devices) - 1}" if devices else "numbers from 0"
            raise UserError(
                f"{DEVICE}={chosen}: EGL's devices are {count}; without the variable the policy's GPU is taken"
            )
        return int(chosen)
    visible = variables.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    if not visible.isdecimal() or int(visible) not in devices:
        return None
    return list(devices).index(int(visible))


def gpu_bytes(wanted: str, processes: int, scene: float) -> float:
    """Return the memory of a GPU that processes take to render on it, unless OSMesa is ``wanted``.

    ``scene``: bytes of a process's textures. A context of the driver is estimated.
    """
    return 0.0 if wanted == "osmesa" else processes * (CONTEXT + scene)


@functools.cache
def renderer(
    backend: str, python: str | None, device: int | None = None
) -> tuple[str, tuple[int | None, ...]] | None:
    """Return the renderer's name, and the CUDA device of each of EGL's; None if it does not work.

    ``device``: EGL's, None: its first. This is tried in a separate process, because OpenGL makes
    later forks unsafe, and a driver may crash.
    """
    program = child_process.command(["-c", _PROBE], python)
    variables = child_process.environment(Renderer(backend, "", device).environment())
    if device is None:
        variables.pop(DEVICE, None)
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
    if done.returncode != 0:
        return None
    name, devices = json.loads(done.stdout.splitlines()[-1])
    return str(name), tuple(devices)


@functools.cache
def works_at_once(found: Renderer, python: str | None, processes: int) -> bool:
    """Whether ``processes`` can render and read pictures while CUDA computes on this GPU."""
    program = child_process.command(["-c", _DRAW], python)
    variables = child_process.environment(found.environment())
    with computing():
        deadline = time.monotonic() + TRIAL_S
        drawing = [
            subprocess.Popen(
                program,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(min(processes, MOST_AT_ONCE))
        ]
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in drawing]
        except subprocess.TimeoutExpired:
            return False
        finally:
            for process in drawing:
                process.kill()
                process.wait()
    return not any(codes)


@contextmanager
def computing() -> Iterator[None]:
    """Compute on this process's first GPU within the context, if PyTorch sees one."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    load = subprocess.Popen(
        child_process.command(["-c", COMPUTE]),
        env=child_process.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert load.stdout is not None
    try:
        # The import of PyTorch takes longer than 100 pictures. A pipe is ready at its end, too.
        select.select([load.stdout], [], [], TRIAL_S)
        yield
    finally:
        load.kill()
        load.wait()
        load.stdout.close()

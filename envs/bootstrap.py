"""Start a simulator process in a Python environment that lacks ``rlinf_vla`` and PyTorch.

Usage: ``python bootstrap.py MODULE ...``, in an environment with the simulator and numpy.
``MODULE`` is relative to the folder above, ``envs.libero.simulator`` for example. This folder is
kept off ``sys.path``, where ``genesis/`` would shadow another module of that name.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


def stand_in() -> None:
    """Register an empty package ``rlinf_vla`` whose modules are found in the folder above."""
    package = types.ModuleType("rlinf_vla")
    package.__path__ = [str(HERE.parent)]
    sys.modules[package.__name__] = package


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    stand_in()
    del sys.argv[0]
    runpy.run_module(f"rlinf_vla.{sys.argv[0]}", run_name="__main__", alter_sys=True)

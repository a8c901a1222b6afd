"""Run a plug-in's module in a Python environment that lacks ``rlinf_vla`` and PyTorch.

Usage: ``python bootstrap.py MODULE ...``, in an environment with numpy and what the module drives.
``MODULE`` is ``envs.libero.simulator``, for example; of the engine it may use what needs nothing
else, such as ``core.channel``. This folder is taken off ``sys.path``, where ``types.py`` and
``io.py`` would replace the standard library's.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120  (pathlib imports ``types``)
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != HERE]

import runpy  # noqa: E402
import types  # noqa: E402
from pathlib import Path  # noqa: E402

ENGINE = Path(HERE).parent


def stand_in() -> None:
    """Register an empty package ``rlinf_vla``, whose modules are found where they are installed.

    In a source tree the plug-in packages are beside the engine.
    """
    package = types.ModuleType("rlinf_vla")
    package.__path__ = [str(ENGINE), str(ENGINE.parent)]
    sys.modules[package.__name__] = package


if __name__ == "__main__":
    stand_in()
    del sys.argv[0]
    runpy.run_module(f"rlinf_vla.{sys.argv[0]}", run_name="__main__", alter_sys=True)

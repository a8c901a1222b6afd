"""Run a plug-in's module in a Python environment that lacks ``rlinf_vla`` and PyTorch.

Usage: ``python bootstrap.py MODULE ...``, in an environment with numpy and what the module drives.
``MODULE`` is ``envs.libero.simulator``, for example; of the engine it may use what needs nothing
else, such as ``core.channel``. Empty packages replace its parent packages, so that their
``__init__`` does not run. This folder is taken off ``sys.path``, where ``types.py`` and ``io.py``
would replace the standard library's.
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


def run(module: str) -> None:
    """Run ``module`` as ``__main__``; ``sys.argv`` must already be the one it expects."""
    stand_in_for(module)
    runpy.run_module(f"rlinf_vla.{module}", run_name="__main__", alter_sys=True)


def stand_in_for(module: str) -> None:
    """Register empty packages in place of the parent packages of ``module``."""
    package, *inner = module.split(".")[:-1]
    installed, in_sources = ENGINE / package, ENGINE.parent / package
    folder = installed if installed.is_dir() else in_sources
    _stand_in("rlinf_vla", ENGINE)
    for depth in range(len(inner) + 1):
        _stand_in(".".join(["rlinf_vla", package, *inner[:depth]]), folder.joinpath(*inner[:depth]))


def _stand_in(name: str, folder: Path) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


if __name__ == "__main__":
    del sys.argv[0]
    run(sys.argv[0])

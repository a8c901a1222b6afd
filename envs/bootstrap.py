"""Start a simulator process in a Python environment that lacks ``rlinf_vla`` and PyTorch.

Usage: ``python bootstrap.py MODULE ...``, in an environment with the simulator and numpy.
``MODULE`` is relative to this folder, ``libero.simulator`` for example. Empty packages replace its
parent packages, so that their ``__init__`` (which need PyTorch) do not run. This folder is kept off
``sys.path``, where ``types.py`` or ``genesis/`` would shadow other modules of that name.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE = next(folder for folder in (HERE.parent, HERE.parent / "rlinf_vla") if (folder / "core").is_dir())
"""The folder of ``rlinf_vla``: when installed it holds this one, in the sources it is beside it."""
PACKAGE = "rlinf_vla.envs"


def run(module: str) -> None:
    """Run ``module`` as ``__main__``; ``sys.argv`` must already be the one it expects."""
    stand_in_for(module)
    runpy.run_module(f"{PACKAGE}.{module}", run_name="__main__", alter_sys=True)


def stand_in_for(module: str) -> None:
    """Register empty packages in place of the parent packages of ``module``."""
    _stand_in("rlinf_vla", ENGINE)
    _stand_in(PACKAGE, HERE)
    *parents, _ = module.split(".")
    for depth in range(len(parents)):
        _stand_in(".".join([PACKAGE, *parents[: depth + 1]]), HERE.joinpath(*parents[: depth + 1]))


def _stand_in(name: str, folder: Path) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    del sys.argv[0]
    run(sys.argv[0])

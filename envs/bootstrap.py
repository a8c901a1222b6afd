"""How a simulator process starts in a Python environment that has the simulator and numpy, but not us: ``python bootstrap.py MODULE ...``.

``MODULE`` is relative to this folder, ``libero.simulator`` for example. Its packages are stood in for by empty ones, so that their
``__init__`` (which need PyTorch) do not run, and nothing of ours gets on ``sys.path``, where ``types.py`` or ``genesis/`` would be taken
for others' modules of that name.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "rlinf_vla.envs"


def run(module: str) -> None:
    """Run ``module`` as ``__main__``; ``sys.argv`` must begin as its own."""
    stand_in_for(module)
    runpy.run_module(f"{PACKAGE}.{module}", run_name="__main__", alter_sys=True)


def stand_in_for(module: str) -> None:
    """Put empty packages in the place of those that ``module`` is in."""
    _stand_in("rlinf_vla", None)
    _stand_in(PACKAGE, HERE)
    *parents, _ = module.split(".")
    for depth in range(len(parents)):
        _stand_in(".".join([PACKAGE, *parents[: depth + 1]]), HERE.joinpath(*parents[: depth + 1]))


def _stand_in(name: str, folder: Path | None) -> None:
    package = types.ModuleType(name)
    package.__path__ = [] if folder is None else [str(folder)]
    sys.modules[name] = package


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    del sys.argv[0]
    run(sys.argv[0])

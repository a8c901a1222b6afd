"""How a process beside the arm starts: ``python bootstrap.py ENGINE MODULE ...``, also where Python has numpy and a driver, but not us.

``ENGINE`` is the folder of the engine, of which the modules use ``robot.py``, ``rotations.py`` and ``places.py``; ``MODULE`` is relative to
this folder.
Their packages are stood in for by empty ones, so that nothing of ours but what they name is imported, PyTorch least of all.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(engine: str, module: str) -> None:
    """Run ``module`` as ``__main__``; ``sys.argv`` must begin as its own."""
    for name, folder in (("rlinf_vla", engine), ("rlinf_vla.robots", str(HERE))):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    runpy.run_module(f"rlinf_vla.robots.{module}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    engine, module = sys.argv[1:3]
    del sys.argv[:2]
    run(engine, module)

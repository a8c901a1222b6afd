"""Run a module of ``robots`` in a Python that has numpy and a driver but not ``rlinf_vla``.

``python bootstrap.py ENGINE MODULE ...``: ``ENGINE`` is the folder of the package ``rlinf_vla``,
of which such modules use ``core.robot``, ``core.rotations`` and ``core.user_dirs``; ``MODULE`` is
relative to this folder. Empty packages replace both parents, so that nothing but what the module
names is imported, in particular not PyTorch.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(engine: str, module: str) -> None:
    """Run ``module`` as ``__main__``; ``sys.argv`` must already be its own."""
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

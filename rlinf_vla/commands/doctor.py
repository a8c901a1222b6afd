"""``rlinf-vla doctor``: does this machine have what the recipes need, and what mends it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rlinf_vla import plugins
from rlinf_vla.protocols import Diagnosis
from rlinf_vla.types import UserError

FREE_GIB = 2


def run(arguments: Sequence[str]) -> int:
    """Prints every check; ``--fix`` repairs what can be repaired. Returns 1 while something needed is wrong."""
    unknown = [argument for argument in arguments if argument != "--fix"]
    if unknown:
        raise UserError(f"doctor {unknown[0]}: the only option is --fix")
    wrong = 0
    for check in _checks():
        if not check.ok and check.repair and "--fix" in arguments:
            print(f"mend  {check.name}: {check.detail}; mending", flush=True)
            check.repair()
            check = next(again for again in _checks() if again.name == check.name)
        optional = check.detail.startswith("optional")
        print(f"{'ok   ' if check.ok else 'note ' if optional else 'WRONG'} {check.name}: {check.detail}", flush=True)
        if not check.ok and check.mend:
            print(f"      {check.mend}")
        wrong += not check.ok and not optional
    return 1 if wrong else 0


def _checks() -> Iterator[Diagnosis]:
    yield Diagnosis("python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer")
    yield torch_check()
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Diagnosis("disk", free >= FREE_GIB, f"{free:.0f} GiB free here", f"free {FREE_GIB} GiB, or work in another folder")
    for env in plugins.envs().values():
        yield from env.diagnose()
    for robot in plugins.robots().values():
        yield from (Diagnosis(found.name, found.ok, found.detail, found.mend) for found in robot.diagnose())


def torch_check() -> Diagnosis:
    """A later install of anything that needs torchvision can leave one that breaks transformers, or replace a CPU PyTorch."""
    mend = "pip install -c constraints.txt torch, and pip uninstall -y torchvision"
    device = f"CUDA ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "CPU"
    if torch.version.cuda and not torch.cuda.is_available():
        return Diagnosis("torch", True, f"{torch.__version__} on the CPU, though built for CUDA {torch.version.cuda}")
    if importlib.util.find_spec("torchvision"):
        try:
            import torchvision  # noqa: F401
        except (RuntimeError, OSError) as error:
            return Diagnosis("torch", False, f"torchvision does not fit this PyTorch ({str(error).splitlines()[0]})", mend)
    try:
        transformers = version("transformers")
    except PackageNotFoundError:
        return Diagnosis("torch", False, "transformers is not installed", "pip install rlinf-vla again")
    return Diagnosis("torch", True, f"{torch.__version__} on {device}, transformers {transformers}")

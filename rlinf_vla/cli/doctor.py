"""Check that this machine has what the recipes need, and print fixes (``rlinf-vla doctor``)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Diagnosis
from rlinf_vla.telemetry.tables import JSON, print_json

FIX = "--fix"
FREE_GIB = 2


class Driver(NamedTuple):
    """PyTorch's build for a driver of NVIDIA."""

    least: int
    """Major version from which on the driver runs it."""
    cuda: str


DRIVERS = (Driver(580, "13.0"), Driver(525, "12.9"))
"""Newest first. docs.nvidia.com/deploy/cuda-compatibility, "Minor version compatibility"."""


def run(arguments: Sequence[str]) -> int:
    """Print every check; ``--fix`` runs the repairs, and goes on where an optional one fails.

    Returns 1 while a required check fails.

    With ``--json``, a list of objects: name, ok, optional, detail, fix.
    """
    unknown = [argument for argument in arguments if argument not in (FIX, JSON)]
    if unknown:
        raise UserError(f"doctor {unknown[0]}: the options are {FIX} and {JSON}")
    if {FIX, JSON} <= set(arguments):
        raise UserError(f"doctor {FIX} {JSON}: a repair prints what it does, give one of the two")
    results = []
    for check in _checks():
        if not check.ok and check.repair and FIX in arguments:
            print(f"fix   {check.name}: {check.detail}; repairing", flush=True)
            try:
                check.repair()
            except UserError as error:
                if not check.detail.startswith("optional"):
                    raise
                print(f"      {error}", flush=True)
            check = next(again for again in _checks() if again.name == check.name)
        optional = check.detail.startswith("optional")
        results.append(
            {
                "name": check.name,
                "ok": check.ok,
                "optional": optional,
                "detail": check.detail,
                "fix": check.fix,
            }
        )
        if JSON not in arguments:
            print(
                f"{'ok   ' if check.ok else 'note ' if optional else 'WRONG'} {check.name}: {check.detail}",
                flush=True,
            )
            if not check.ok and check.fix:
                print(f"      {check.fix}")
    if JSON in arguments:
        print_json(results)
    return 1 if any(not result["ok"] and not result["optional"] for result in results) else 0


def _checks() -> Iterator[Diagnosis]:
    yield Diagnosis(
        "python",
        sys.version_info >= (3, 11),
        sys.version.split()[0],
        "install Python 3.11 or newer",
    )
    yield torch_check()
    if torch.cuda.is_available():
        yield fused_kernels_check()
    yield timm_check()
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Diagnosis(
        "disk",
        free >= FREE_GIB,
        f"{free:.0f} GiB free here",
        f"free {FREE_GIB} GiB, or work in another folder",
    )
    for env in plugins.envs().values():
        yield from env.diagnose()
    for robot in plugins.robots().values():
        yield from (
            Diagnosis(diagnosis.name, diagnosis.ok, diagnosis.detail, diagnosis.fix)
            for diagnosis in robot.diagnose()
        )


def fused_kernels_check() -> Diagnosis:
    installed = importlib.util.find_spec("liger_kernel") is not None
    detail = (
        "liger-kernel"
        if installed
        else "optional, liger-kernel is not installed: policy calls and updates take a fifth to a quarter more time"
    )
    return Diagnosis("fused kernels", installed, detail, 'pip install "rlinf-vla[cuda]"')


def timm_check() -> Diagnosis:
    installed = importlib.util.find_spec("timm") is not None
    detail = "timm"
    if not installed:
        detail = "optional, timm is not installed: model.options.encoder=timm:NAME needs it"
    return Diagnosis("timm", installed, detail, 'pip install "rlinf-vla[timm]"')


def unused_gpu(built_for: str | None, system: Path = Path("/")) -> Diagnosis | None:
    """Return what is wrong if this machine has an NVIDIA GPU that PyTorch does not see; else None.

    ``built_for``: the version of CUDA in PyTorch's build. ``system``: the root of ``/proc`` and
    ``/sys``.
    """
    driver = _driver(system)
    if driver is None and not _has_nvidia_gpu(system):
        return None
    detail = f"{torch.__version__} does not see this machine's NVIDIA GPU"
    if driver is None:
        fix = f"install NVIDIA's driver, {DRIVERS[0].least} or newer"
    elif (wheels := next((each for each in DRIVERS if driver >= each.least), None)) is None:
        fix = f"the driver {driver} is too old: install {DRIVERS[-1].least} or newer"
    elif built_for == wheels.cuda:
        fix = "CUDA_VISIBLE_DEVICES hides it, or a container was started without it: nvidia-smi says what the driver sees"
    else:
        detail += f" with the driver {driver}, as it is built for {f'CUDA {built_for}' if built_for else 'the CPU'}"
        index = f"https://download.pytorch.org/whl/cu{wheels.cuda.replace('.', '')}"
        fix = f"pip install --force-reinstall torch --index-url {index}"
    if built_for is None:
        detail = f"optional, {detail}"
    return Diagnosis("torch", False, detail, fix)


def _driver(system: Path) -> int | None:
    """Return the major version of NVIDIA's driver, or None."""
    said = system / "proc/driver/nvidia/version"
    found = re.search(r"Kernel Module\D+(\d+)\.", said.read_text()) if said.exists() else None
    return int(found[1]) if found else None


def _has_nvidia_gpu(system: Path) -> bool:
    """Whether a device of the PCI bus is a display or 3D controller of NVIDIA."""
    for vendor in system.glob("sys/bus/pci/devices/*/vendor"):
        kind = vendor.with_name("class")
        if vendor.read_text().strip() == "0x10de" and kind.read_text().startswith("0x03"):
            return True
    return False


def described_accelerator() -> str:
    """Return the type and name of PyTorch's accelerator; CPU without one."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None:
        return "CPU"
    name = getattr(torch.get_device_module(here), "get_device_name", None)
    return here.type.upper() + (f" ({name()})" if name else "")  # MPS has no name


def torch_check() -> Diagnosis:
    """Check PyTorch, torchvision and transformers.

    Installing a package that needs torchvision can leave one that breaks transformers, or replace a
    CPU build of PyTorch.
    """
    fix = "pip install -c constraints.txt torch, and pip uninstall -y torchvision"
    device = described_accelerator()
    if device == "CPU" and (unused := unused_gpu(torch.version.cuda)):
        return unused
    if importlib.util.find_spec("torchvision"):
        try:
            import torchvision  # noqa: F401
        except (RuntimeError, OSError) as error:
            return Diagnosis(
                "torch",
                False,
                f"torchvision does not fit this PyTorch ({str(error).splitlines()[0]})",
                fix,
            )
    try:
        transformers = version("transformers")
    except PackageNotFoundError:
        return Diagnosis(
            "torch", False, "transformers is not installed", "pip install rlinf-vla again"
        )
    return Diagnosis("torch", True, f"{torch.__version__} on {device}, transformers {transformers}")

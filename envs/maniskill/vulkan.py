"""Find or install a Vulkan driver that SAPIEN accepts; ManiSkill needs one even without rendering.

SAPIEN rejects Mesa's software drivers before 24.3, and Debian 12 has 22.3. ``install`` unpacks a
newer one next to the Python environment, without root and without changing the system. Environment
variables point simulator processes to it, only where the system's own driver is rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import child_process
from rlinf_vla.core.io import write_text

NO_DRIVER = "no Vulkan driver that SAPIEN accepts: run `rlinf-vla doctor --fix`"
NO_GPU = "Vulkan does not see the GPU on which ManiSkill's gpu backend renders"
INSTALL_FOR_GPU = "install the Vulkan part of NVIDIA's driver (libnvidia-gl; for a container NVIDIA_DRIVER_CAPABILITIES=all)"
_CHECK = "import sys, sapien; sapien.render.RenderSystem(sys.argv[1])"
_ICD_DIRS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
_PACKAGES = ("mesa-vulkan-drivers", "libvulkan1")
LIBRARIES = ("libx11-6", "libgl1", "libglib2.0-0")
"""Other libraries that SAPIEN and OpenCV load; minimal images lack them."""
_BACKPORTS = {("debian", "12"): "bookworm"}
"""Systems whose Mesa is too old, and the release whose backports have a newer one."""


@dataclass(frozen=True)
class Driver:
    render_backend: str
    """Value of ManiSkill's ``render_backend``: ``cpu`` or ``gpu``."""
    environment: dict[str, str]
    """Variables added to the environment of a simulator process."""
    name: str


def private_dir() -> Path:
    """Folder into which ``install`` unpacks the driver."""
    configured = os.environ.get("RLINF_VLA_VULKAN_DIR")
    return (
        Path(configured).absolute()
        if configured
        else Path(sys.prefix, "share", "rlinf-vla", "vulkan")
    )


def find() -> Driver | None:
    """Return the driver to use: the system's if SAPIEN accepts it, else ours, else None.

    A driver that was found is cached on disk.
    """
    memory = private_dir().parent / f"vulkan-{_fingerprint()}.json"
    try:
        return Driver(**json.loads(memory.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    candidates = [
        Driver("cpu", {}, "the system's software driver"),
        Driver("gpu", {}, "the system's GPU driver"),
    ]
    if _icd().exists():
        candidates.append(Driver("cpu", _environment(), f"lavapipe in {private_dir()}"))
    for driver in candidates:
        if accepted(driver):
            with contextlib.suppress(
                OSError
            ):  # if it cannot be kept, the check runs again next time
                write_text(memory, json.dumps(asdict(driver)))
            return driver
    return None


def sees_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these variables can render on its CUDA GPU.

    ``find`` does not tell: it takes a software driver that works, on a machine with a GPU too.
    """
    return accepted(Driver("gpu", dict(environment), "the system's GPU driver"))


def install() -> None:
    """Download and unpack lavapipe into ``private_dir()``, in seconds.

    Raises UserError if that is not possible.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise UserError(
            "no apt-get here: install Mesa's lavapipe Vulkan driver, 24.3 or newer, with your package manager"
        )
    target = private_dir()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="vulkan-", dir=target.parent) as temporary:
            root = Path(temporary, "root")
            for package in _download(Path(temporary, "apt")):
                _run(["dpkg", "-x", str(package), str(root)])
            library = next(root.glob("usr/lib/**/libvulkan_lvp.so"), None)
            if library is None:
                raise UserError(
                    "the package mesa-vulkan-drivers of this system contains no lavapipe driver"
                )
            for other in library.parent.glob("libvulkan_*.so"):
                if other != library:
                    other.unlink()  # GPU drivers, 100 MB
            icd = {"library_path": str(target / library.relative_to(root)), "api_version": "1.3.0"}
            (root / _icd().name).write_text(
                json.dumps({"file_format_version": "1.0.0", "ICD": icd})
            )
            shutil.rmtree(target, ignore_errors=True)
            root.rename(target)
    except OSError as error:
        raise UserError(
            f"cannot write {target} ({error.strerror}): set RLINF_VLA_VULKAN_DIR to a folder of your own"
        ) from error
    if find() is None:
        raise UserError(f"SAPIEN does not accept the Vulkan driver installed in {target} either")


def _icd() -> Path:
    return private_dir() / "lvp_icd.json"


def _environment() -> dict[str, str]:
    library = Path(json.loads(_icd().read_text())["ICD"]["library_path"])
    system_libraries = private_dir() / "lib" / library.parent.name
    folders = [str(library.parent), str(system_libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "VK_ICD_FILENAMES": str(_icd()),
        "VK_DRIVER_FILES": str(_icd()),
        "LD_LIBRARY_PATH": ":".join(filter(None, folders)),
    }


def accepted(driver: Driver) -> bool:
    """Test in a separate process, because the Vulkan loader reads its environment only once."""
    device = {"cpu": "cpu", "gpu": "cuda"}[driver.render_backend]
    program = child_process.command(["-c", _CHECK, device])
    environment = child_process.environment(driver.environment)
    try:
        check = subprocess.run(
            program, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return False
    return check.returncode == 0


def _fingerprint() -> str:
    """Hash of everything that may change the result of ``find``."""
    facts = [version("sapien"), sys.prefix, str(private_dir()), str(_icd().exists())]
    facts += [
        os.environ.get(name, "")
        for name in (
            "VK_ICD_FILENAMES",
            "VK_DRIVER_FILES",
            "LD_LIBRARY_PATH",
            "CUDA_VISIBLE_DEVICES",
        )
    ]
    for folder in _ICD_DIRS:
        facts += [f"{path} {path.stat().st_mtime}" for path in sorted(Path(folder).glob("*.json"))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _download(work: Path) -> list[Path]:
    """Fetch the driver and its missing dependencies, with private APT state.

    Needs no root and no locks, and does not change the system.
    """
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    options = {
        "Dir::State::Lists": str(work / "lists"),
        "Dir::Cache": str(work / "cache"),
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
    }
    release = _BACKPORTS.get(_system())
    if release is not None:
        sources = work / "sources.list"
        mirror = "http://deb.debian.org/debian"
        sources.write_text(
            "".join(f"deb {mirror} {suite} main\n" for suite in (release, f"{release}-backports"))
        )
        options |= {
            "Dir::Etc::SourceList": str(sources),
            "Dir::Etc::SourceParts": "-",
            "APT::Default-Release": f"{release}-backports",
        }
    apt = [
        "apt-get",
        "-qq",
        *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
    ]
    _run([*apt, "update"])
    _run(
        [
            *apt,
            "install",
            "--download-only",
            "--yes",
            "--no-install-recommends",
            "--reinstall",
            *_PACKAGES,
        ]
    )
    for library in LIBRARIES:  # one by one: names differ between releases
        if (
            subprocess.run(["dpkg-query", "--show", library], capture_output=True).returncode != 0
        ):  # not installed
            subprocess.run(
                [*apt, "install", "--download-only", "--yes", "--no-install-recommends", library],
                capture_output=True,
            )
    return sorted((work / "cache/archives").glob("*.deb"))


def _system() -> tuple[str, str]:
    try:
        facts = platform.freedesktop_os_release()
    except OSError:
        return "", ""
    return facts.get("ID", ""), facts.get("VERSION_ID", "")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = (
            [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("E:")]
            or done.stderr.splitlines()
            or [""]
        )
        raise UserError(f"{command[0]} failed while fetching the Vulkan driver: {lines[0]}")

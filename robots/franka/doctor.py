"""``rlinf-vla doctor`` checks for real and simulated arms: packages and kernel, no connection."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rlinf_vla.core.robot import Finding

from ..extra import INSTALL, LIBUSB

_REALTIME = Path("/sys/kernel/realtime")
"""Exists on kernels with PREEMPT_RT."""


def realtime() -> bool:
    return _REALTIME.exists() and _REALTIME.read_text().strip() == "1"


def of_an_arm() -> Iterator[Finding]:
    yield _package("franky", "franky", "franky-control")
    if find_spec("franky") is not None:
        words = "real time (PREEMPT_RT)" if realtime() else "optional: no real time, which a real arm needs and a simulated one does not"
        yield Finding("real-time kernel", realtime(), words, "boot a kernel with PREEMPT_RT")
    yield _package("OpenCV", "cv2", "opencv-python")
    yield _package("RealSense", "pyrealsense2", "pyrealsense2")


def of_a_simulated_one() -> Iterator[Finding]:
    yield _package("franky-sim", "franky_sim", "franky-sim")


def _package(name: str, module: str, distribution: str) -> Finding:
    if find_spec(module) is None:
        return Finding(name, False, "optional: not installed", INSTALL)
    try:
        importlib.import_module(module)
    except ImportError as error:  # installed but unusable
        text = " ".join(str(error).split())
        return Finding(name, False, f"optional: cannot be imported ({text})", LIBUSB if "libusb" in text else INSTALL)
    return Finding(name, True, version(distribution))

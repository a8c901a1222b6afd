"""Check the ManiSkill installation for ``rlinf-vla doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import torch

from rlinf_vla.core.protocols import Diagnosis

from . import vulkan
from .tasks import TASKS, asset_dir, missing_assets

INSTALL = "pip install 'rlinf-vla[maniskill]'"
NO_DRIVER = "no Vulkan driver that SAPIEN accepts: run `rlinf-vla doctor --fix`"
BRIDGE_DOWNLOAD = (
    "python -m mani_skill.utils.download_asset -y bridge_v2_real2sim && python -m mani_skill.utils.download_asset -y widowx250s"
)


def checks() -> Iterator[Diagnosis]:
    if find_spec("mani_skill") is None:
        yield Diagnosis("ManiSkill", False, "optional: not installed", INSTALL)
        return
    yield Diagnosis("ManiSkill", True, f"{version('mani_skill')} with SAPIEN {version('sapien')}")
    driver = vulkan.find()
    yield Diagnosis(
        "Vulkan driver",
        driver is not None,
        driver.name if driver else "none that SAPIEN accepts (Debian 12's own Mesa is too old)",
        "rlinf-vla doctor --fix",
        vulkan.install,
    )
    gpu = driver is not None and driver.render_backend == "gpu" and torch.cuda.is_available()
    yield Diagnosis(
        "ManiSkill on the GPU",
        gpu,
        "possible" if gpu else "optional: needs an NVIDIA GPU with its Vulkan driver; the cpu backend works without",
    )
    bridge = next(entry for entry in TASKS.values() if entry.bridge)
    missing = missing_assets(bridge, None)
    yield Diagnosis(
        "ManiSkill bridge tasks",
        not missing,
        f"optional: {missing[0]} is missing" if missing else f"assets in {asset_dir(None)}",
        BRIDGE_DOWNLOAD,
    )

"""Published rates of GPUs and simulators, and the shares of them that are assumed to be reached.

The sources were out of reach when it was written: the numbers are as we know them. A measured
profile replaces all of it. Of the shares, two were measured since on an H200, for openvla-7b with
fused kernels: 0.47 in training and 0.55 in calls without gradients (docs/results/gpu_findings.md).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peaks of a GPU.

    bf16, tf32, fp32: 10¹² FLOP/s of dense matrix products with float32 sums. bandwidth: 10⁹ bytes/s
    of its memory. memory: GB. host: 10⁹ bytes/s to main memory, one way. bus: bus bandwidth in 10⁹
    bytes/s of NCCL's all-reduce over the eight GPUs of a machine.
    """

    bf16: float
    tf32: float
    fp32: float
    bandwidth: float
    memory: float
    host: float
    bus: float


# Peaks: NVIDIA's datasheets, without their factor 2 for sparsity:
#   H100  https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
#   H200  https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446
#   A100  https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
#         nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
#   L4    https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet
#   L40S  https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
#   4090  https://images.nvidia.com/aem-dam/Solutions/geforce/ada/
#         nvidia-ada-gpu-architecture.pdf, appendix A
# host: 16 lanes of PCIe 5.0 (64) or 4.0 (32), in the same datasheets.
# bus: https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests (460 to 480, 230 to 250,
# and 35 to 45 over PCIe 5.0, of which PCIe 4.0 is taken to reach half).
DEVICES = {
    "nvidia-h100-80gb-hbm3": Device(989.4, 494.7, 66.9, 3350, 80, 64, 460),
    "nvidia-h100-pcie": Device(756.0, 378.0, 51.0, 2000, 80, 64, 35),
    "nvidia-h200": Device(989.4, 494.7, 66.9, 4800, 141, 64, 460),
    "nvidia-a100-sxm4-80gb": Device(312.0, 156.0, 19.5, 2039, 80, 32, 230),
    "nvidia-a100-sxm4-40gb": Device(312.0, 156.0, 19.5, 1555, 40, 32, 230),
    "nvidia-a100-80gb-pcie": Device(312.0, 156.0, 19.5, 1935, 80, 32, 17.5),
    "nvidia-l4": Device(121.0, 60.0, 30.3, 300, 24, 32, 17.5),
    "nvidia-l40s": Device(362.0, 183.0, 91.6, 864, 48, 32, 17.5),
    "nvidia-geforce-rtx-4090": Device(165.2, 82.6, 82.6, 1008, 24, 32, 17.5),
}
"""Type of GPU, as nodes of a cluster name it, to its peaks."""


@dataclass(frozen=True)
class Simulator:
    """Seconds on ``device``, a type in DEVICES, or of one core for one process (cpu).

    batch: per control step, whatever the number of environments. step: per control step of an
    environment. image, pixel: per image of an environment, and per pixel. reset: per environment on
    a core; on a GPU per batch, whatever its size.
    """

    device: str
    batch: float
    step: float
    image: float
    pixel: float
    reset: float

    def chunk(self, steps: int, images: int, pixels: int) -> tuple[float, float]:
        """Return the seconds, fixed and per environment, of ``steps`` control steps and then one
        observation of ``images`` images."""
        return steps * self.batch, steps * self.step + images * (self.image + pixels * self.pixel)


# ManiSkill on an RTX 4090: state of PickCube at 318,580 and 128x128 RGB at 18,549 frames/s with
# 4096 environments (https://maniskill.readthedocs.io, "Performance benchmarking"); FrankaBench with
# 640x480 RGB: 1331 frames/s with 4 environments, 3200 with 16, 5326 with 64, 6741 with 512
# (maniskill.csv of its repository, arXiv 2410.00425), which these numbers give within 5 %.
# No rate of a partial reset is published: ten control steps are taken.
_MANISKILL_GPU = Simulator("nvidia-geforce-rtx-4090", 2.5e-3, 3.1e-6, 4.9e-5, 3.1e-10, 2.5e-2)
# On one core, measured by this project (AMD EPYC, loaded, meshes of few triangles): a control step
# 3 ms; with an image of 64x64 pixels 5.4 ms, of 224x224 14 ms. A reset is assumed.
_MANISKILL_CPU = Simulator("cpu", 0.0, 3.0e-3, 1.6e-3, 1.9e-7, 6.0e-2)
# LIBERO: a process observes 7.3 times/s with two cameras, linear to 80 processes on one A100
# machine (https://github.com/allenai/vla-evaluation-harness, docs/reproductions). Without images a
# control step takes 10 ms and a reset 0.25 s of a core, measured by this project.
_LIBERO = Simulator("cpu", 0.0, 1.0e-2, 6.3e-2, 0.0, 0.25)
SIMULATORS = {
    ("maniskill", "gpu"): _MANISKILL_GPU,
    ("maniskill", "cpu"): _MANISKILL_CPU,
    ("libero", "cpu"): _LIBERO,
}
"""(environment plug-in, backend) to its published rates."""


@dataclass(frozen=True)
class Assumptions:
    """What no publication states for this project's code. ``studies/scale_study.py`` varies each.

    The shares of peaks are of whole calls, and so they cover kernels that neither multiply matrices
    nor read weights.
    """

    training: float = 0.4
    """Share of the matrix rate in forward and backward passes. Llama 3 reached 0.38 to 0.43 of an
    H100's (arXiv 2407.21783, table 4)."""
    inference: float = 0.4
    """Share of the matrix rate in calls without gradients."""
    bandwidth: float = 0.6
    """Share of the memory's bandwidth where an operation reads more than it computes."""
    host: float = 0.2
    """Share of the rate to main memory, for the pageable memory that weights are copied to."""
    dispatch: float = 1e-5
    """Seconds in which Python starts an operation without a CUDA graph; a pass takes no less."""
    simulation: float = 0.5
    """Share of a GPU simulator's rate on other GPUs than the published one: a H100 has few units
    that rasterise (its whitepaper: two TPCs)."""


ASSUMED = Assumptions()

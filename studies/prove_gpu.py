"""Measure on a GPU what has only been computed or rehearsed so far, and write .prove-gpu/gpu.md.

    python studies/prove_gpu.py [PART ...] [--device cpu --size tiny --results DIR --page FILE]

Needs no network and no installation of this repository: the machine's PyTorch, transformers and
peft, and what else a part imports. Pure Python packages that the machine lacks may lie in
``.prove-gpu/packages`` (``make gpu-packages`` on a machine with network). A part runs in a process
of its own, has ``LIMIT`` seconds, and keeps its numbers as a JSON file, so that parts can be run
one by one; the page is written from all that there are. ``--page docs/results/gpu.md`` writes this
project's page. Exit codes: 0; 1 if a part failed; 2 without a GPU, where nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".prove-gpu"
PACKAGES = KEPT / "packages"
LIMIT = 480
ENGINE = (
    "torch",
    "transformers",
    "peft",
    "numpy",
    "safetensors",
    "tokenizers",
    "hydra",
    "omegaconf",
    "rich",
    "psutil",
    "PIL",
)
TRAINING = (*ENGINE, "jinja2", "matplotlib", "tensorboard")
TESTS = ("pytest", *TRAINING)
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "conformance": (
        "The conformance suite of every packaged model, on the GPU",
        (*TESTS, "hypothesis"),
    ),
    "rehearsal": (
        "Two iterations of every algorithm and packaged model, on the toy environment",
        TESTS,
    ),
    "capture": ("Policy calls as CUDA graphs: the same bits as without", ENGINE),
    "fused": (
        "Fused kernels beside PyTorch's operations, in float32, relative errors",
        (*ENGINE, "liger_kernel"),
    ),
    "openvla": ("openvla-7b: policy calls", ENGINE),
    "oft": ("OpenVLA-OFT, chunks of 8, two images: policy calls", ENGINE),
    "pi0": ("π₀: policy calls", ENGINE),
    "pi05": ("π₀.₅: policy calls", ENGINE),
    "tails": ("OpenVLA-OFT and π₀: in which phase the slowest calls lose time", ENGINE),
    "update": ("openvla-7b with LoRA r32: updates", ENGINE),
    "profiles": ("Kernels that take the time", ENGINE),
    "memory": ("openvla-7b with LoRA r32: counted and measured memory", ENGINE),
    "finetune": ("π₀ in bfloat16: one update of all weights", ENGINE),
    "rendering": (
        "MuJoCo's pictures on the GPU, by several processes, beside CUDA",
        (*ENGINE, "mujoco", "OpenGL"),
    ),
    "rates": ("What the planner measures of a GPU, beside the published rates", ENGINE),
    "merging": ("openvla-7b: adapters merged again, and pictures through JPEG", ENGINE),
    "simulators": (
        "Memory that simulators take on the GPU: estimated and measured",
        (*TRAINING, "mani_skill"),
    ),
    "workers": (
        "Two iterations of PPO on Ray: roles in turns on one GPU; on two GPUs over NCCL",
        (*TRAINING, "mani_skill", "ray"),
    ),
    "maniskill": (
        "Two iterations of PPO on ManiSkill, its simulator on the CPU and on the GPU",
        (*TRAINING, "mani_skill"),
    ),
    "large": (
        "openvla-7b with LoRA r32 on ManiSkill's CPU simulator: two iterations of PPO as planned",
        (*TRAINING, "mani_skill"),
    ),
    "genesis": (
        "Two iterations of PPO on Genesis, its simulator on the GPU, and its environments alone",
        (*TRAINING, "genesis"),
    ),
}
"""Name -> heading on the page, and the modules that must be importable."""

BEGINNING = """# On a GPU

`make prove-gpu` measures this on a machine with one NVIDIA GPU ([how](../testing.md#on-a-gpu)).
What was found, fixed and left is in [gpu_findings.md](gpu_findings.md).
"""
NOT_YET = "**It has not run on a GPU yet: nothing here is proven.**\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"all, or some of {', '.join(PARTS)}"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--size", default="full", choices=("full", "tiny"), help="tiny: rehearse the kit itself"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of one measurement of latencies"
    )
    parser.add_argument("--results", type=Path, default=KEPT / "results")
    parser.add_argument("--page", type=Path, help="default: gpu.md beside the results")
    parser.add_argument(
        "--jobs", type=int, default=1, help="parts at a time: for those that measure no time"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a part")
    options = parser.parse_args(arguments)
    names = options.parts or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"{unknown[0]} is not a part: {', '.join(PARTS)}")
    if options.device == "cuda" and (problem := no_gpu()):
        print(f"prove-gpu: {problem}", file=sys.stderr)
        return 2
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    make_importable(results.parent / "links")
    statuses = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, document in zip(
            names, pool.map(lambda name: outcome(name, options, results), names), strict=True
        ):
            statuses.append(document["status"])
            print(f"{name}: {document['status']}", flush=True)
    page = options.page or results.parent / "gpu.md"
    page.write_text(written(results))
    print(f"written: {page}")
    return int(any(status.startswith(("failed", "ended")) for status in statuses))


def no_gpu() -> str | None:
    """Return why there is no usable GPU; None if there is one."""
    if find_spec("torch") is None:
        return "PyTorch is not installed: install torch >= 2.6 for CUDA"
    import torch

    return (
        None
        if torch.cuda.is_available()
        else "PyTorch sees no CUDA device here: run this on a machine with an NVIDIA GPU"
    )


def make_importable(folder: Path) -> None:
    """Make ``rlinf_vla`` and its plug-ins importable, in child processes too.

    Where it is not installed, links in ``folder`` stand in: the plug-in packages below the engine,
    and the entry points of pyproject.toml.
    """
    added = [str(ROOT)]
    if find_spec("rlinf_vla") is None or find_spec("rlinf_vla.models") is None:
        sys.modules.pop("rlinf_vla", None)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        places = project["tool"]["setuptools"]["package-dir"].items()
        links = {
            path.name: path for path in (ROOT / "rlinf_vla").iterdir() if path.name != "__pycache__"
        }
        links |= {name.partition(".")[2]: ROOT / path for name, path in places if "." in name}
        (folder / "rlinf_vla").mkdir(parents=True, exist_ok=True)
        for name, target in links.items():
            if not (link := folder / "rlinf_vla" / name).exists():
                link.symlink_to(target)
        metadata = folder / "rlinf_vla-0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlinf-vla\nVersion: 0\n")
        groups = project["project"]["entry-points"].items()
        lines = [
            [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
            for group, points in groups
        ]
        (metadata / "entry_points.txt").write_text(
            "\n".join(line for group in lines for line in group)
        )
        added.insert(0, str(folder))
    sys.path[:] = [*added, *sys.path, str(PACKAGES)]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*added, *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def outcome(name: str, given: argparse.Namespace, results: Path) -> dict[str, Any]:
    """Run a part in a process of its own. Returns, and stores, what became of it.

    Its log is beside the numbers. What the part measured before it failed, or its time was over,
    is kept.
    """
    file = results / f"{name}.json"
    began = time.monotonic()
    write(
        file,
        {
            "rows": [],
            "status": "running",
            "seconds": 0.0,
            "device": given.device,
            "size": given.size,
        },
    )
    missing = [module for module in PARTS[name][1] if find_spec(module) is None]
    status = f"not run: {', '.join(missing)} missing" if missing else ""
    if not missing:
        command = [
            sys.executable,
            str(ROOT / "studies" / "gpu_parts.py"),
            name,
            given.device,
            given.size,
            str(given.seconds),
            str(file),
        ]
        log = results / f"{name}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(given.limit)
                last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
                status = "done" if code == 0 else f"failed: {last[:200]}"
            except subprocess.TimeoutExpired:
                status = f"ended after {given.limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    document = json.loads(file.read_text()) | {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
    }
    write(file, document)
    return document


def write(file: Path, document: dict[str, Any]) -> None:
    """Write at once as a whole: the process may be killed at any time."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    new.replace(file)


def written(results: Path) -> str:
    """Return the page of all parts that have results."""
    lines = [BEGINNING]
    documents = {
        name: json.loads(file.read_text())
        for name in PARTS
        if (file := results / f"{name}.json").exists()
    }
    if not any(
        document["device"] == "cuda" and document["status"] == "done"
        for document in documents.values()
    ):
        lines.append(NOT_YET)
    for name, (heading, _) in PARTS.items():
        document = documents.get(name)
        lines += [f"## {heading}", ""]
        if document is None:
            lines += ["Not run.", ""]
            continue
        where = " · ".join(
            filter(
                None,
                [
                    document.get("machine"),
                    document["device"],
                    document["size"],
                    f"{document['seconds']:.0f} s",
                ],
            )
        )
        lines += [f"`make prove-gpu PARTS={name}`: **{document['status']}** ({where}).", ""]
        if document["rows"]:
            lines += [
                "| | measured | goal |",
                "|---|---|---|",
                *(f"| {' | '.join(row)} |" for row in document["rows"]),
                "",
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Train the official networks at full size on this machine's CPU, with random weights, and resume.

    python studies/rehearse_full_size.py [NAME ...]      # openvla-7b, oft-7b, pi0; all by default

For each network a checkpoint of random bfloat16 weights is written in the official layout, and
`rlinf-vla train` loads it, acts, takes optimiser steps on LoRA adapters with gradient
checkpointing, and writes checkpoints. The run then resumes from its first checkpoint, and must end
with the same bits. Needs 18 GB of main memory and 20 GB of disk, and half an hour for each network.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf_vla.core import plugins
from rlinf_vla.core.io import replacing_directory
from rlinf_vla.telemetry.measurement import resident
from rlinf_vla.telemetry.metrics import read_metrics
from rlinf_vla.training.checkpoint_files import COMPLETE, complete_checkpoints

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "rehearsal"
SHARD_BYTES = 5 * 10**9
DEVIATION = 0.02
"""Standard deviation of the random matrices, as the official configs initialise them."""
TRAINING = (
    *(
        "recipe=maniskill_ppo",
        "seed=0",
        "iterations=2",
        "evaluation.before_and_after=false",
        "checkpoints.every=1",
        "checkpoints.keep=2",
    ),
    *(
        "env.num_envs=2",
        "env.image_size=224",
        "env.control_mode=pd_ee_delta_pose",
        "rollout.batch_size=2",
    ),
    *("algorithm.value_warmup=0", "algorithm.epochs=1", "algorithm.minibatch_size=2"),
    *(
        "cluster=laptop",
        "cluster.rollout_threads=2",
        "cluster.micro_batch_size=1",
        "cluster.gradient_checkpointing=true",
    ),
    *(
        "model.options.dtype=bfloat16",
        "model.lora.rank=32",
        "model.lora.merge=false",
        "model.options.prompt_length=null",
    ),
)
MODELS = {
    "openvla-7b": ("openvla_7b", "openvla", ("env.episode_limit=1", "algorithm.horizon=1")),
    "oft-7b": (
        "openvla_7b",
        "openvla_oft",
        ("env.episode_limit=8", "algorithm.horizon=8", "model.options.chunk=8"),
    ),
    "pi0": (
        "pi0_3b",
        "pi0",
        (
            "env.episode_limit=10",
            "algorithm.horizon=10",
            "model.options.chunk=10",
            "model.options.frozen_vlm=false",
        ),
    ),
}
"""Name -> asset with the sizes, model plug-in, and the keys that differ: one policy call for each
environment and iteration."""


class Measured(NamedTuple):
    """seconds of a process, its peak resident memory without mapped files, what it printed."""

    seconds: float
    peak: int
    output: str


def write_random(directory: Path, model: str, options: Sequence[str]) -> None:
    """Write random bfloat16 weights of the network that ``directory`` describes."""
    plugin = plugins.choose("model", model, plugins.models())
    names = [
        option.removeprefix("model.options.").split("=")
        for option in options
        if option.startswith("model.options.")
    ]
    keys = {name: json.loads(value) for name, value in names if name != "dtype"}
    network = plugin.without_weights(directory, plugin.Config(**keys)).backbone
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, Tensor]] = [{}]
    places: dict[str, int] = {}
    total = room = 0

    def flush() -> None:
        save_file(
            shards[-1], directory / f"{len(shards):05d}.safetensors", metadata={"format": "pt"}
        )
        shards[-1] = {}

    for name, value in network.state_dict().items():
        size = 2 * value.numel()
        if shards[-1] and room + size > SHARD_BYTES:
            flush()
            shards.append({})
            room = 0
        tensor = torch.empty(value.shape, dtype=torch.bfloat16)
        if value.ndim > 1:
            tensor.normal_(0, DEVIATION, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        shards[-1][name], places[name] = tensor, len(shards)
        total, room = total + size, room + size
    flush()
    files = {name: f"{number:05d}.safetensors" for name, number in places.items()}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": files})
    )


def train(run_dir: Path, *arguments: str) -> Measured:
    """Run ``rlinf-vla train``. Raises SystemExit, with the end of its output, if it fails."""
    command = [
        str(Path(sys.executable).with_name("rlinf-vla")),
        "train",
        f"run_dir={run_dir}",
        *arguments,
    ]
    started = time.monotonic()
    peak = 0
    log = run_dir.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            with suppress(OSError, LookupError):  # it may end meanwhile
                peak = max(peak, resident("RssAnon", process.pid))
            time.sleep(0.2)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return Measured(time.monotonic() - started, peak, log.read_text())


def rehearse(name: str) -> list[Any]:
    """Train and resume the network; return its row. Raises SystemExit if bits differ."""
    sizes, model, own = MODELS[name]
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    run, again = folder / "run", folder / "resumed"
    for old in (run, again):
        shutil.rmtree(old, ignore_errors=True)
    if not (folder / "checkpoint").exists():
        with replacing_directory(folder / "checkpoint") as aside:
            shutil.copytree(ROOT / "assets" / sizes, aside, dirs_exist_ok=True)
            write_random(aside, model, own)
    arguments = (*TRAINING, *own, f"model={model}", f"model.checkpoint={folder / 'checkpoint'}")
    first = train(run, *arguments)
    shutil.copytree(run, again)
    begun, last = complete_checkpoints(again / "checkpoints")
    expected = (last / COMPLETE).read_text()  # the digests of all its files
    shutil.rmtree(last)
    resumed = train(again, *arguments, "resume=auto")
    if (last / COMPLETE).read_text() != expected:
        sys.exit(f"{name}: the resumed run does not end with the same weights")
    metrics = read_metrics(run)
    if not all(row["actor/grad_norm"] > 0 for row in metrics):
        sys.exit(f"{name}: the gradient is zero, so that this run shows nothing")
    weights, trained = re.search(r"([\d,]+) weights, ([\d,]+) of them", first.output).groups()  # type: ignore[union-attr]
    parity = re.search(r".*recomputed log-probabilities.*", first.output)
    print(parity[0] if parity else "no parity line")
    times = [
        sum(row[f"timing_s/{part}"] for row in metrics) / len(metrics)
        for part in ("rollout", "update")
    ]
    stored = sum(path.stat().st_size for path in begun.rglob("*") if path.is_file())
    cells = [
        name,
        weights,
        trained,
        f"{first.seconds:.0f}",
        f"{times[0]:.0f}",
        f"{times[1]:.0f}",
        f"{first.peak / 1e9:.1f}",
    ]
    return [*cells, f"{stored / 1e9:.2f}", f"{resumed.seconds:.0f}", f"{resumed.peak / 1e9:.1f}"]


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        print("|", " | ".join(rehearse(name)), "|", flush=True)


if __name__ == "__main__":
    main()

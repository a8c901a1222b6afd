"""Benchmark loading a large checkpoint: peak resident memory and seconds.

``rlinf-vla bench load`` writes a random checkpoint of more than a gigabyte and loads it on the CPU
in a separate process. It reports peak resident memory (VmHWM; ru_maxrss could include the parent's
peak), with and without the memory that the imports take.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import child_process, plugins
from rlinf_vla.core.protocols import Policy
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.recipes import asset_path
from rlinf_vla.telemetry.measurement import resident

SHARDS = 4
TIMEOUT = 1800


def run(config: DictConfig) -> None:
    """Make a checkpoint in a temporary directory, load it and print memory and time."""
    model = recipes.read_node(config, "model")
    chosen = {"name": model.name, "sizes": model.checkpoint, "options": asdict(model.options)}
    with tempfile.TemporaryDirectory(prefix="rlinf-vla-") as folder:
        in_process("make", folder, chosen)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        shards = len(list(Path(folder).glob("*.safetensors")))
        measurement = in_process("load", folder, chosen)
    peak = measurement["peak"]
    above = measurement["peak"] - measurement["baseline"]
    print(
        f"checkpoint: {model.name} of {model.checkpoint}, random, {size / 1e9:.2f} GB in {shards} shards; loaded on the CPU"
    )
    print(
        f"peak resident memory / checkpoint: {above / size:.3f} without the {measurement['baseline'] / 1e9:.2f} GB of the imports"
    )
    print(f"peak resident memory / checkpoint: {peak / size:.3f} with the imports")
    print(f"seconds to load: {measurement['seconds']:.1f}")


def in_process(stage: str, folder: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Run ``make`` or ``load`` in a process of its own; return its result. Raises UserError."""
    command = child_process.command(
        ["-m", "rlinf_vla.benchmarks.load", stage, folder, json.dumps(chosen)]
    )
    finished = subprocess.run(
        command, env=child_process.environment(), stdout=subprocess.PIPE, text=True, timeout=TIMEOUT
    )
    if finished.returncode:
        raise UserError(
            f"bench load: could not {stage} the checkpoint in {folder} (exit code {finished.returncode}, reason above)"
        )
    return json.loads(finished.stdout or "{}")


def _policy(directory: Path, chosen: dict[str, Any], random_weights: bool) -> Policy:
    model = plugins.choose("model", chosen["name"], plugins.models())
    return model.load(
        directory, replace(model.Config(**chosen["options"]), random_weights=random_weights)
    )


def make(folder: Path, chosen: dict[str, Any]) -> None:
    """Write random weights in SHARDS files with an index, as large checkpoints are published."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    _policy(asset_path(chosen["sizes"]), chosen, random_weights=True).save(folder)
    whole = folder / "model.safetensors"
    with safe_open(whole, "pt") as file:
        places = {
            key: f"model-{i % SHARDS + 1:05d}-of-{SHARDS:05d}.safetensors"
            for i, key in enumerate(file.keys())
        }
        for name in sorted(set(places.values())):
            save_file(
                {key: file.get_tensor(key) for key, shard in places.items() if shard == name},
                folder / name,
            )
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )


def load(folder: Path, chosen: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint; return memory before it and at its peak (bytes), and seconds."""
    with torch.device("meta"):  # does the imports of loading without allocating weights
        _policy(folder, chosen, random_weights=True)
    baseline = resident("VmRSS")
    started = time.perf_counter()
    policy = _policy(folder, chosen, random_weights=False)
    seconds = time.perf_counter() - started
    peak = resident("VmHWM")
    assert not any(value.is_meta for value in policy.state_dict().values())
    return {"baseline": baseline, "peak": peak, "seconds": seconds}


if __name__ == "__main__":
    stage = sys.argv[1]
    folder = Path(sys.argv[2])
    chosen = json.loads(sys.argv[3])
    if stage == "make":
        make(folder, chosen)
    else:
        print(json.dumps(load(folder, chosen)))

"""What a test of the command line compares of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlinf_vla.telemetry.metrics import read_metrics


def checkpoint(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """All weights and all optimiser state of a checkpoint."""
    files = sorted((run_dir / "checkpoints" / f"step_{step:06d}").rglob("*.safetensors"))
    assert files
    return {
        f"{file.name}:{name}": value for file in files for name, value in load_file(file).items()
    }


def assert_same_files(run_dir: Path, other: Path, step: int) -> None:
    """Complete checkpoints: names and bytes of all files. None contains a time, a path or a duration."""
    first, second = (
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (each / "checkpoints" / f"step_{step:06d}" for each in (run_dir, other))
    )
    assert (
        {"COMPLETE", "state.json", "optimizer.safetensors", "heads.safetensors"}
        <= first.keys()
        == second.keys()
    )
    assert [name for name in first if first[name] != second[name]] == []


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert (
        first.keys() == second.keys()
        and [name for name in first if not torch.equal(first[name], second[name])] == []
    )


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    timeless = [
        {k: v for k, v in line.items() if not k.startswith(("time", "timing", "throughput"))}
        for line in read_metrics(run_dir)
    ]
    return [line for line in timeless if "rollout/reward_mean" in line or "sft/loss" in line]

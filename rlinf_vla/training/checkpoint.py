"""Complete, atomic checkpoints: ``step_000100/{adapter/, heads.safetensors, optimizer.safetensors, state.json, COMPLETE}``.

Written aside, fsynced, then renamed: a directory of the final name is whole, whenever the writer was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlinf_vla.atomic import fsync
from rlinf_vla.protocols import Learner, Policy
from rlinf_vla.training.lora import adapter_state, copy_all, is_lora, load_adapter, read_tensors, save_adapter, write_tensors
from rlinf_vla.training.pieces import gathered
from rlinf_vla.training.ranks import rank
from rlinf_vla.training.soft_trainer import SoftTrainer
from rlinf_vla.training.trainer import Trainer
from rlinf_vla.types import Tensors, UserError

ADAPTER, HEADS, OPTIMIZER, STATE, COMPLETE = "adapter", "heads.safetensors", "optimizer.safetensors", "state.json", "COMPLETE"
EARLIER = "version_{}.safetensors"


def save_checkpoint(
    directory: Path,
    policy: Learner,
    trainer: Trainer | SoftTrainer,
    state: dict[str, Any],
    keep: int,
    earlier: Mapping[int, Tensors] | None = None,
) -> Path:
    """Write ``directory/step_<state["iteration"]>`` and delete all but the ``keep`` newest. ``state`` is JSON.

    ``earlier``: what trains, as it was in versions that still have rollouts to play (``algorithm.staleness``).

    Where ranks train together all must call it, and rank 0 writes: nothing tells how many they were.
    """
    final = directory / f"step_{state['iteration']:06d}"
    backbone = policy.backbone if isinstance(policy, Policy) and any(map(is_lora, trainer.parameters)) else None
    factors = gathered(adapter_state(backbone)) if backbone is not None else {}
    heads = gathered({name: p.detach() for name, p in trainer.parameters.items() if not is_lora(name)})
    moments = trainer.state()
    if rank() != 0:
        return final
    aside = directory / f".{final.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        if backbone is not None:
            save_adapter(backbone, factors, aside / ADAPTER)
        versions = {EARLIER.format(version): tensors for version, tensors in (earlier or {}).items()}
        for name, tensors in ({HEADS: heads, OPTIMIZER: moments} | versions).items():
            write_tensors(tensors, aside / name)
        (aside / STATE).write_text(json.dumps(state, indent=1) + "\n")
        digests = {str(path.relative_to(aside)): _digest(path) for path in sorted(aside.rglob("*")) if path.is_file()}
        (aside / COMPLETE).write_text(json.dumps(digests, indent=1) + "\n")
        for path in aside.rglob("*"):
            fsync(path)
        fsync(aside)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        fsync(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in complete_checkpoints(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def complete_checkpoints(directory: Path) -> list[Path]:
    """Oldest first."""
    found = {path.parent.name.removeprefix("step_"): path.parent for path in directory.glob(f"step_*/{COMPLETE}")}
    return [found[number] for number in sorted(filter(str.isdigit, found), key=int)]


def load_checkpoint(checkpoint: Path, policy: Learner, trainer: Trainer | SoftTrainer | None = None) -> dict[str, Any]:
    """Weights into ``policy`` (built with the same model.* settings), the optimiser's state into ``trainer``; returns the state.

    Raises UserError where the checkpoint is damaged or belongs to another model.
    """
    verify(checkpoint)
    adapted = (checkpoint / ADAPTER).exists()
    if adapted != any(is_lora(name) for name, _ in policy.named_parameters()):
        how = "with" if adapted else "without"
        raise UserError(f"{checkpoint} was trained {how} LoRA, model.lora.rank says otherwise: use its run's recipe")
    with torch.no_grad():
        if adapted and isinstance(policy, Policy):
            load_adapter(policy.backbone, checkpoint / ADAPTER)
        own = {name: p for name, p in policy.named_parameters() if p.requires_grad and not is_lora(name)}
        copy_all(load_file(checkpoint / HEADS), own, checkpoint)
    if trainer is not None:
        trainer.load_state(load_file(checkpoint / OPTIMIZER))
    return json.loads((checkpoint / STATE).read_text())


def load_earlier(checkpoint: Path) -> dict[int, Tensors]:
    """What ``save_checkpoint`` was given as ``earlier``."""
    return {int(path.stem.rpartition("_")[2]): load_file(path) for path in checkpoint.glob(EARLIER.format("*"))}


def save_heads(policy: Policy, directory: Path) -> None:
    """What a policy has outside its backbone, and an official layout has no place for: the critic, learnt noise."""
    write_tensors(_heads(policy), directory / HEADS)


def load_heads(policy: Policy, directory: Path) -> None:
    """The heads in ``directory``, where there are some. Raises UserError where they are another model's."""
    if not (directory / HEADS).exists():
        return
    with torch.no_grad():
        stored = read_tensors(directory / HEADS, "copy it again, or delete it to begin with fresh heads")
        copy_all(stored, _heads(policy), directory / HEADS)


def _heads(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in policy.named_parameters() if not name.startswith("backbone.")}


def verify(checkpoint: Path) -> None:
    """Raises UserError unless every file of the checkpoint is there, unharmed."""
    if not checkpoint.is_dir():
        raise UserError(f"checkpoint={checkpoint}: no such directory")
    if not (checkpoint / COMPLETE).exists():
        raise UserError(f"checkpoint={checkpoint} is not a complete checkpoint ({COMPLETE} is missing): choose another of its run")
    try:
        digests = json.loads((checkpoint / COMPLETE).read_text())
        damaged = [name for name, digest in digests.items() if not (checkpoint / name).is_file() or _digest(checkpoint / name) != digest]
    except (ValueError, AttributeError, SafetensorError):
        damaged = [COMPLETE]
    if damaged:
        raise UserError(f"checkpoint={checkpoint} is damaged ({damaged[0]} is missing or changed): use the checkpoint before it")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

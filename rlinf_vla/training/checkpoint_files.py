"""The files of a checkpoint, and whether they are complete and unchanged. Needs no PyTorch.

Layout: ``step_000100/{adapter/, heads.safetensors, optimizer.safetensors, state.json, COMPLETE}``.
A checkpoint is written to a temporary directory, fsynced and renamed, so a directory with the final
name is complete, whenever the writer was killed.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import digest

ADAPTER, HEADS, OPTIMIZER, STATE, COMPLETE = "adapter", "heads.safetensors", "optimizer.safetensors", "state.json", "COMPLETE"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in ``directory``, oldest first."""
    found = {path.parent.name.removeprefix("step_"): path.parent for path in directory.glob(f"step_*/{COMPLETE}")}
    return [found[number] for number in sorted(filter(str.isdigit, found), key=int)]


def verify(checkpoint: Path) -> None:
    """Raise UserError unless all files of the checkpoint exist and are unchanged."""
    if not checkpoint.is_dir():
        raise UserError(f"checkpoint={checkpoint}: no such directory")
    if not (checkpoint / COMPLETE).exists():
        raise UserError(f"checkpoint={checkpoint} is not a complete checkpoint ({COMPLETE} is missing): choose another one of its run")
    try:
        digests = json.loads((checkpoint / COMPLETE).read_text())
        damaged = [name for name, known in digests.items() if not (checkpoint / name).is_file() or digest(checkpoint / name) != known]
    except (ValueError, AttributeError):
        damaged = [COMPLETE]
    if damaged:
        raise UserError(f"checkpoint={checkpoint} is damaged ({damaged[0]} is missing or changed): use the checkpoint before it")

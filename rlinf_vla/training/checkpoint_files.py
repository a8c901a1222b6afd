"""The files of a checkpoint, and whether they are complete and unchanged. Needs no PyTorch.

Layout: ``step_000100/{adapter/, heads.safetensors, optimizer.safetensors, state.json, COMPLETE}``.
A checkpoint is written to a temporary directory, fsynced and renamed, so a directory with the final
name is complete, whenever the writer was killed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import digest, read_json, step_of

ADAPTER = "adapter"
HEADS = "heads.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
COMPLETE = "COMPLETE"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in ``directory``, oldest first."""
    numbered = [
        (number, path.parent)
        for path in directory.glob(f"*/{COMPLETE}")
        if (number := step_of(path.parent.name)) is not None
    ]
    return [checkpoint for _, checkpoint in sorted(numbered)]


def verify(checkpoint: Path) -> None:
    """Raise UserError unless all files of the checkpoint exist, are listed and are unchanged."""
    if not checkpoint.is_dir():
        raise UserError(f"checkpoint={checkpoint}: no such directory")
    if not (checkpoint / COMPLETE).exists():
        raise UserError(
            f"checkpoint={checkpoint} is not a complete checkpoint ({COMPLETE} is missing): choose another one of its run"
        )
    present = {
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    }
    read = {STATE, HEADS, *(name for name in present if name.endswith((".json", ".safetensors")))}
    try:
        digests = read_json(checkpoint / COMPLETE)
        damaged = sorted((digests.keys() - present) | (read - digests.keys()))
        damaged = damaged or [
            name
            for name, expected_digest in digests.items()
            if digest(checkpoint / name) != expected_digest
        ]
    except (OSError, ValueError, AttributeError):
        damaged = [COMPLETE]
    if damaged:
        raise UserError(
            f"checkpoint={checkpoint} is damaged ({damaged[0]} is missing or changed): use the checkpoint before it"
        )


def newest_sound(directory: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest complete checkpoint in ``directory`` that is not damaged.

    ``say`` reports those that are left out. Raises UserError if all are damaged.
    """
    checkpoints = complete_checkpoints(directory)
    for number, checkpoint in enumerate(reversed(checkpoints), 1):
        try:
            verify(checkpoint)
        except UserError as error:
            if number == len(checkpoints):
                raise
            say(f"{error}")
        else:
            return checkpoint
    return None

"""What a result was made of: the machine, its software, the weights. Parts of one result must all be of the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_vla.atomic import write_json
from rlinf_vla.evaluation.blocks import SCRIPTED, START, Entrant
from rlinf_vla.evaluation.verification import differing
from rlinf_vla.recipe import Recipe, asset_path
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.training.checkpoint import COMPLETE, verify
from rlinf_vla.types import UserError

FILE = "environment.json"
SOFTWARE = ("python", "packages", "gpus")
"""Of a fingerprint, what decides about a number; the rest (cores, memory, command line) decides about the time it takes."""


def identities(recipe: Recipe, entrants: Sequence[Entrant]) -> dict[str, Any]:
    """Entrant's name -> where its policy lies, the SHA-256 of all that it is loaded from, its mode and unnorm_key."""
    hashes: dict[Path, str] = {}

    def digest(directory: Path) -> str:
        if directory not in hashes:
            hashes[directory] = digest_of(directory)
        return hashes[directory]

    found: dict[str, Any] = {}
    for entrant in entrants:
        if entrant.policy in SCRIPTED:
            found[entrant.name] = {"policy": entrant.policy, "sha256": None, "mode": None}
            continue
        directory = asset_path(recipe.model.checkpoint) if entrant.policy == START else Path(entrant.policy).expanduser()
        known: dict[str, Any] = {"policy": entrant.policy, "sha256": digest(directory), "mode": entrant.mode, "model": recipe.model.name}
        if (directory / COMPLETE).exists():
            verify(directory)
            known["model_sha256"] = digest(asset_path(recipe.model.checkpoint))
        known["temperature"] = recipe.rollout.temperature if entrant.mode == "sampled" else 0.0
        known["unnorm_key"] = getattr(recipe.model.options, "unnorm_key", None)
        found[entrant.name] = known
    return found


def digest_of(directory: Path) -> str:
    """SHA-256 over the names and contents of all files below a directory, in the order of their names. Raises UserError."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    total = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        content = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                content.update(piece)
        total.update(f"{path.relative_to(directory).as_posix()}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def same_provenance(directory: Path, policies: dict[str, Any]) -> dict[str, Any]:
    """This machine's fingerprint, kept in ``directory``; where one is kept already, that one.

    Raises UserError where software or weights are not those that the sweep began with.
    """
    now = fingerprint() | {"entrants": policies}
    path = directory / FILE
    try:
        before = json.loads(path.read_text())
        changes = differing(before, now, (*SOFTWARE, "entrants"))
    except FileNotFoundError:
        write_json(path, now)
        before, changes = now, []
    except (ValueError, AttributeError):
        raise UserError(f"{path} is damaged: start a new run_dir") from None
    if changes:
        raise UserError(f"run_dir={directory} was begun with something else: {changes[0]}; put it back, or start a new run_dir")
    return {name: value for name, value in before.items() if name != "entrants"}

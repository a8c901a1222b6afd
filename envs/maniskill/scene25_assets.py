"""Read the published assets of PutOnPlateInScene25: objects, receptacles, tables.

A folder ``carrot`` as gen-robot/RL4VLA and the Hub's data set RLinf/maniskill_assets lay it out.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError

from .scene25_episodes import PUBLISHED, WORDINGS, Assets, Episodes25

VARIABLE = "MANISKILL_ASSET_DIR"
"""Environment variable of the published code: the folder that contains ``carrot``."""
REPOSITORY = "RLinf/maniskill_assets"
"""Data set on the Hub."""
OBJECTS, PLATES, TABLES = "more_carrot", "more_plate", "more_table"
PICTURES = ("textured.obj", "textured.dae", "textured.glb")
"""What a mesh to look at is called, the preferred one first."""


@dataclass(frozen=True)
class Model:
    """An object or receptacle."""

    folder: Path
    name: str
    """In an instruction."""
    size: tuple[float, float, float]
    """Of its box, unturned, metres."""
    density: float
    """kg/m^3."""

    @property
    def collision(self) -> Path:
        return self.folder / "collision.obj"

    @property
    def visual(self) -> Path:
        return next(
            (path for name in PICTURES if (path := self.folder / name).exists()),
            self.folder / PICTURES[-1],
        )


@dataclass(frozen=True)
class Table:
    photograph: Path
    texture: Path
    mix: float
    """Share of the texture in a disturbed picture, before the task's own factor."""


@dataclass(frozen=True)
class AssetFolder:
    objects: tuple[Model, ...]
    plates: tuple[Model, ...]
    tables: tuple[Table, ...]


def directory(asset_dir: Path) -> Path:
    """Return the folder ``carrot``, below that of VARIABLE or else below ``asset_dir``."""
    return Path(os.environ.get(VARIABLE) or asset_dir).expanduser().absolute() / "carrot"


def download(asset_dir: Path) -> str:
    """Return the command that fetches the folder."""
    return f"hf download --repo-type dataset {REPOSITORY} --local-dir {directory(asset_dir).parent}"


def database(carrot: Path, kind: str) -> Path:
    return carrot / kind / "model_db.json"


def markers(asset_dir: Path) -> list[Path]:
    """Files that must be there."""
    return [database(directory(asset_dir), kind) for kind in (OBJECTS, PLATES, TABLES)]


def read(carrot: Path, assets: Assets = PUBLISHED) -> AssetFolder:
    """Read what a folder has. Raises UserError if the numbers are not those of ``assets``."""
    folder = AssetFolder(_models(carrot, OBJECTS), _models(carrot, PLATES), _tables(carrot))
    for what, there, expected in (
        (OBJECTS, folder.objects, assets.objects),
        (PLATES, folder.plates, assets.plates),
        (TABLES, folder.tables, assets.tables),
    ):
        if len(there) != expected.there_are:
            raise UserError(
                f"{database(carrot, what)} lists {len(there)} models; PutOnPlateInScene25 has {expected.there_are}"
            )
    return folder


def instructions(found: AssetFolder, episodes: Episodes25) -> list[str]:
    """Return all instructions of a task's episodes, each once."""
    wordings = (
        [WORDINGS[number] for number in episodes.extras]
        if episodes.kind.extra == "wording"
        else WORDINGS[:1]
    )
    names = [
        (found.objects[i].name, found.plates[j].name)
        for i in episodes.objects
        for j in episodes.plates
    ]
    return list(
        dict.fromkeys(
            wording.format(object=one, plate=other) for wording in wordings for one, other in names
        )
    )


def _entries(carrot: Path, kind: str) -> dict[str, Any]:
    path = database(carrot, kind)
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(entries, dict):
        raise UserError(f"{path} is not a list of models by name")
    return entries


def _models(carrot: Path, kind: str) -> tuple[Model, ...]:
    models = []
    for name, entry in _entries(carrot, kind).items():
        try:
            low, high = entry["bbox"]["min"], entry["bbox"]["max"]
            x, y, z = (float(b) - float(a) for a, b in zip(low, high, strict=True))
            model = Model(
                carrot / kind / name, entry["name"], (x, y, z), float(entry.get("density", 1000))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{database(carrot, kind)}: {name} is not a model with a name, bbox and density ({error!r})"
            ) from None
        _require(model.collision, model.visual)
        models.append(model)
    return tuple(models)


def _tables(carrot: Path) -> tuple[Table, ...]:
    tables = []
    for name, entry in _entries(carrot, TABLES).items():
        try:
            table = Table(
                carrot / TABLES / "imgs" / name,
                carrot / TABLES / "textures" / entry["texture"],
                float(entry["mix"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{database(carrot, TABLES)}: {name} is not a table with a texture and mix ({error!r})"
            ) from None
        _require(table.photograph, table.texture)
        tables.append(table)
    return tuple(tables)


def _require(*paths: Path) -> None:
    for path in paths:
        if not path.is_file():
            raise UserError(
                f"{path} is missing: fetch the assets again, {download(path.parents[3])}"
            )

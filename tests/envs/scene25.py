"""Where the recordings of PutOnPlateInScene25 are, and a folder of assets with the published numbers of models."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlinf_vla.envs.maniskill.scene25_assets import OBJECTS, PLATES, TABLES, database
from rlinf_vla.envs.maniskill.scene25_episodes import PUBLISHED

KEPT = Path(__file__).parents[1] / "recordings" / "put_on_plate_in_scene25"
"""In the repository: a few assets, and recorded numbers."""
RECORDINGS = Path(
    os.environ.get("RECORDINGS") or Path(__file__).parents[3] / "shared" / "put_on_plate_in_scene25"
).absolute()
"""All recordings. They lie beside the checkout; RECORDINGS names another folder of the same layout."""

needs_recordings = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="no recordings of PutOnPlateInScene25 beside the checkout"
)


def published_folder(folder: Path) -> Path:
    """Fill ``folder`` with as many models as are published: those of the repository, again and again under other names.

    Return the folder, which is one for ``env.asset_dir``: ManiSkill's own assets lie in it, too.
    """
    assets = KEPT / "assets"
    (folder / "data").symlink_to(assets / "ms" / "data")
    for kind, wanted in (
        (OBJECTS, PUBLISHED.objects),
        (PLATES, PUBLISHED.plates),
        (TABLES, PUBLISHED.tables),
    ):
        source = assets / "carrot" / kind
        known = json.loads(database(assets / "carrot", kind).read_text())
        made = folder / "carrot" / kind
        (made / "imgs").mkdir(parents=True)
        (made / "textures").symlink_to(source / "textures")
        models = {}
        for number in range(wanted.there_are):
            name = list(known)[number % len(known)]
            new = name if number < len(known) else f"{number:03d}_{name}"
            models[new] = known[name] | {
                "name": known[name]["name"]
                if number < len(known)
                else f"{known[name]['name']} {number}"
            }
            target = made / "imgs" / new if kind == TABLES else made / new
            target.symlink_to(source / "imgs" / name if kind == TABLES else source / name)
        database(folder / "carrot", kind).write_text(json.dumps(models))
    return folder

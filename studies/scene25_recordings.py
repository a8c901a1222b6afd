"""Compare PutOnPlateInScene25 with recordings of the published environment.

A folder as docs/results/put_on_plate_in_scene25.md describes. ``make scene25-recordings`` runs:
python studies/scene25_recordings.py RECORDINGS PAGE.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from rlinf_vla.envs.maniskill import scene25_assets, scene25_pictures, vulkan
from rlinf_vla.envs.maniskill.scene25_episodes import (
    PREFIX,
    PUBLISHED,
    REST_QPOS,
    Assets,
    Counts,
    Episodes25,
    joint_offsets,
    layouts,
    turned,
)
from rlinf_vla.envs.maniskill.scene25_rules import on_plate

MARK = "<!-- numbers: make scene25-recordings -->\n\n"
"""Of a page: what follows is written anew."""


@dataclass
class Compared:
    what: str
    where: str
    """Recordings that it was compared with."""
    count: int
    """Of numbers, pictures, answers."""
    largest: float
    limit: float
    """That ``largest`` must not exceed."""
    unit: str = ""


class Largest:
    """Collects the largest differences by name."""

    def __init__(self) -> None:
        self.found: dict[str, Compared] = {}

    def see(
        self, what: str, where: str, ours: Any, theirs: Any, limit: float, unit: str = ""
    ) -> None:
        one, other = (np.asarray(values, np.float64).reshape(-1) for values in (ours, theirs))
        entry = self.found.setdefault(f"{what} {where}", Compared(what, where, 0, 0.0, limit, unit))
        if one.shape != other.shape:
            raise ValueError(f"{what}, {where}: {one.shape} is not {other.shape}")
        valid = ~np.isnan(other)
        if valid.any():
            entry.count += int(valid.sum())
            entry.largest = max(entry.largest, float(np.abs(one - other)[valid].max()))


def counts(folder: Path) -> Assets:
    """Return how many assets a folder's recordings were made with."""
    ids = read(folder / "ids.json")

    def of(task: str, kind: str) -> Counts:
        train, there_are = (ids[f"{task}/{which}"]["counts"][kind] for which in ("train", "all"))
        return Counts(train, there_are)

    return Assets(
        of("Main-v3", "objects"),
        of("Main-v3", "tables"),
        of("Plate-v1", "plates"),
        of("VisionTexture03-v1", "extras"),
    )


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def without_simulator(folder: Path) -> list[Compared]:
    """Compare ids, layouts, the rule of success, and how pictures are put together."""
    largest = Largest()
    places = np.load(folder / "layouts.npz")
    for name in ("main", "position", "multi_object", "multi_plate", "position_change"):
        largest.see("layouts", "layouts", layouts(name), places[name], 1e-6, "m")
    largest.see(
        "joint offsets", "layouts", joint_offsets(), places["ee_pose_joint_offsets"], 1e-6, "rad"
    )
    for file, assets in (("ids", counts(folder)), ("ids_all_assets", PUBLISHED)):
        for key, recorded in read(folder / f"{file}.json").items():
            episodes = Episodes25(*key.split("/"), assets)
            largest.see("number of episodes", file, len(episodes), recorded["counts"]["total"], 0)
            for row in [*recorded["episodes"], *filter(None, [recorded.get("id_past_the_end")])]:
                compare_id(largest, file, episodes, row)
    compare_rule(largest, read(folder / "success_rule.json"))
    compare_drops(largest, np.load(folder / "drops.npz"))
    for path in sorted((folder / "episodes" / "images").glob("*_raw.png")):
        compare_mixing(largest, folder, path)
    return list(largest.found.values())


def compare_id(largest: Largest, file: str, episodes: Episodes25, row: dict[str, Any]) -> None:
    episode = episodes[row["episode_id"]]
    numbers = [episode.object, episode.plate, episode.table, episode.pair, episode.turn]
    largest.see(
        "what an id means",
        file,
        numbers,
        [row[f"{name}_id"] for name in ("object", "plate", "table", "pair", "turn")],
        0,
    )
    if "extra_id" in row:
        largest.see("the further number", file, episode.extra, row["extra_id"], 0)
    if "object_pose" not in row or (
        episodes.kind.extra == "object" and episode.extra == episode.object
    ):
        return  # in a few ids of the source the distractor is the object itself, and stands at the distractor's place
    positions = layouts(episodes.kind.layout)[episode.pair]
    pose = [*positions[0], *turned(episode.turn), *positions[1]]
    largest.see("places", file, pose, [*row["object_pose"], *row["plate_pose"][:3]], 1e-6, "m")
    if "object_position_after_jump" in row:
        largest.see(
            "places after the jump",
            file,
            positions[2],
            row["object_position_after_jump"],
            1e-6,
            "m",
        )
    offset = joint_offsets()[episode.extra] if episodes.kind.extra == "joints" else 0.0
    largest.see("joints", file, np.array(REST_QPOS) + offset, row["qpos"], 1e-6, "rad, m")


def compare_rule(largest: Largest, rows: list[dict[str, Any]]) -> None:
    def of(name: str) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=torch.float32)

    offset = of("object_position") - of("plate_position")
    answers = on_plate(
        offset, of("object_bbox_world"), of("plate_bbox_world"), of("force_object_plate")
    )
    largest.see("rule of success", "success_rule", answers, [row["success"] for row in rows], 0)


def compare_drops(largest: Largest, recorded: Any) -> None:
    """Judge objects that fell on and beside a plate, from recorded poses and forces."""
    for row in range(recorded["success"].shape[1]):
        offset = recorded["object_pose"][:, row, :3] - recorded["plate_pose"][:, row, :3]
        sizes = recorded["object_bbox_world"], recorded["plate_bbox_world"]
        answers = on_plate(
            *(
                torch.from_numpy(array)
                for array in (offset, *sizes, recorded["force_object_plate"][:, row])
            )
        )
        largest.see("rule of success", "drops", answers, recorded["success"][:, row], 0)


def compare_mixing(largest: Largest, folder: Path, raw: Path) -> None:
    """Put the recorded rendering before the photograph, and disturb it, as the task does."""
    name = raw.name.removesuffix("_raw.png")
    episode = read(folder / "episodes" / f"{name.rsplit('_step', 1)[0]}.json")
    task = episode["task"].removeprefix(PREFIX)
    tables = scene25_assets.read(folder / "assets" / "carrot", counts(folder)).tables
    table = tables[episode["table_id"]]
    rendered = pixels(raw)
    mask = pixels(raw.with_name(f"{name}_mask.png")) > 0
    picture = scene25_pictures.before_photographs(
        rendered[None], mask[None], scene25_pictures.read(table.photograph)[None]
    )[0]
    if task.startswith(("VisionTexture", "VisionWhole")):
        share = (0.3 if "03" in task else 0.5) * table.mix
        if "Whole" in task:
            picture = scene25_pictures.with_window(
                picture, mask, scene25_pictures.read(table.texture, 2), share
            )
        else:
            picture = scene25_pictures.with_texture(
                picture, mask, scene25_pictures.read(table.texture), share
            )
    # One number of a picture lies between two values, and another processor rounds it otherwise.
    largest.see(
        "pictures from recorded renderings",
        "images",
        picture,
        pixels(raw.with_name(f"{name}.png")),
        1,
        "of 255",
    )


def pixels(path: Path) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(
            np.array(image if image.mode in ("L", "P") else image.convert("RGB"))
        )


def with_simulator(folder: Path) -> list[Compared]:
    """Compare everything, in a process of its own that has the folder's assets and a renderer."""
    driver = vulkan.find()
    if driver is None:
        raise SystemExit(vulkan.NO_DRIVER)
    environment = {
        **os.environ,
        **driver.environment,
        "MS_ASSET_DIR": str(folder / "assets" / "ms"),
        "MS_SKIP_ASSET_DOWNLOAD_PROMPT": "1",
    }
    program = [
        sys.executable,
        "-m",
        "studies.scene25_simulated",
        str(folder),
        driver.render_backend,
    ]
    done = subprocess.run(
        program, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return [Compared(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def page(compared: list[Compared]) -> str:
    lines = [
        "| what | compared with | numbers | largest difference | limit |",
        "|---|---|---|---|---|",
    ]
    for row in compared:
        unit = f" {row.unit}" if row.unit else ""
        lines.append(
            f"| {row.what} | {row.where} | {row.count} | {row.largest:.2g}{unit} | {row.limit:g}{unit} |"
        )
    return "\n".join(lines) + "\n"


def main(folder: Path, output: Path | None) -> None:
    compared = [*without_simulator(folder), *with_simulator(folder)]
    text = page(compared)
    print(text)
    if output is not None:
        text = output.read_text().split(MARK)[0] + MARK + text
        output.write_text(text)
    wrong = [row for row in compared if row.largest > row.limit or not row.count]
    raise SystemExit(f"{len(wrong)} comparisons exceed their limits" if wrong else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]) if len(sys.argv) > 2 else None)

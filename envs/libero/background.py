"""Exchange the textures of walls, floor and table for others of LIBERO's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .perturbations import Draw

WALL, FLOOR = "tex-wall", "texplane"
TABLES = ("tex-living_room_table", "tex-desk", "tex-short_coffee_table", "tex-table")
"""Textures of the workspace's surface. A scene that shows none of them works on the
floor."""
OTHER = 15.0
"""A texture whose mean colour differs by less (of 255) from that of the own one is not chosen."""


class Background:
    """The textures of one scene. All episodes of the scene share the model that holds them."""

    def __init__(self, model: Any) -> None:
        from libero.libero import get_libero_path

        self._model = model
        self._files = sorted(Path(get_libero_path("assets"), "textures").glob("*.png"))
        names = {_name(model, number): number for number in range(model.ntex)}
        materials = {
            int(material)
            for geom, material in enumerate(model.geom_matid)
            if material >= 0 and model.geom_rgba[geom, 3] > 0
        }
        textures = {
            int(texture)
            for material in materials
            for texture in np.atleast_1d(model.mat_texid[material])
            if texture >= 0
        }
        table = next((names[name] for name in TABLES if names.get(name) in textures), names[FLOOR])
        self._wall = names[WALL]
        self._floor = names[FLOOR]
        self._table = table
        self._own = {
            texture: self._pixels(texture).copy()
            for texture in {self._wall, self._floor, self._table}
        }
        self._painted: dict[int, int] = {}

    def choose(self, drawn: Draw) -> dict[int, int]:
        """Return which file (by its place in the sorted list) replaces each exchanged texture.

        Severity 1: wall; 2: wall and floor; 3: table; 4: table and wall; 5: all three.
        """
        surfaces = {
            1: (self._wall,),
            2: (self._wall, self._floor),
            3: (self._table,),
            4: (self._table, self._wall),
            5: (self._table, self._wall, self._floor),
        }[drawn.severity]
        orders = {
            texture: drawn.random.permutation(len(self._files))
            for texture in (self._wall, self._floor, self._table)
        }
        return {texture: self._first_other(texture, orders[texture]) for texture in surfaces}

    def paint(self, context: Any, wanted: dict[int, int]) -> None:
        """Give the scene's textures in OpenGL the pixels of an episode; its context is current."""
        import mujoco

        for texture in sorted(wanted.keys() | self._painted.keys()):
            file = wanted.get(texture)
            if file == self._painted.get(texture):
                continue
            self._pixels(texture)[:] = (
                self._own[texture] if file is None else self._read(texture, file)
            )
            mujoco.mjr_uploadTexture(self._model, context.con, texture)
        self._painted = wanted

    def _first_other(self, texture: int, order: NDArray[Any]) -> int:
        mean = self._own[texture].reshape(-1, 3).mean(0)
        differences = (
            (int(file), np.abs(self._read(texture, int(file)).reshape(-1, 3).mean(0) - mean).max())
            for file in order
        )
        return next(file for file, difference in differences if difference >= OTHER)

    def _pixels(self, texture: int) -> NDArray[np.uint8]:
        """The pixels of a texture in the model, a view ``[height, width, 3]``."""
        model = self._model
        rows = int(model.tex_height[texture])
        columns = int(model.tex_width[texture])
        start = int(model.tex_adr[texture])
        data = model.tex_data if hasattr(model, "tex_data") else model.tex_rgb  # MuJoCo 2.3.7
        pixels: NDArray[np.uint8] = data.reshape(-1)[start : start + rows * columns * 3].reshape(
            rows, columns, 3
        )
        return pixels

    def _read(self, texture: int, file: int) -> NDArray[np.uint8]:
        """A file's pixels in the size of a texture; a cube shows them on each face."""
        import cv2

        rows, columns = self._own[texture].shape[:2]
        image: Any = cv2.imread(str(self._files[file]), cv2.IMREAD_COLOR)
        resized: Any = cv2.resize(image, (columns, rows), interpolation=cv2.INTER_AREA)
        return np.ascontiguousarray(resized[..., ::-1])


def _name(model: Any, texture: int) -> str:
    import mujoco

    return mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_TEXTURE, texture) or ""

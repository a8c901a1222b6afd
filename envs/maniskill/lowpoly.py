"""Cheap visuals: on a CPU the time to render goes into triangles, and the Panda's visual meshes have 135 thousand."""

from __future__ import annotations

import sys
from typing import Any

FLOOR_WIDTH = 20
"""Metres; the stock floor is 100 m wide, of 20 thousand triangles."""


def use_low_poly_visuals() -> None:
    """From now on, in this process, robots are drawn by their collision meshes and floors are small. The physics stays the same."""
    from mani_skill.utils.building import ground
    from mani_skill.utils.building.urdf_loader import URDFLoader

    build_link, build_ground = URDFLoader._build_link, ground.build_ground

    def build_low_poly_link(self: Any, link: Any, link_builder: Any) -> None:
        link.visuals = []
        self.collision_is_visual = True
        build_link(self, link, link_builder)

    def build_small_ground(scene: Any, floor_width: int = FLOOR_WIDTH, **options: Any) -> Any:
        return build_ground(scene, floor_width=min(floor_width, FLOOR_WIDTH), **options)

    URDFLoader._build_link = build_low_poly_link
    for module in list(sys.modules.values()):
        if getattr(module, "build_ground", None) is build_ground:  # importers hold the function by name
            module.build_ground = build_small_ground  # type: ignore[attr-defined]

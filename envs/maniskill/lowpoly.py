"""Reduce the triangles of robots and floors, which dominate the rendering time on a CPU.

The Panda's visual meshes have 135 thousand triangles.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FLOOR_WIDTH = 20
"""Metres; the stock floor is 100 m wide and has 20 thousand triangles."""


@contextmanager
def low_poly_visuals() -> Iterator[None]:
    """Build scenes with collision meshes as robot visuals, and small floors; same physics."""
    import mani_skill.envs  # noqa: F401  (imports all modules that build a floor)
    from mani_skill.utils.building import ground
    from mani_skill.utils.building.urdf_loader import URDFLoader

    build_link, build_ground = URDFLoader._build_link, ground.build_ground
    builders = [
        module
        for module in list(sys.modules.values())
        if getattr(module, "build_ground", None) is build_ground
    ]

    def build_low_poly_link(self: Any, link: Any, link_builder: Any) -> None:
        link.visuals = []
        self.collision_is_visual = True
        build_link(self, link, link_builder)

    def build_small_ground(scene: Any, floor_width: int = FLOOR_WIDTH, **options: Any) -> Any:
        return build_ground(scene, floor_width=min(floor_width, FLOOR_WIDTH), **options)

    def install(link: Any, floor: Any) -> None:
        URDFLoader._build_link = link
        for module in builders:
            module.build_ground = floor  # type: ignore[attr-defined]

    install(build_low_poly_link, build_small_ground)
    try:
        yield
    finally:
        install(build_link, build_ground)

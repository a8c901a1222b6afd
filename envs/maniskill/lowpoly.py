"""Cheap visuals: on a CPU the time to render goes into triangles, and the Panda's visual meshes have 135 thousand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FLOOR_WIDTH = 20
"""Metres; the stock floor is 100 m wide, of 20 thousand triangles."""


@contextmanager
def low_poly_visuals() -> Iterator[None]:
    """Meanwhile, scenes are built with robots drawn by their collision meshes, and with small floors. Their physics stays the same."""
    import mani_skill.envs  # noqa: F401  (whoever builds a floor is imported)
    from mani_skill.utils.building import ground
    from mani_skill.utils.building.urdf_loader import URDFLoader

    build_link, build_ground = URDFLoader._build_link, ground.build_ground
    builders = [module for module in list(sys.modules.values()) if getattr(module, "build_ground", None) is build_ground]

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

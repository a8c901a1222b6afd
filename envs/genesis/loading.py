"""Load scene files: YAML to :class:`Scene`, with a one-line error for each mistake."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlinf_vla.config.errors import UserError

from .scene import (
    COLOURS,
    TARGET,
    Box,
    Camera,
    Cylinder,
    Inside,
    Interval,
    Lifted,
    Mesh,
    NoRoom,
    On,
    Predicate,
    Region,
    Robot,
    Scene,
    SceneObject,
    Shape,
    Sphere,
    Vector,
    draw,
)
from .yaml_node import YamlNode

SHAPES = ("box", "sphere", "cylinder", "mesh")
ROBOTS = ("panda",)
MESHES = (".obj", ".stl", ".ply")
PREDICATES = ("on", "lifted", "inside")
REACH_M = 2.0
"""Largest distance of a coordinate from the robot's base."""


class _Yaml(yaml.SafeLoader):
    """YAML with the booleans of version 1.2 (``on`` is a string); duplicate keys are errors."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value} appears twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Yaml.yaml_implicit_resolvers = {
    letter: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:bool"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))


def read_scene(path: Path) -> tuple[Scene, Any]:
    """Read a scene and its document (JSON values). Raises UserError."""
    try:
        document = _Yaml(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise UserError(f"the scene file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the scene file {path} is not text in UTF-8") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number out of range
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(
            f"{path.name}{line} is not YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"
        ) from error
    return scene_from(document, path), document


def scene_from(document: Any, path: Path) -> Scene:
    """Make the scene of a document from ``path``; file names in it are relative to that file.

    Raises UserError.
    """
    root = YamlNode(path.name, document)
    root.only(
        required=("instruction", "objects", "cameras", "success"),
        optional=("episode_limit", "robot", "target", "apart_m"),
    )
    things = {name: _thing(node, path.parent) for name, node in root["objects"].children()}
    if not things:
        raise root["objects"].error("names no object")
    target = (
        tuple(_subject(node, things, False) for node in root["target"].items())
        if "target" in root
        else ()
    )
    if "target" in root and not target:
        raise root["target"].error("names no object")
    cameras = {name: _camera(node) for name, node in root["cameras"].children()}
    if not cameras:
        raise root["cameras"].error("names no camera")
    success = tuple(_predicate(node, things, bool(target)) for node in root["success"].items())
    if not success:
        raise root["success"].error("names no predicate: an episode could never succeed")
    scene = Scene(
        name=path.stem,
        instruction=root["instruction"].text(),
        things=things,
        cameras=cameras,
        success=success,
        target=target,
        **root.given(
            episode_limit=lambda node: node.whole(1),
            robot=_robot,
            apart_m=lambda node: node.number(0.0, REACH_M),
        ),
    )
    if not target and "{" + TARGET + "}" in scene.instruction:
        raise root["instruction"].error(
            f"names {{{TARGET}}}, but the scene has no target: list the objects to choose from"
        )
    try:
        draw(scene, 0)
    except NoRoom as error:
        raise root.error(str(error)) from error
    return scene


def _thing(node: YamlNode, folder: Path) -> SceneObject:
    node.mapping()
    if "shape" not in node:
        raise node.error(f"lacks shape: one of {', '.join(SHAPES)}")
    kind = node["shape"].one_of(SHAPES)
    sizes, make = _SHAPES[kind]
    node.only(
        required=("shape", *sizes),
        optional=(*["scale"] * (kind == "mesh"), "position_m", "region", *_COMMON),
    )
    if ("position_m" in node) == ("region" in node):
        raise node.error("needs either position_m or region")
    position = (
        _region(node["region"])
        if "region" in node
        else node["position_m"].numbers((2, 3), -REACH_M, REACH_M)
    )
    shape = make(node, folder)
    options = node.given(**_COMMON)
    passes = not options.get("collision", True)
    if passes and not options.get("fixed", True):
        raise node.error("would fall through the table: what does not collide must be fixed")
    return SceneObject(shape, position, **{"fixed": passes} | options)


def _length(node: YamlNode) -> float:
    return node.number(0.001, REACH_M)


def _mesh(node: YamlNode, folder: Path) -> Mesh:
    import trimesh

    file = Path(node["file"].text()).expanduser()
    file = (file if file.is_absolute() else folder / file).absolute()
    if file.suffix.lower() not in MESHES:
        raise node["file"].wrong(f"a file of a kind with z up: {', '.join(MESHES)}")
    if not file.is_file():
        raise node["file"].wrong(f"a mesh file; there is none at {file}")
    scale = node["scale"].number(1e-4, 1e4) if "scale" in node else 1.0
    try:
        mesh: Any = trimesh.load(file, force="mesh")
        low, high = (mesh.bounds * scale).tolist()
        solid = mesh if mesh.is_watertight else mesh.convex_hull
    except Exception as error:  # trimesh's readers raise many types
        raise node["file"].wrong("a mesh that trimesh can read") from error
    size = tuple(b - a for a, b in zip(low, high, strict=True))
    if not all(1e-4 <= side <= REACH_M for side in size):
        raise node.error(f"is {' x '.join(f'{side:.3g}' for side in size)} m large: correct scale")
    middle = tuple((a + b) / 2 for a, b in zip(low, high, strict=True))
    return Mesh(str(file), scale, size, middle, float(abs(solid.volume)) * scale**3)


_SHAPES: dict[str, tuple[tuple[str, ...], Callable[[YamlNode, Path], Shape]]] = {
    "box": (("size_m",), lambda node, _: Box(node["size_m"].numbers((3,), 0.001, REACH_M))),
    "sphere": (("radius_m",), lambda node, _: Sphere(_length(node["radius_m"]))),
    "cylinder": (
        ("radius_m", "height_m"),
        lambda node, _: Cylinder(_length(node["radius_m"]), _length(node["height_m"])),
    ),
    "mesh": (("file",), _mesh),
}
"""Shape -> its required keys and its constructor."""


def _colour(node: YamlNode) -> Vector:
    if isinstance(node.value, str):
        return COLOURS[node.one_of(COLOURS)]
    return node.numbers((3,), 0.0, 1.0)


def _yaw(node: YamlNode) -> Interval:
    if isinstance(node.value, list):
        return node.interval(-360, 360)
    angle = node.number(-360, 360)
    return angle, angle


_COMMON: dict[str, Callable[[YamlNode], Any]] = {
    "colour": _colour,
    "mass_kg": lambda node: node.number(0.001, 100),
    "yaw_deg": _yaw,
    "fixed": YamlNode.flag,
    "collision": YamlNode.flag,
}
"""Optional keys of every object, and their readers."""


def _region(node: YamlNode) -> Region:
    node.only(required=("x_m", "y_m"), optional=("z_m",))
    x, y = (node[key].interval(-REACH_M, REACH_M) for key in ("x_m", "y_m"))
    return Region(x, y, **node.given(z_m=lambda z: z.interval(-REACH_M, REACH_M)))


def _camera(node: YamlNode) -> Camera:
    node.only(required=("eye_m", "target_m"), optional=("fov_deg",))
    eye, target = (node[key].numbers((3,), -10, 10) for key in ("eye_m", "target_m"))
    if math.dist(eye, target) < 0.01:
        raise node.error("has the same eye_m and target_m")
    return Camera(eye, target, **node.given(fov_deg=lambda angle: angle.number(5, 120)))


def _robot(node: YamlNode) -> Robot:
    node.only(required=(), optional=("kind", "tool_m", "jitter_rad"))
    return Robot(
        tool_m=node["tool_m"].numbers((3,), -REACH_M, REACH_M)
        if "tool_m" in node
        else Robot.tool_m,
        jitter_rad=node["jitter_rad"].number(0, 0.5) if "jitter_rad" in node else Robot.jitter_rad,
        kind=node["kind"].one_of(ROBOTS) if "kind" in node else Robot.kind,
    )


def _predicate(node: YamlNode, things: dict[str, SceneObject], has_target: bool) -> Predicate:
    node.mapping()
    if len(node.value) != 1:
        raise node.wrong(f"one of {', '.join(PREDICATES)}, with its arguments")
    node.only(required=(), optional=PREDICATES)
    ((kind, _),) = node.value.items()
    node = node[kind]
    if kind == "on":
        pair = node.items()
        if len(pair) != 2:
            raise node.wrong("[what, on what]")
        flat = [name for name, thing in things.items() if not isinstance(thing.shape, Sphere)]
        return On(_subject(pair[0], things, has_target), pair[1].one_of(flat))
    node.only(required=("object", "height_m" if kind == "lifted" else "region"))
    name = _subject(node["object"], things, has_target)
    return (
        Lifted(name, _length(node["height_m"]))
        if kind == "lifted"
        else Inside(name, _region(node["region"]))
    )


def _subject(node: YamlNode, things: dict[str, SceneObject], has_target: bool) -> str:
    """Name of a movable object, or ``target``."""
    name = node.one_of([*things, *[TARGET] * has_target])
    if name != TARGET and things[name].fixed:
        raise node.wrong("an object that is not fixed")
    return name

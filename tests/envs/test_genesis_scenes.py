"""Scene files, layouts and goals; no test needs Genesis."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vla.config.errors import UserError
from rlinf_vla.envs.genesis import predicates, rotations
from rlinf_vla.envs.genesis.experts import expert_actions
from rlinf_vla.envs.genesis.loading import read_scene, scene_from
from rlinf_vla.envs.genesis.plugin import FOLDER, SCENES
from rlinf_vla.envs.genesis.scene import Scene, draw, why_no_expert
from tests.skips import require

GOOD: dict[str, Any] = {
    "instruction": "put the {target} into the corner",
    "episode_limit": 30,
    "robot": {"kind": "panda", "tool_m": [0.4, 0.0, 0.2], "jitter_rad": 0.0},
    "objects": {
        "red_cube": {
            "shape": "box",
            "size_m": [0.04, 0.04, 0.04],
            "colour": "red",
            "region": {"x_m": [0.3, 0.6], "y_m": [-0.3, 0.0]},
        },
        "ball": {
            "shape": "sphere",
            "radius_m": 0.02,
            "colour": [0, 0, 1],
            "region": {"x_m": [0.3, 0.6], "y_m": [-0.3, 0.0]},
        },
        "tray": {
            "shape": "cylinder",
            "radius_m": 0.1,
            "height_m": 0.02,
            "position_m": [0.5, 0.2],
            "fixed": True,
        },
    },
    "cameras": {"base": {"eye_m": [1, 0, 0.5], "target_m": [0.4, 0, 0], "fov_deg": 45}},
    "target": ["red_cube", "ball"],
    "apart_m": 0.08,
    "success": [
        {"on": ["target", "tray"]},
        {"inside": {"object": "target", "region": {"x_m": [0.4, 0.6], "y_m": [0.1, 0.3]}}},
    ],
}


def scene(document: Any = GOOD) -> Scene:
    return scene_from(document, Path("/scenes/my.yaml"))


def changed(path: list[Any], value: Any) -> Any:
    """GOOD with something else at ``path``; None deletes it."""
    document = copy.deepcopy(GOOD)
    *parents, last = path
    place = document
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize("name", SCENES)
def test_the_built_in_scenes_are_valid(name: str) -> None:
    found, document = read_scene(FOLDER / f"{SCENES[name]}.yaml")
    assert why_no_expert(found) is None
    assert scene_from(document, Path("/elsewhere.yaml")).things == found.things
    for seed in range(50):
        draw(found, seed)


def test_a_scene_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corner.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    found, document = read_scene(path)
    assert (found.name, found.episode_limit, found.told(1)) == (
        "corner",
        30,
        "put the ball into the corner",
    )
    assert document == GOOD, "`on` is not parsed as a boolean"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["objects", "ball", "colr"],
            "red",
            "my.yaml: objects.ball key=colr is unknown: did you mean colour?",
        ),
        (["camera"], {}, "my.yaml key=camera is unknown: did you mean cameras?"),
        (["success"], None, "my.yaml lacks success"),
        (
            ["objects", "ball", "colour"],
            "redd",
            "my.yaml: objects.ball.colour=redd is unknown: did you mean red?",
        ),
        (
            ["objects", "ball", "shape"],
            "hat",
            "my.yaml: objects.ball.shape=hat is unknown: one of box, sphere, cylinder, mesh",
        ),
        (
            ["objects", "ball", "radius_m"],
            -1,
            "my.yaml: objects.ball.radius_m=-1 must be a number between 0.001 and 2",
        ),
        (["objects", "ball", "radius_m"], None, "my.yaml: objects.ball lacks radius_m"),
        (
            ["objects", "ball", "size_m"],
            [1, 1, 1],
            "my.yaml: objects.ball key=size_m is unknown: did you mean position_m?",
        ),
        (
            ["objects", "red_cube", "size_m"],
            [0.04, 0.04],
            "my.yaml: objects.red_cube.size_m=[0.04, 0.04] must be a list of 3 numbers",
        ),
        (
            ["objects", "red_cube", "size_m", 2],
            "4 cm",
            "my.yaml: objects.red_cube.size_m[2]=4 cm must be a number between 0.001 and 2",
        ),
        (
            ["objects", "red_cube", "region"],
            None,
            "my.yaml: objects.red_cube needs either position_m or region",
        ),
        (
            ["objects", "red_cube", "region", "x_m"],
            [0.6, 0.3],
            "my.yaml: objects.red_cube.region.x_m=[0.6, 0.3] must be [low, high]",
        ),
        (
            ["objects", "ball"],
            GOOD["objects"]["ball"] | {"collision": False, "fixed": False},
            "my.yaml: objects.ball would fall through",
        ),
        (
            ["objects", "ball"],
            GOOD["objects"]["ball"] | {"collision": False},
            "my.yaml: target[1]=ball must be an object that is not fixed",
        ),
        (
            ["objects", "target"],
            GOOD["objects"]["ball"],
            "my.yaml: objects.target is not a valid name: letters, digits and _, not target",
        ),
        (["objects"], {}, "my.yaml: objects names no object"),
        (["objects"], [1], "my.yaml: objects=[1] must be a mapping of keys to values"),
        (
            ["cameras", "base", "eye_m"],
            [0.4, 0, 0],
            "my.yaml: cameras.base has the same eye_m and target_m",
        ),
        (["robot", "kind"], "pand", "my.yaml: robot.kind=pand is unknown: did you mean panda?"),
        (["episode_limit"], 0, "my.yaml: episode_limit=0 must be a whole number, at least 1"),
        (["episode_limit"], True, "my.yaml: episode_limit=True must be a whole number, at least 1"),
        (["instruction"], 7, "my.yaml: instruction=7 must be a sentence"),
        (
            ["target"],
            None,
            "my.yaml: success[0].on[0]=target is unknown: one of red_cube, ball, tray",
        ),
        (["target", 0], "red_cub", "my.yaml: target[0]=red_cub is unknown: did you mean red_cube?"),
        (
            ["success", 0, "on", 1],
            "try",
            "my.yaml: success[0].on[1]=try is unknown: did you mean tray?",
        ),
        (
            ["success", 0, "on", 0],
            "tray",
            "my.yaml: success[0].on[0]=tray must be an object that is not fixed",
        ),
        (["success", 0, "on"], ["ball"], "my.yaml: success[0].on=['ball'] must be [what, on what]"),
        (
            ["success", 0],
            {"onto": ["ball", "tray"]},
            "my.yaml: success[0] key=onto is unknown: did you mean on?",
        ),
        (["success"], [], "my.yaml: success names no predicate"),
        (
            ["apart_m"],
            1.0,
            "my.yaml no layout keeps the objects 1.0 m apart: widen their regions or lower apart_m",
        ),
    ],
)
def test_each_mistake_is_one_line_with_its_place(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        scene(changed(path, value))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_instruction_that_names_a_target_needs_one() -> None:
    document = changed(["success"], [{"lifted": {"object": "ball", "height_m": 0.1}}])
    del document["target"]
    with pytest.raises(UserError, match=r"names \{target\}, but the scene has no target"):
        scene(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objects: {a: 1, a: 2}", r"^my.yaml line 1 is not YAML: a appears twice$"),
        ("a: [1\nb: 2", r"^my.yaml line 2 is not YAML: "),
        ("", r"^my.yaml=None must be a mapping"),
        ("date: 2020-99-99", r"^my.yaml"),
        ("? [a]\n: b", r"^my.yaml"),
    ],
)
def test_invalid_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_scene(path)
    assert "\n" not in str(error.value)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in a document."""
    children = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [path] * bool(path) + [
        each for key, child in children for each in places(child, (*path, key))
    ]


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["box", "red", "mesh", "on"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(places(GOOD)), anything)
def test_any_content_of_a_scene_loads_or_is_refused_in_one_line(
    path: tuple[Any, ...], value: Any
) -> None:
    try:
        draw(scene(changed(list(path), value)), 1)
    except UserError as error:
        assert "\n" not in str(error)


def test_a_layout_is_a_function_of_the_seed_and_keeps_its_distance() -> None:
    found = scene()
    for seed in range(100):
        layout = draw(found, seed)
        assert np.array_equal(layout.centre, draw(found, seed).centre)
        distance = np.linalg.norm(layout.centre[:, None, :2] - layout.centre[None, :, :2], axis=-1)
        assert distance[~np.eye(3, dtype=bool)].min() >= 0.08
        assert layout.centre[:, 2].tolist() == [0.02, 0.02, 0.01], "all objects are on the table"
    assert {draw(found, seed).target for seed in range(20)} == {0, 1}


def state(found: Scene, **centres: list[float]) -> predicates.State:
    """One environment: objects upright and at rest, the tool high above with open fingers, the first target."""
    centre = torch.tensor(draw(found, 0).centre, dtype=torch.float32)
    for name, value in centres.items():
        if name in found.things:
            centre[list(found.things).index(name)] = torch.tensor(value)
    upright = torch.tensor([1.0, 0, 0, 0]).expand(1, len(centre), 4)
    return predicates.State(
        joints=torch.zeros(1, 9),
        tool=torch.tensor([centres.get("tool", [0.4, 0.0, 0.4])]),
        tool_quaternion=torch.tensor([[0.0, 1.0, 0.0, 0.0]]),
        finger=torch.tensor(centres.get("finger", [0.04])),
        finger_speed=torch.zeros(1),
        centre=centre[None],
        quaternion=upright,
        up=rotations.third_axes(upright)[..., 1, :],
        speed=torch.tensor([centres.get("speed", [0.0] * len(centre))]),
        target=torch.zeros(1, dtype=torch.int64),
        shapes=predicates.Shapes.of(found, torch.device("cpu")),
    )


ON_TRAY = [0.5, 0.2, 0.04]


@pytest.mark.parametrize(
    ("centres", "expected"),
    [
        ({"red_cube": ON_TRAY}, True),
        ({"ball": ON_TRAY}, False),  # the target is the cube
        ({"red_cube": [0.5, 0.2, 0.06]}, False),  # above it
        ({"red_cube": [0.5, 0.35, 0.04]}, False),  # next to it
        ({"red_cube": ON_TRAY, "speed": [0.2, 0.0, 0.0]}, False),  # still moving
        ({"red_cube": ON_TRAY, "tool": ON_TRAY, "finger": [0.02]}, False),  # still in the gripper
        ({"red_cube": ON_TRAY, "tool": ON_TRAY}, True),  # released
    ],
)
def test_success_is_that_of_the_predicates(centres: dict[str, list[float]], expected: bool) -> None:
    found = scene()
    assert predicates.success(found, state(found, **centres)).tolist() == [expected]
    assert (predicates.progress(found, state(found, **centres)) == 1).tolist() == [expected]


def test_progress_grows_towards_success() -> None:
    found = scene()
    way = [
        {"red_cube": [0.4, -0.2, 0.02], "tool": [0.4, 0.0, 0.4]},
        {"red_cube": [0.4, -0.2, 0.02], "tool": [0.4, -0.2, 0.1]},
        {"red_cube": [0.4, -0.2, 0.02], "tool": [0.4, -0.2, 0.02], "finger": [0.02]},
        {"red_cube": [0.5, 0.1, 0.1], "tool": [0.5, 0.1, 0.1], "finger": [0.02]},
        {"red_cube": ON_TRAY, "tool": [0.5, 0.2, 0.2]},
    ]
    done = [float(predicates.progress(found, state(found, **centres))) for centres in way]
    assert done == sorted(done) and len(set(done)) == len(done), done


def test_the_height_of_an_object_on_its_side() -> None:
    document = changed(["objects", "red_cube", "size_m"], [0.02, 0.04, 0.1])
    document["success"] = [{"lifted": {"object": "red_cube", "height_m": 0.05}}]
    found = scene(document)
    standing = state(found, red_cube=[0.4, 0.0, 0.09])
    assert predicates.success(found, standing).tolist() == [False]
    lying = torch.tensor([[[0.5**0.5, 0.5**0.5, 0.0, 0.0]]]).expand(1, 3, 4)
    assert predicates.success(
        found, replace(standing, quaternion=lying, up=rotations.third_axes(lying)[..., 1, :])
    ).tolist() == [True]


def test_an_expert_names_what_it_cannot_grasp() -> None:
    assert why_no_expert(scene()) is None
    wide = scene(changed(["objects", "ball", "radius_m"], 0.05))
    assert "ball of the scene my is wider or turned" in str(why_no_expert(wide))
    turned = scene(changed(["objects", "red_cube", "yaw_deg"], [0, 90]))
    assert "red_cube" in str(why_no_expert(turned))


def test_the_expert_approaches_grasps_and_carries() -> None:
    found = scene()
    cube = [0.4, -0.2, 0.02]
    above = state(found, red_cube=cube, tool=[0.4, -0.1, 0.2])
    at = state(found, red_cube=cube, tool=cube)
    approach, close = (expert_actions(found, each)[0] for each in (above, at))
    assert approach[1] < 0 and approach[3] == 1
    assert close[3] == -1
    carry = expert_actions(found, state(found, red_cube=cube, tool=cube, finger=[0.02]))[0]
    assert carry[2] > 0 and carry[3] == -1


def mesh_scene(folder: Path, **keys: Any) -> Scene:
    document = changed(["objects", "ball"], {"shape": "mesh", "position_m": [0.4, 0.0], **keys})
    return scene_from(document, folder / "my.yaml")


def test_a_mesh_is_measured(tmp_path: Path) -> None:
    require("genesis")
    import trimesh

    box = trimesh.creation.box((20.0, 30.0, 40.0))
    box.apply_translation((0.0, 0.0, 20.0))
    box.export(tmp_path / "box.stl")
    shape = mesh_scene(tmp_path, file="box.stl", scale=0.001).things["ball"].shape
    assert np.allclose(shape.size_m, (0.02, 0.03, 0.04)) and np.allclose(
        shape.middle_m, (0, 0, 0.02)
    )
    assert np.isclose(shape.volume_m3, 0.02 * 0.03 * 0.04)
    for keys, message in [
        ({"file": "box.stl"}, "20 x 30 x 40 m large: correct scale"),
        ({"file": "none.stl"}, "there is none at"),
        ({"file": "box.glb"}, "z up: .obj, .stl, .ply"),
        ({"file": "text.obj"}, "a mesh that trimesh can read"),
    ]:
        (tmp_path / "text.obj").write_text("nothing")
        with pytest.raises(UserError, match=message):
            mesh_scene(tmp_path, **keys)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf_vla.features.realworld.robot import CellError
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell

SHIPPED = cell_file.CELLS / "franka_sim.yaml"


@pytest.fixture
def values() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    return read


def error(tmp_path: Path, text: str) -> str:
    path = tmp_path / "lab.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CellError) as caught:
        cell_file.load(path, Cell)
    message = str(caught.value)
    assert message.startswith(f"{path}") and "\n" not in message
    return message


def test_the_shipped_cell_is_valid_and_conservative() -> None:
    cell = cell_file.load(SHIPPED, Cell)
    assert cell.name == "franka_sim"
    assert cell.spec.control_hz == 10 and cell.space.gripper_width_m == 0.08
    assert cell.stop_time_s < 0.3 and cell.stop_distance_m < 0.04
    assert cell.max_speed_m_s <= 0.25 and cell.max_force_n <= 40
    assert cell.home.position == pytest.approx([0.307, 0, 0.487], abs=1e-3)


def test_every_key_of_the_shipped_cell_is_explained(values: dict[str, Any]) -> None:
    assert set(values) == {field for field in Cell.__dataclass_fields__ if field != "name"}


def test_a_cell_round_trips_through_json() -> None:
    cell = cell_file.load(SHIPPED, Cell)
    assert cell_file.of(json.loads(json.dumps(cell_file.as_json(cell))), cell.name, Cell) == cell


MOUNT = {"parent": "base", "position_m": [1, 0, 1], "quaternion_wxyz": [0, 1, 0, 0]}
NONSENSE = [
    None,
    True,
    "fast",
    float("nan"),
    float("inf"),
    -1e9,
    1e9,
    10**400,
    -(10**400),
    [],
    {},
    [1, 2, 3, 4, 5, 6, 7, 8],
    [None],
    [[1]],
]


@pytest.mark.parametrize("key", [field for field in Cell.__dataclass_fields__ if field != "name"])
def test_no_key_may_be_missing_or_invalid(values: dict[str, Any], key: str) -> None:
    for nonsense in NONSENSE:
        if key == "cameras" and nonsense == {}:
            continue  # none has a known place
        with pytest.raises(CellError, match=f"^{key}: "):
            cell_file.of(values | {key: nonsense}, "lab", Cell)
    del values[key]
    with pytest.raises(CellError, match=f"^{key}: missing; a cell file must give every key"):
        cell_file.of(values, "lab", Cell)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_sped_m_s": 0.2}, "max_sped_m_s: no such key; did you mean max_speed_m_s?"),
        ({"colour": "red"}, "colour: no such key; remove it"),
        (
            {"max_speed_m_s": 3.5},
            "max_speed_m_s: 3.5 is not between 0.001 and 3, the allowed range; lower it",
        ),
        ({"max_acceleration_m_s2": 9.5}, "max_acceleration_m_s2: 9.5 is not between"),
        ({"max_jerk_m_s3": 4501}, "max_jerk_m_s3: 4501 is not between"),
        ({"max_rotation_speed_rad_s": 2.6}, "max_rotation_speed_rad_s: 2.6 is not between"),
        (
            {"max_force_n": -5},
            "max_force_n: -5 is not between 1 and 100, the allowed range; raise it",
        ),
        ({"gripper_force_n": 90}, "gripper_force_n: 90 is not between"),
        ({"gripper_width_m": [0.0, 0.2]}, "gripper_width_m: 0.2 is not between"),
        (
            {"workspace_x_m": [0.6, 0.3]},
            "workspace_x_m: [0.6, 0.3] is reversed; write the smaller number first",
        ),
        (
            {"workspace_x_m": [0.4, 0.6]},
            "home_joints_rad: the tool is then at 0.307 m, outside workspace_x_m [0.4, 0.6]",
        ),
        ({"workspace_y_m": [-1.4, 0.3]}, "workspace_y_m: [-1.4, 0.3] is beyond the arm's reach"),
        (
            {"workspace_z_m": [0.02]},
            "workspace_z_m: [0.02] is not a list of 2 numbers; write […, …]",
        ),
        ({"workspace_z_m": 0.5}, "workspace_z_m: 0.5 is not a list of 2 numbers"),
        (
            {"home_joints_rad": [0, -0.78, 0, -3.0, 0, 1.57, 0.78]},
            "home_joints_rad: joint 4 at -3 is outside",
        ),
        (
            {"orientation_axis": [0.0, 1.0, -1.0]},
            "orientation_axis: [0.0, 1.0, -1.0] is not of length 1; divide it by its length",
        ),
        (
            {"orientation_axis": [1.0, 0.0, 0.0]},
            "home_joints_rad: the tool is then 90.0 deg off orientation_axis, above max_tilt_deg 30",
        ),
        (
            {"tool_quaternion_wxyz": [0.0, 0.0, 0.0, 0.0]},
            "tool_quaternion_wxyz: [0.0, 0.0, 0.0, 0.0] is not of length 1",
        ),
        (
            {"cameras": {"front": 3}},
            "cameras: front: 3 must give exactly parent, position_m, quaternion_wxyz",
        ),
        (
            {"cameras": {"front": MOUNT | {"parent": "hand"}}},
            "cameras: front.parent: 'hand' is not known; one of base, flange",
        ),
        (
            {"cameras": {"front": MOUNT | {"position_m": [0, 0, 99]}}},
            "cameras: front.position_m: 99 is not between -10 and 10",
        ),
        (
            {"cameras": {"front": MOUNT | {"quaternion_wxyz": [1, 1, 0, 0]}}},
            "cameras: front.quaternion_wxyz: [1.0, 1.0, 0.0, 0.0] is not of",
        ),
        ({"servo_hz": 95}, "servo_hz: 95 is not a multiple of control_hz 10; make it one"),
        ({"realtime": "maybe"}, "realtime: 'maybe' is not known; one of enforce, ignore"),
        (
            {"expired_goals_to_stop": 2.5},
            "expired_goals_to_stop: 2.5 is a number of goals; write a whole number",
        ),
        (
            {"max_goal_validity_s": 0.05},
            "max_goal_validity_s: 0.05 s is below one control period, 0.1 s; raise it",
        ),
        (
            {"action_translation_m": 0.05},
            "action_translation_m: 0.05 is above max_translation_per_step_m 0.025; lower it",
        ),
        (
            {"max_rotation_per_step_rad": 0.9, "max_rotation_per_second_rad": 0.5},
            "max_rotation_per_step_rad: 0.9 is above",
        ),
        (
            {"max_speed_m_s": 0.15},
            "max_speed_m_s: 0.15 is below 0.2 m/s, the speed of full actions; lower action_translation_m",
        ),
        (
            {"max_rotation_per_second_rad": 0.75},
            "max_rotation_per_second_rad: 0.75 is below 0.8 rad/s, the speed of full actions",
        ),
        (
            {"max_lead_m": 0.05},
            "max_lead_m: 0.05 is below 0.058 m, the lead of full actions over the arm, which lags by 0.29 s",
        ),
        (
            {"max_acceleration_m_s2": 0.1},
            "max_acceleration_m_s2: with these accelerations and jerks a stop takes",
        ),
        (
            {"max_rotation_acceleration_rad_s2": 0.5},
            "max_rotation_acceleration_rad_s2: turning at full speed already takes all",
        ),
    ],
)
def test_contradictory_and_absurd_limits_are_named(
    tmp_path: Path, values: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    assert said in error(tmp_path, yaml.safe_dump(values | change, allow_unicode=True))


def test_an_invalid_cell_file(tmp_path: Path, values: dict[str, Any]) -> None:
    assert "is not a mapping of keys to values" in error(tmp_path, "- 1\n")
    assert "is not a mapping of keys to values" in error(tmp_path, "")
    assert "line 2: max_speed_m_s is given twice; keep one" in error(
        tmp_path, "max_speed_m_s: 0.1\nmax_speed_m_s: 3\n"
    )
    assert "line 1" in error(tmp_path, "a: [1, 2")
    assert "could not determine a constructor" in error(
        tmp_path, "a: !!python/object/apply:os.system ['true']\n"
    )
    assert "'1e-1' is not a number; YAML needs a decimal point, as in 1.0e-3" in error(
        tmp_path, SHIPPED.read_text().replace("max_lead_m: 0.08", "max_lead_m: 1e-1")
    )
    assert "max_lead_m: inf is not finite; write a number between" in error(
        tmp_path, SHIPPED.read_text().replace("max_lead_m: 0.08", f"max_lead_m: 1{'0' * 400}")
    )
    assert error(tmp_path, f"max_lead_m: 1{'0' * 5000}\n"), "more digits than Python reads"
    assert "cannot be read: month must be in 1..12" in error(tmp_path, "max_lead_m: 2026-13-01\n")
    with pytest.raises(
        CellError,
        match=r"nowhere.yaml: no such cell file; copy and adapt a shipped one: .*franka_sim.yaml",
    ):
        cell_file.load(tmp_path / "nowhere.yaml", Cell)
    with pytest.raises(CellError, match="cannot be read"):
        cell_file.load(tmp_path, Cell)

from __future__ import annotations

import dataclasses

from rlinf_vla.robots import cell_file, reachability

SHIPPED = cell_file.load(cell_file.CELLS / "franka_sim.yaml")


def test_where_the_arm_does_not_reach_is_named_with_the_reason() -> None:
    found = reachability.beyond(dataclasses.replace(SHIPPED, workspace_x_m=(0.28, 0.65), workspace_z_m=(0.02, 0.55)))
    assert found[0.28, 0.0, 0.1525] == "joint 4 at its limit", "folded, close to the base"
    assert found[0.65, 0.3, 0.55] == "too far" and found[0.65, -0.3, 0.55] == "too far"
    assert (0.4650, 0.0, 0.02) not in found and len(found) < 20


def test_in_the_shipped_box_the_arm_is_never_stretched() -> None:
    """There joint 4 turns far for a little way of the tool. Close to the base it is folded, and goals end in time."""
    found = reachability.beyond(SHIPPED)
    assert {x for x, _, _ in found} == {SHIPPED.workspace_x_m[0]} and set(found.values()) == {"joint 4 at its limit"}


def test_a_box_in_the_middle_is_all_reached() -> None:
    box = {"workspace_x_m": (0.35, 0.55), "workspace_y_m": (-0.2, 0.2), "workspace_z_m": (0.05, 0.45)}
    assert reachability.beyond(dataclasses.replace(SHIPPED, **box)) == {}

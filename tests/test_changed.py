"""Which tests `make test-changed` runs after a change."""

from __future__ import annotations

import pytest

from tests.changed import ALWAYS, below, selected
from tests.sources import MAY_IMPORT, ROOT

ALL = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_sees_what_it_may_import(room: str) -> None:
    assert MAY_IMPORT[room] | {room} <= below(room)


@pytest.mark.parametrize(
    ("change", "seen", "unseen"),
    [
        (
            "features/planner/simulate.py",
            "tests/features/planner/test_simulate.py",
            "tests/features/view/test_pages.py",
        ),
        (
            "features/planner/simulate.py",
            "tests/cli/test_plan_command.py",
            "tests/algorithms/test_losses.py",
        ),
        (
            "features/serving/app.py",
            "tests/features/serving/test_protocols.py",
            "tests/rollout/test_noise.py",
        ),
        ("rlinf_vla/core/io.py", "tests/robots/test_pace.py", "tests/config/imagined.py"),
        ("models/pi0/policy.py", "tests/cli/test_presets.py", "tests/algorithms/test_losses.py"),
        (
            "recipes/recipe/maniskill_ppo.yaml",
            "tests/test_recipes.py",
            "tests/algorithms/test_losses.py",
        ),
        (
            "tests/training/processes.py",
            "tests/training/test_sharding.py",
            "tests/training/test_lora.py",
        ),
        (
            "tests/cli/conftest.py",
            "tests/cli/test_keys.py",
            "tests/features/planner/test_simulate.py",
        ),
        (
            "tests/parity/fixtures/some.npz",
            "tests/parity/test_pi0.py",
            "tests/features/planner/test_simulate.py",
        ),
        (
            "studies/prove_all.py",
            "tests/test_prove_all.py",
            "tests/features/planner/test_simulate.py",
        ),
        ("docs/index.md", "tests/test_documentation.py", "tests/features/planner/test_simulate.py"),
    ],
)
def test_a_change_is_seen_from_above_only(change: str, seen: str, unseen: str) -> None:
    found = selected([change])
    assert seen in found and unseen not in found
    assert {*ALWAYS} <= {*found} <= ALL


@pytest.mark.parametrize("change", ["pyproject.toml", "tests/conftest.py", "tests/leaks.py"])
def test_what_all_depend_on_is_seen_by_all(change: str) -> None:
    assert {*selected([change])} == ALL

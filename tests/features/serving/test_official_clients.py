"""The clients that openpi and vla-eval publish, at our server (`make serve-clients`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_vla.config.recipe import Recipe
from rlinf_vla.features.serving.observations import NATIVE
from rlinf_vla.features.serving.service import opened
from tests.features.serving.conftest import Start

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.nightly


def said(environment: str, program: str, *arguments: str) -> Any:
    python = ROOT / environment / "bin" / "python"
    if not (ROOT / environment / ".installed").exists():
        pytest.skip("make serve-clients")
    found = subprocess.run(
        [python, ROOT / "tests" / "features" / "serving" / program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.fixture
def wanted(recipe: Recipe) -> Any:
    image = np.arange(64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
    with opened(recipe) as service:
        (outcome,) = service.answer(
            [
                service.request(
                    {"images": {"base": image}, "instruction": "push the cube"}, NATIVE, 0, 0
                )
            ]
        )
    return outcome.actions.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["", "/openpi"])
def test_openpis_client(start: Start, wanted: Any, path: str) -> None:
    with start(observation="libero", token="secret") as server:
        found = said(".venv-openpi-client", "openpi_program.py", str(server.port), "secret", path)
    assert found["actions"] == [wanted] * 4
    assert found["timing"] == [["infer_ms"], *[["infer_ms", "prev_total_ms"]] * 3]
    assert found["metadata"] == ["rlinf_vla"] and found["numpy"].startswith("1.")
    assert (
        found["refusal"].startswith("Error in inference server:\nobservation/image is missing")
        and found["refusal"].count("\n") == 1
    )


@pytest.mark.parametrize("protocol", ["openpi", "vla_eval"])
def test_vla_evals_client(start: Start, wanted: Any, protocol: str) -> None:
    with start(protocol=protocol) as server:
        found = said(
            ".venv-vla-eval",
            "vla_eval_program.py",
            str(server.port),
            "/" if protocol == "vla_eval" else "/vla-eval",
        )
    assert found["actions"] == [*wanted, wanted[0], wanted[0]]
    assert found["specs"] == {"actions": "raw"} and found["params"] == {
        "send_wrist_image": False,
        "send_state": False,
    }
    assert "images.agentview is missing" in found["refusal"]

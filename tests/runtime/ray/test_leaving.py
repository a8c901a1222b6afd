"""Machines that leave the cluster after a notice, and others that join."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.runtime.ray.counting import in_process, iterate, trained
from tests.runtime.ray.namespaces import ENVIRONMENT, ROOT
from tests.runtime.ray.several_nodes import RECIPE
from tests.runtime.ray.two_nodes import digest


@pytest.mark.nightly
def test_a_machine_that_was_told_to_leave_hands_over_its_work_and_another_takes_its_place() -> None:
    """No fault is counted, the run goes on with one worker fewer, and the weights are those of an undisturbed run."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.ray.several_nodes"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["workers after the notice"], found["workers after others joined"]) == (1, 3)
    assert found["trainer leaves"] == [False, True]
    assert found["faults"] == 0
    assert any("is on a machine that will leave: replaced" in line for line in found["said"])
    flow = in_process(RECIPE)
    iterate(flow, RECIPE, found["iterations"])
    assert found["digest"] == digest(trained(flow))

"""An external package tests its plug-in in five lines and gets a readable failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = """
from dataclasses import replace

import pytest

from rlinf_vla.rewards import success
from rlinf_vla.testing.reward import RewardConformance

class TestRight(RewardConformance):
    plugin = success.plugin

class Wrong(success.Success):
    def create(self, config, env, device):
        return lambda before, actions, result: replace(result, reward=result.reward.double())

class TestWrong(RewardConformance):
    plugin = Wrong()
"""


def run(*words: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, timeout=200
    ).stdout


def test_a_suite_is_used_in_five_lines(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PACKAGE)
    said = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--basetemp=own",
        cwd=tmp_path,
    )
    assert "TestWrong::test_shapes_types_and_device" in said and "TestRight" not in said
    assert "torch.float64" in said, "a failed assertion shows its values"


def test_the_toys_need_no_pytest(tmp_path: Path) -> None:
    program = "import sys, rlinf_vla.testing.toy_env, rlinf_vla.testing.toy_policy; print('pytest' in sys.modules)"
    assert run("-c", program, cwd=tmp_path).strip() == "False"

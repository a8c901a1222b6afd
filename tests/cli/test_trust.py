"""A file from another user is data: it names no program to run, no import and no output path (docs/trust.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError, printable
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins
from rlinf_vla.features.sweeps.results import FORMAT
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.saved_recipe import outside, to_plain, with_overrides
from tests.cli.conftest import CommandLine

pytestmark = pytest.mark.machine  # commands that start processes

WORDS = (
    "cluster=laptop",
    "model=none",
    "sweep.policies=[random]",
    "episodes=1",
    "rollout.batch_size=1",
)


@pytest.fixture
def result(tmp_path: Path) -> Callable[..., Path]:
    """A result of a recipe for ``env``, whose ``env`` node is then changed, as another user may do."""

    def write(env: str, **altered: Any) -> Path:
        kept = to_plain(compose.load("eval", ["recipe=maniskill_eval", *WORDS]))
        kept["env"] = to_plain(OmegaConf.structured(recipes.Configs("env")[env])) | altered
        nothing: dict[str, Any] = {name: {} for name in ("environment", "provenance", "policies")}
        nothing |= {name: [] for name in ("suites", "differences", "episodes")}
        path = tmp_path / "result.json"
        path.write_text(json.dumps({"format": FORMAT, "recipe": kept} | nothing))
        return path

    return write


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that ``hostile.py`` and the program ``hostile`` create."""
    path = tmp_path / "mark"
    (tmp_path / "hostile").write_text(f"#!/bin/sh\ntouch {path}\n")
    (tmp_path / "hostile").chmod(0o755)
    (tmp_path / "hostile.py").write_text(f"open({str(path)!r}, 'w')\n")
    return path


def test_verify_runs_no_program_that_the_file_names(
    rlinf_vla: CommandLine, result: Callable[..., Path], mark: Path, tmp_path: Path
) -> None:
    program = str(tmp_path / "hostile")
    path = str(result("libero", python=program))
    complaint = rlinf_vla("verify", path).complaint
    assert (
        f"env.python={program}" in complaint
        and "if you trust it, give env.python=... on the command line" in complaint
    )
    assert not mark.exists()
    assert (
        "LIBERO is not installed for env.python"
        in rlinf_vla("verify", path, f"env.python={program}").complaint
    )
    assert mark.exists()


def test_verify_imports_nothing_that_the_file_names(
    rlinf_vla: CommandLine,
    result: Callable[..., Path],
    mark: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert (
        "env.id=hostile:Mine-v0"
        in rlinf_vla("verify", str(result("gymnasium", id="hostile:Mine-v0"))).complaint
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    ("env", "key"), [("genesis", "cache_dir"), ("genesis", "scene"), ("maniskill", "asset_dir")]
)
def test_verify_uses_no_path_that_the_file_names(
    rlinf_vla: CommandLine, result: Callable[..., Path], env: str, key: str
) -> None:
    assert f"sets env.{key}=/x" in rlinf_vla("verify", str(result(env, **{key: "/x"}))).complaint


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("episodes=3", "episodes cannot be set"),
        ("env.num_envs=4", "env.num_envs cannot be set"),
        ("env.colour=red", "colour"),
        ("env.asset_dir=[1", "env.asset_dir"),
        ("asset_dir", "asset_dir is not KEY=VALUE"),
    ],
)
def test_other_keys_cannot_be_set_for_verify(
    rlinf_vla: CommandLine, result: Callable[..., Path], said: str, words: str
) -> None:
    assert words in rlinf_vla("verify", str(result("maniskill")), said).complaint


def test_a_file_does_not_read_the_environment(
    rlinf_vla: CommandLine, result: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "tell nobody")
    complaint = rlinf_vla("verify", str(result("maniskill", task="${oc.env:SECRET}"))).complaint
    assert "interpolation" in complaint and "tell nobody" not in complaint


def test_deeply_nested_lists_are_no_result(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "no JSON" in rlinf_vla("verify", "deep.json").complaint


def test_a_file_prints_no_control_characters(
    rlinf_vla: CommandLine, result: Callable[..., Path]
) -> None:
    complaint = rlinf_vla("verify", str(result("maniskill", task="\x1b]0;owned\x07"))).complaint
    assert "\x1b" not in complaint and r"\x1b]0;owned\x07" in complaint
    assert (
        printable("an é,\ta line\nand \x1b[2J\u202e\x9b")
        == "an é,\ta line\nand \\x1b[2J\\u202e\\x9b"
    )


def test_keys_that_only_the_command_line_sets() -> None:
    """A new key of a recipe that names a program, an import, an output path or a machine belongs here."""
    found = {key for key, *_ in outside(Recipe(env=None, algorithm=None))}
    for kind, known in (
        ("env", recipes.Configs("env")),
        ("robot", {name: each.Config for name, each in plugins.robots().items()}),
    ):
        found |= {
            f"{kind}={name}: {key}"
            for name, config in known.items()
            for key, *_ in outside(config())
        }
    for kind, options in (("model", plugins.models()), ("reward", plugins.rewards())):
        found |= {
            f"{kind}={name}: {key}"
            for name, each in options.items()
            for key, *_ in outside(each.Config())
        }
    assert found == {
        *("run_dir", "output", "cluster.address"),
        *(
            f"serve.{key}"
            for key in (
                "host",
                "token_env",
                "insecure",
                "allowed_hosts",
                "certificate",
                "private_key",
            )
        ),
        *(
            "env=libero: python",
            "env=metaworld: python",
            "env=isaaclab: python",
            "env=isaaclab: module",
            "env=genesis: scene",
            "env=genesis: cache_dir",
            "env=gymnasium: id",
            "env=gymnasium: kwargs",
        ),
        *("env=maniskill: asset_dir", "reward=function: function"),
        *(f"rollout.backbone.{key}" for key in ("url", "token_env", "ca_file")),
        *(f"model=remote: {key}" for key in ("url", "token_env", "ca_file")),
        *(f"robot=franka: {key}" for key in ("host", "cell", "cameras", "journal", "python")),
        *(
            f"robot=lerobot: {key}"
            for key in ("module", "options", "cell", "cameras", "journal", "python")
        ),
        *(
            f"robot={name}: {key}"
            for name in ("franka_sim", "so101_sim", "bi_so101_sim")
            for key in ("cell", "folder", "journal", "python")
        ),
    }


def test_a_value_of_the_command_line_is_used() -> None:
    kept = to_plain(compose.load("eval", ["recipe=maniskill_eval", *WORDS]))
    kept["env"]["asset_dir"] = "/theirs"
    assert with_overrides(kept, ["env.asset_dir=/mine"], ("env.",), "FILE").env.asset_dir == "/mine"
    assert with_overrides(kept, ["env.asset_dir=null"], ("env.",), "FILE").env.asset_dir is None
    assert (
        with_overrides(kept, [], ("model.",), "FILE").env.asset_dir == "/theirs"
    )  # a caller that uses no env node needs none
    with pytest.raises(UserError, match=r"FILE sets env\.asset_dir=/theirs"):
        with_overrides(kept, [], ("env.",), "FILE")

"""What does not fit is refused before weights are downloaded, simulators start, or memory is counted."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.envs.libero.plugin import Libero
from rlinf_vla.envs.maniskill.plugin import ManiSkill
from rlinf_vla.features.planner import dry_run
from rlinf_vla.runtime import hub
from rlinf_vla.runtime.run_directory import saved_recipe
from tests.cli.conftest import CommandLine, Counting
from tests.models.tiny_openvla import smaller_config, smaller_directory

WARMUP = "gen-robot/openvla-7b-rlvla-warmup"
MANISKILL = ("recipe=maniskill_ppo", "model=openvla")
POSE = (*MANISKILL, "env.control_mode=pd_ee_delta_pose")
LARGE = (*POSE, "env.image_size=224")
LIBERO = ("recipe=libero_grpo", "model=openvla", "env.image_size=224")
METRES = "an action of 1 means 1 m and 1 rad to the policy, {} to the environment: choose another env.control_mode"
REFUSED = [
    (MANISKILL, "actions have 7 dimensions, the environment's 4: choose another env.control_mode"),
    (POSE, "the environment renders 64x64: set env.image_size=224"),
    (LARGE, METRES.format("0.1 m and 0.1 rad")),
    ((*LARGE, "model.options.unnorm_key=warmup"), METRES.format("0.1 m and 0.1 rad")),
    ((*LARGE, "model.options.unnorm_key=bridge_orig"), METRES.format("0.1 m and 0.1 rad")),
    ((*LARGE, "env.task=PushCub"), "env.task=PushCub is unknown: did you mean PushCube"),
    (LIBERO, METRES.format("0.05 m and 0.5 rad")),
    (
        (*LIBERO, "env.suite=libero_spatail"),
        "env.suite=libero_spatail is unknown: did you mean libero_spatial",
    ),
]
"""Keys, and words of the refusal where the warm-up checkpoint of RL4VLA is to be trained with them."""


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Patterns of the files that were asked for of the Hub, which has that checkpoint, without weights."""
    asked: list[Sequence[str]] = []
    there = tmp_path / "hub" / f"models--{WARMUP.replace('/', '--')}" / "snapshots" / "1"
    statistics = {
        "action": {
            "q01": [-0.03] * 6 + [0.0],
            "q99": [0.03] * 6 + [1.0],
            "mask": [True] * 6 + [False],
        }
    }
    config = smaller_config() | {
        "norm_stats": {"bridge_orig": statistics, "fractal": statistics},
        "image_sizes": [224, 224],
    }
    for tower in config["vision_config"].values():
        tower["img_size"] = 224
    del config["chunk"]
    smaller_directory(there, config)
    (there / "dataset_statistics.json").write_text(json.dumps({"warmup": statistics}))

    def download(location: str, patterns: Sequence[str] = hub.DATA) -> Path:
        assert location == f"hf://{WARMUP}"
        asked.append(patterns)
        return there

    monkeypatch.setattr(hub, "download", download)
    return asked


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_a_dry_run_refuses_it_before_it_counts_memory(
    downloads: list[Sequence[str]],
    capsys: pytest.CaptureFixture[str],
    keys: tuple[str, ...],
    words: str,
) -> None:
    for cluster in ("laptop", "1gpu", "8gpu"):
        with pytest.raises(UserError, match=words):
            dry_run.run(
                compose.load(
                    "train", [*keys, f"model.checkpoint=hf://{WARMUP}", f"cluster={cluster}"]
                )
            )
    assert "memory" not in capsys.readouterr().out
    assert set(downloads) <= {hub.DESCRIPTION}


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_a_run_refuses_it_before_weights_and_simulators(
    rlinf_vla: CommandLine,
    downloads: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str, ...],
    words: str,
) -> None:
    for plugin in (ManiSkill, Libero):
        monkeypatch.setattr(plugin, "create", lambda *_: pytest.fail("a simulator starts"))
    refused = rlinf_vla(
        "train", *keys, f"model.checkpoint=hf://{WARMUP}", "cluster=laptop", "run_dir=run"
    )
    assert re.search(words, refused.complaint)
    assert set(downloads) == {hub.DESCRIPTION}


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_checkpoint_to_start_from_is_looked_for_first(
    rlinf_vla: CommandLine, counting: Counting, dry: tuple[str, ...]
) -> None:
    words = counting.arguments("train", "counting_ppo", "checkpoint=nowhere", *dry)
    assert rlinf_vla(*words).complaint == "checkpoint=nowhere: no such directory"
    assert not Path("runs").exists() and not counting.plugin.created


def test_a_run_starts_from_the_newest_checkpoint_of_another(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    quick = ("evaluation.before_and_after=false", "iterations=1")
    for words in (("run_dir=first",), ("run_dir=second", "checkpoint=first")):
        assert rlinf_vla(*counting.arguments("train", "counting_ppo", *quick, *words)).code == 0
    assert saved_recipe(tmp_path / "second")["checkpoint"] == str(
        tmp_path / "first" / "checkpoints" / "step_000001"
    )


@pytest.mark.parametrize(
    ("verb", "word", "reader"),
    [
        ("train", "sweep.policies=[expert]", "eval"),
        ("train", "serve.port=1", "serve"),
        ("eval", "record.failures=true", "record"),
        ("serve", "output_dtype=float32", "export"),
        ("eval", "output=out", "record and export and plan"),
    ],
)
def test_a_key_of_another_command(
    rlinf_vla: CommandLine, counting: Counting, verb: str, word: str, reader: str
) -> None:
    refused = rlinf_vla(*counting.arguments(verb, "counting_ppo", word)).complaint
    node = re.split(r"[.=]", word)[0]
    assert (
        refused == f"{word} has no effect: {node} is for rlinf-vla {reader}, leave it out of {verb}"
    )

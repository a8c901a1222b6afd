"""rollout.split=head with the backbone on a real server, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_vla.models.compact.options import CompactOptions
from rlinf_vla.models.compact.policy import CompactPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.cli.test_remote import AT_A_ROBOT, OFT, PI0, Eval, served, sweep, with_models
from tests.cli.toy_robot import Arguments
from tests.cli.toy_session import toy_session  # noqa: F401
from tests.models.tiny_openvla import ASSETS
from tests.skips import needs

pytestmark = needs("serve")
__all__ = ["sweep", "with_models"]  # fixtures


def head(url: str) -> list[str]:
    return ["rollout.split=head", f"rollout.backbone.url={url}"]


@pytest.mark.parametrize(
    "model",
    [pytest.param(PI0, marks=pytest.mark.nightly), OFT],
    ids=["pi0", "openvla_oft"],
)
def test_a_sweep_is_that_of_the_whole_policy(
    sweep: Eval, rlinf_vla: CommandLine, model: tuple[str, ...]
) -> None:
    with served(*model) as (url, _):
        here = sweep("here", *model)
        there = sweep("there", *model, *head(url))
        assert there["episodes"] == here["episodes"] and there["policies"] == here["policies"]
        told = there["provenance"]["start greedy"]
        assert (
            told["device"] == "cpu"
            and len(told["backbone"]) == 64
            and told["sha256"] == here["provenance"]["start greedy"]["sha256"]
        )
        assert len({each["return"] for each in here["episodes"]}) > 4, "the actions matter"
        refused = rlinf_vla("verify", "there/result.json", "--episodes", "4").complaint
        assert f"sets rollout.backbone.url={url}" in refused, "a file chooses no machine"
        again = rlinf_vla(
            "verify", "there/result.json", "--episodes", "4", f"rollout.backbone.url={url}"
        )
        assert again.code == 0 and "4 of 4 episodes are bit-identical" in again.out


@pytest.mark.timeout(300)
def test_a_head_drives_a_robot(rlinf_vla: CommandLine, toy: Arguments, tmp_path: Path) -> None:
    (tmp_path / "recipe" / "toy_head.yaml").write_text(AT_A_ROBOT.replace("remote", "compact"))
    CompactPolicy.load(
        tmp_path / "model", CompactOptions(random_weights=True, images=["front"])
    ).save(tmp_path / "model")
    model = [
        "model=compact",
        f"model.checkpoint={tmp_path}/model",
        "model.lora.rank=0",
        "model.options.images=[front]",
    ]
    with served(*model) as (url, _):
        words = [
            "--config-dir",
            str(tmp_path),
            "recipe=toy_head",
            "cluster=laptop",
            f"robot.fault={tmp_path}/fault",
            *model,
        ]
        found = rlinf_vla("robot", "run", *words, *head(url), "run_dir=run")
        assert found.code == 0 and "in 2 episodes at toy" in found.out, found.out + found.err
        assert json.loads((tmp_path / "run" / "control.json").read_text())["steps"]["policy"] > 0
        other = tmp_path / "other"
        other.mkdir()
        CompactPolicy.load(ASSETS / "compact", CompactOptions(random_weights=True)).save(other)
        found = rlinf_vla(
            "robot", "run", *words, *head(url), "run_dir=again", f"model.checkpoint={other}"
        )
        assert "has another backbone (SHA-256" in found.complaint


@pytest.mark.parametrize(
    ("verb", "recipe", "settings", "complaint"),
    [
        ("train", "counting_ppo", [], "the backbone is on a server, there is nothing to train"),
        ("plan", "counting_ppo", [], "there is nothing to train"),
        ("export", "counting_ppo", ["output=out", "checkpoint=run"], "there is nothing to export"),
        ("serve", "counting_ppo", [], "there is nothing to serve"),
        ("eval", "counting_ppo", [], "start the server first"),
        ("eval", "counting_ppo", ["rollout.split=none"], "needs rollout.split=head"),
        (
            "eval",
            "counting_ppo",
            ["rollout.backbone.url=null"],
            "rollout.split=head needs cluster.runtime=ray, or the server of rollout",
        ),
        ("eval", "counting_ppo", ["cluster.runtime=ray"], "Ray has feature workers for it"),
        ("eval", "counting_sac", [], "use rollout.split=none"),
    ],
)
def test_what_a_head_cannot_do(
    rlinf_vla: CommandLine,
    counting: Counting,
    verb: str,
    recipe: str,
    settings: list[str],
    complaint: str,
) -> None:
    assert (
        complaint
        in rlinf_vla(
            *counting.arguments(
                verb, recipe, "cluster=laptop", *head("ws://127.0.0.1:1"), *settings
            )
        ).complaint
    )

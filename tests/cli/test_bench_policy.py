"""``rlinf-vla bench policy`` as a user runs it: tiny weights, no simulator, and no check of speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.benchmarks import policy as bench_policy
from rlinf_vla.core import plugins
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.network import Pi0Network
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.testing.policy_calls import act, observations
from tests.cli.conftest import CommandLine, Counting
from tests.models.test_openvla_oft import small as small_oft
from tests.models.test_pi0 import directory as pi0_directory
from tests.models.test_pi0 import small as small_pi0
from tests.models.tiny_openvla import ASSETS, smaller_directory, tiny


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_policy, "WARMUP", 1)
    monkeypatch.setattr(bench_policy, "CALLS", 2)


def bench(rlinf_vla: CommandLine, counting: Counting, *overrides: str) -> dict[str, Any]:
    _, *rest = counting.arguments("bench", "counting_ppo", "run_dir=bench", *overrides)
    found = rlinf_vla("bench", "policy", *rest)
    assert found.code == 0, found.err
    assert counting.plugin.created == [], "no simulator is started"
    assert "numbers: bench/bench_policy.json" in found.out
    return json.loads(Path("bench/bench_policy.json").read_text())


def kinds(document: dict[str, Any], batch: int) -> list[str]:
    for each in document["latencies"]:
        assert (
            each["calls"] == 2
            and 0 < each["best_ms"] <= each["p50_ms"] <= each["p99_ms"]
            and each["actions_per_s"] > 0
        )
        assert each["reached"]["mfu"] > 0 and each["reached"]["of_roofline"] > 0
    return [each["kind"] for each in document["latencies"] if each["batch"] == batch]


def test_a_policy_without_a_usual_implementation(
    rlinf_vla: CommandLine, counting: Counting
) -> None:
    document = bench(rlinf_vla, counting, "rollout.batch_size=2", "rollout.pipeline_depth=1")
    assert kinds(document, 1) == kinds(document, 2) == ["act", "evaluate", "evaluate + backward"]
    assert document["plain_over_act"] == {} and document["environment"]["packages"]["torch"]


@pytest.mark.parametrize("name", ["openvla", "pi0"])
def test_comparison_with_the_usual_implementation(
    rlinf_vla: CommandLine,
    counting: Counting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    models = {"linear": plugins.models()["linear"], "openvla": OpenVLAPolicy, "pi0": Pi0Policy}
    monkeypatch.setattr(plugins, "models", lambda: models)
    directory = (smaller_directory if name == "openvla" else pi0_directory)(tmp_path / name)
    options = [
        "model.options.random_weights=true",
        f"model.checkpoint={directory}",
        f"model={name}",
        "rollout.batch_size=2",
    ]
    document = bench(rlinf_vla, counting, *options)
    assert document["model"] == name
    assert (
        kinds(document, 1)
        == kinds(document, 2)
        == ["act", "plain", "evaluate", "evaluate + backward"]
    )
    assert (
        document["same_actions"] == {"batch 1": 1.0, "batch 2": 1.0}
        and document["plain_over_act"].keys() == document["same_actions"].keys()
    )


def test_openvla_generates_the_same_actions_from_a_padded_prompt() -> None:
    policy = tiny(directory=ASSETS / "openvla_tiny_pushcube")
    policy.load_weights(ASSETS / "openvla_tiny_pushcube")
    inputs = policy.prepare(observations(policy, 6))
    assert not inputs["token_mask"].all()
    with torch.no_grad():
        found = policy.reference_actions(inputs)
    expected = act(policy, inputs, temperature=0.0).actions
    assert (
        found is not None and torch.equal(found, expected) and len(expected.flatten().unique()) > 2
    )


def test_the_usual_pi0_encodes_its_images_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = small_pi0(tmp_path / "pi0")
    inputs = policy.prepare(observations(policy, 3))
    with torch.no_grad():
        expected = policy.act(policy.encode(inputs), None, 0.0).actions
    seen: list[int] = []
    whole = Pi0Network.prefix
    monkeypatch.setattr(Pi0Network, "prefix", lambda *args: seen.append(1) or whole(*args))
    with torch.no_grad():
        found = policy.reference_actions(inputs)
    assert found is not None and torch.equal(found, expected)
    assert len(seen) == 1 + policy.options.denoise_steps, "the critic's, and one per step"


def test_oft_has_no_usual_implementation(tmp_path: Path) -> None:
    policy = small_oft(tmp_path / "oft")
    assert policy.reference_actions(policy.prepare(observations(policy, 1))) is None

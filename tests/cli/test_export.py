"""Export of a run's checkpoint to the official layout by the command line. No simulator starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.cli import compose
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.protocols import Policy
from rlinf_vla.models.openvla.options import OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.testing.policy_calls import act, observations
from rlinf_vla.training.checkpoint import save_checkpoint
from rlinf_vla.training.lora import add_lora, is_lora
from rlinf_vla.training.trainer import Trainer
from tests.cli.conftest import CommandLine, Outcome
from tests.models.tiny_openvla import smaller_directory, tiny


@dataclass
class Run:
    """A trained policy, its checkpoint, and the model that it started from."""

    policy: Policy
    model: Path
    checkpoint: Path

    def arguments(self, *overrides: str) -> list[str]:
        lora = ["model.lora.rank=4", "model.lora.alpha=null", "model.lora.vision=true"]
        options = [
            f"model.checkpoint={self.model}",
            "model.options.prompt_length=32",
            f"checkpoint={self.checkpoint}",
        ]
        return ["recipe=maniskill_ppo", "cluster=laptop", *lora, *options, *overrides]


@pytest.fixture(params=[4, 0], ids=["lora", "every weight"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    model = tmp_path / "model"
    model.mkdir()
    tiny(directory=smaller_directory(tmp_path / "random")).save(model)
    policy = OpenVLAPolicy.load(model, OpenVLAOptions())
    add_lora(policy, LoraOptions(rank=request.param), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if value.requires_grad:
                value.add_(
                    torch.randn(value.shape, generator=generator) * (0.2 if is_lora(name) else 0.02)
                )
    trainer = Trainer(policy, OptimizerConfig(1e-3, 1e-3, 1.0), 8)
    result = Run(
        policy,
        model,
        save_checkpoint(
            tmp_path / "checkpoints", policy, trainer, {"iteration": 7, "policy_version": 7}, 1
        ),
    )
    if request.param == 0:
        result.arguments = lambda *more: [*Run.arguments(result, *more), "model.lora.rank=0"]  # type: ignore[method-assign]
    return result


def differences(policy: Policy, other: Policy) -> tuple[float, float, float]:
    """Of act's log-probabilities, of evaluate's, and of the critic's values."""
    inputs = policy.prepare(observations(policy, 4))
    first = act(policy, inputs, temperature=0.0)
    second = act(other, inputs, temperature=0.0)
    evaluations = [
        each.evaluate(inputs, first.latent, 1.0).log_prob.detach() for each in (policy, other)
    ]
    assert first.value.abs().max() > 1e-3, "a critic at zero would not be a test"
    pairs = ((first.log_prob, second.log_prob), tuple(evaluations), (first.value, second.value))
    return tuple(float((a - b).abs().max()) for a, b in pairs)  # type: ignore[return-value]


def exported(directory: Path) -> Policy:
    """As the next run loads it: its recipe names the directory as model.checkpoint."""
    overrides = [
        "recipe=maniskill_ppo",
        "cluster=laptop",
        f"model.checkpoint={directory}",
        "model.options.prompt_length=32",
    ]
    return builders.build_policy(recipes.read(compose.load("eval", overrides)), lora=False)


def test_trained_weights_are_in_the_official_layout(
    rlinf_vla: CommandLine, run: Run, tmp_path: Path
) -> None:
    found = rlinf_vla("export", *run.arguments("output=out", "output_dtype=float32"))
    assert found.code == 0, found.err
    assert "iteration 7 of maniskill_ppo, merged: out" in found.out
    expected = {
        "config.json",
        "dataset_statistics.json",
        "heads.safetensors",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    before = load_file(run.model / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.shape for name, value in before.items()} == {
        name: value.shape for name, value in after.items()
    }
    assert all(value.dtype == torch.float32 for value in after.values())
    assert max(differences(run.policy, exported(tmp_path / "out"))) < 1e-4
    assert differences(run.policy, exported(run.model))[1] > 1e-2, (
        "the initial checkpoint is another policy"
    )
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["iteration"] == 7 and manifest["recipe"]["name"] == "maniskill_ppo"


def test_weights_keep_the_dtype_of_the_initial_checkpoint(
    rlinf_vla: CommandLine, run: Run, tmp_path: Path
) -> None:
    assert rlinf_vla("export", *run.arguments("output=out")).code == 0
    assert {
        value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()
    } == {torch.bfloat16}
    _, evaluated, value = differences(run.policy, exported(tmp_path / "out"))
    assert evaluated < 0.1 and value < 0.1


@pytest.mark.parametrize("run", [4], indirect=True)
def test_runs_that_cannot_be_exported(rlinf_vla: CommandLine, run: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("kept")
    (tmp_path / "file").write_text("kept")

    def complaint(*overrides: Any) -> str:
        found: Outcome = rlinf_vla("export", *run.arguments(*overrides))
        return found.complaint

    assert "output=DIR" in complaint()
    assert "checkpoint=RUN" in complaint("checkpoint=null", "output=out")
    assert "full is not empty" in complaint("output=full")
    assert "file is not empty" in complaint("output=file")
    assert "output_dtype=int8 is not known: use float32 or bfloat16, or null" in complaint(
        "output=out", "output_dtype=int8"
    )
    assert "no such directory" in complaint("output=out", "checkpoint=nowhere")
    assert "with LoRA" in complaint("output=out", "model.lora.rank=0")
    assert not (tmp_path / "out").exists() and [
        path.name for path in (tmp_path / "full").iterdir()
    ] == ["precious"]
    assert not list(tmp_path.glob(".*")), "no partial output remains"


@pytest.mark.parametrize("run", [4], indirect=True)
def test_heads_of_another_model_are_refused(
    rlinf_vla: CommandLine, run: Run, package: Path, tmp_path: Path
) -> None:
    assert rlinf_vla("export", *run.arguments("output=out")).code == 0
    heads = tmp_path / "out" / "heads.safetensors"
    whole = heads.read_bytes()
    for content, words in (
        (whole[:-9], ["heads.safetensors cannot be read", "delete it"]),
        (b"", ["heads.safetensors cannot be read"]),
    ):
        heads.write_bytes(content)
        complaint = rlinf_vla(
            "eval",
            "--config-dir",
            str(package),
            "recipe=counted",
            f"model.checkpoint={tmp_path / 'out'}",
        ).complaint
        assert all(word in complaint for word in words)

"""Loading and saving of weights: dtypes, shards, and no tensors left on the meta device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core.protocols import Policy
from rlinf_vla.models import files
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.testing.policy_calls import act, observations
from tests.models import test_openvla_oft, test_pi0
from tests.models.tiny_openvla import smaller_directory, tiny

MAKERS: dict[str, Callable[[Path], Policy]] = {
    "openvla": lambda path: tiny(directory=smaller_directory(path)),
    "openvla_oft": lambda path: test_openvla_oft.small(path, proprio=True, film=True),
    "openvla_oft_l1": lambda path: test_openvla_oft.small(path, head="l1"),
    "pi0": lambda path: test_pi0.small(path),
    "pi05": lambda path: test_pi0.small(path, pi05=True),
}


@pytest.fixture(params=list(MAKERS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """A random policy whose weights bfloat16 represents exactly."""
    policy = MAKERS[request.param](tmp_path / "source")
    with torch.no_grad():
        for module in (policy.backbone, getattr(policy, "action_head", None) or policy.backbone):
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16())
    return policy


def make(directory: Path) -> Path:
    directory.mkdir()
    return directory


def reload(policy: Any, directory: Path, **options: Any) -> Policy:
    directory.mkdir(exist_ok=True)
    policy.save(directory)
    mine = {name: value for name, value in vars(policy.options).items() if name != "random_weights"}
    return type(policy).load(directory, type(policy).Config(**mine | options))


def test_a_loaded_policy_is_not_on_the_meta_device_and_equal(
    source: Policy, tmp_path: Path
) -> None:
    loaded = reload(source, tmp_path / "saved")
    assert not [
        name
        for name, value in chain(loaded.named_parameters(), loaded.named_buffers())
        if value.is_meta
    ]
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in source.named_buffers())
    frozen = {name for name, value in source.named_parameters() if not value.requires_grad}
    assert {name for name, value in loaded.named_parameters() if not value.requires_grad} == frozen
    inputs = source.prepare(observations(source, 3))
    found, expected = act(loaded, inputs), act(source, inputs)
    assert torch.equal(found.actions, expected.actions) and torch.equal(
        found.log_prob, expected.log_prob
    )


def kept_by_openpi(name: str) -> bool:
    """Whether openpi keeps a weight in float32: its cast covers both streams, but not what is beside them, and leaves these out."""
    inside = name.removeprefix("paligemma_with_expert.")
    norms = ("input_layernorm", "post_attention_layernorm", "model.norm")
    kinds = ("patch_embedding.weight", "patch_embedding.bias", "position_embedding.weight")
    embeddings = tuple(f"vision_tower.vision_model.embeddings.{kind}" for kind in kinds)
    return inside == name or any(selector in inside for selector in (*embeddings, *norms))


def test_a_policy_in_bfloat16(source: Policy, tmp_path: Path) -> None:
    loaded = reload(source, tmp_path / "saved", dtype="bfloat16")
    exact = {
        name for name, value in loaded.backbone.named_parameters() if value.dtype == torch.float32
    }
    assert all(
        value.dtype == torch.bfloat16 or name in exact
        for name, value in loaded.backbone.named_parameters()
    )
    assert exact == {
        name
        for name, _ in source.backbone.named_parameters()
        if source.name == "pi0" and kept_by_openpi(name)
    }
    blank = type(source).without_weights(tmp_path / "saved", loaded.options)
    assert {name: value.dtype for name, value in blank.backbone.named_parameters()} == {
        name: value.dtype for name, value in loaded.backbone.named_parameters()
    }
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in source.named_buffers()), (
        "computed buffers keep their precision"
    )
    inputs = source.prepare(observations(source, 3))
    expected = act(source, inputs, temperature=0.0)
    found = act(loaded, inputs, temperature=0.0)
    assert found.actions.dtype == found.log_prob.dtype == found.value.dtype == torch.float32
    assert (found.log_prob - expected.log_prob).abs().median() < 0.05
    if getattr(source, "action_head", None) is None:
        evaluation = loaded.evaluate(inputs, found.latent, 1.0)
        assert (evaluation.log_prob - found.log_prob).abs().median() < 0.05
        loaded.evaluate(inputs, act(loaded, inputs).latent, 1.0).log_prob.sum().backward()
        assert any(
            value.grad is not None and value.grad.abs().sum() > 0
            for value in loaded.backbone.parameters()
        )


@pytest.mark.parametrize("policy", [OpenVLAPolicy, OpenVLAOFTPolicy, Pi0Policy])
def test_another_dtype_is_refused(policy: type[Policy]) -> None:
    with pytest.raises(
        UserError, match=r"model\.options\.dtype=fp8 is not known: use float32 or bfloat16"
    ):
        check_values(policy.Config(random_weights=True, dtype="fp8"), "model.options.")


def test_random_weights_in_bfloat16(tmp_path: Path) -> None:
    full = tiny()
    half = tiny(dtype="bfloat16")
    for name, value in half.backbone.named_parameters():
        assert torch.equal(value, full.backbone.get_parameter(name).bfloat16())
    assert half.backbone.language_model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("pi05", [False, True])
def test_what_openpi_keeps_in_float32_loses_nothing(tmp_path: Path, pi05: bool) -> None:
    full, half = (
        test_pi0.small(tmp_path / dtype, pi05=pi05, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    with torch.no_grad():
        for policy in (full, half):
            for name, value in policy.backbone.named_parameters():
                noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
                value.copy_(
                    (full.backbone.get_parameter(name) + 0.01 * noise)
                    if policy is full
                    else full.backbone.get_parameter(name)
                )
    full.save(saved := make(tmp_path / "saved"), torch.float32)
    again = Pi0Policy.load(saved, Pi0Options(**vars(half.options) | {"random_weights": False}))
    kept = 0
    for each in (half, again):
        for name, value in each.backbone.named_parameters():
            exact = full.backbone.get_parameter(name)
            assert torch.equal(value, exact if kept_by_openpi(name) else exact.bfloat16()), name
            kept += not torch.equal(exact, exact.bfloat16().float()) and kept_by_openpi(name)
    assert kept > 20, "the noise needs float32"
    inputs = half.prepare(observations(half, 3))
    sample = act(half, inputs)
    evaluation = half.evaluate(inputs, sample.latent, 1.0)
    assert half.encode(inputs).prefix.states.dtype == torch.bfloat16, "the residual stream"
    (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
    gradients = {name: value.grad for name, value in half.backbone.named_parameters()}
    head = [name for name in gradients if "paligemma_with_expert" not in name]
    assert all(
        gradients[name] is not None and gradients[name].dtype == torch.float32 for name in head
    )


def test_weights_are_saved_in_the_dtype_of_their_file(tmp_path: Path) -> None:
    reload(tiny(directory=smaller_directory(tmp_path / "source")), tmp_path / "saved")
    state = load_file(tmp_path / "saved" / "model.safetensors")
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    single = {name for name in state if "norm" in name}
    save_file(
        {name: value.float() if name in single else value for name, value in state.items()},
        tmp_path / "saved" / "model.safetensors",
    )
    mixed = OpenVLAPolicy.load(tmp_path / "saved", OpenVLAPolicy.Config())
    for dtype, expected in ((None, single), (torch.float32, set(state))):
        (tmp_path / str(dtype)).mkdir()
        mixed.save(tmp_path / str(dtype), dtype)
        again = load_file(tmp_path / str(dtype) / "model.safetensors")
        assert {name for name, value in again.items() if value.dtype == torch.float32} == expected
        assert all(torch.equal(value.float(), state[name].float()) for name, value in again.items())


def test_large_checkpoints_are_written_in_shards(
    source: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40_000
    monkeypatch.setattr(files, "SHARD_BYTES", limit)
    loaded = reload(source, tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("saved/model-*.safetensors"))
    assert len(shards) > 2 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    total = 0
    places = {}
    for path in shards:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}, "official loaders require this"
        state = load_file(path)
        size = sum(value.nbytes for value in state.values())
        assert size <= limit or len(state) == 1
        total += size
        places |= dict.fromkeys(state, path.name)
    assert index == {"metadata": {"total_size": total}, "weight_map": places}
    for name, value in source.backbone.state_dict().items():
        assert torch.equal(loaded.backbone.state_dict()[name], value)


def test_a_later_change_of_the_file_does_not_change_the_policy(tmp_path: Path) -> None:
    loaded = reload(
        tiny(directory=smaller_directory(tmp_path / "source")), tmp_path / "saved", dtype="bfloat16"
    )
    before = {name: value.clone() for name, value in loaded.backbone.state_dict().items()}
    path = tmp_path / "saved" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(os.urandom(path.stat().st_size // 2))
    assert all(
        torch.equal(value, before[name]) for name, value in loaded.backbone.state_dict().items()
    )


def test_official_companions_are_kept_and_code_is_not(tmp_path: Path) -> None:
    directory = smaller_directory(tmp_path / "source")
    kept = {"preprocessor_config.json": "{}", "tokenizer_config.json": "{}", "tokenizer.model": "x"}
    for name, text in (
        kept | {"modeling_prismatic.py": "raise SystemExit", "notes.md": "x"}
    ).items():
        (directory / name).write_text(text)
    reload(tiny(directory=directory), tmp_path / "saved")
    written = {path.name for path in (tmp_path / "saved").iterdir()}
    assert written == {
        *kept,
        "config.json",
        "dataset_statistics.json",
        "model.safetensors",
        "tokenizer.json",
    }


def with_heads(directory: Path, widths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Put a value head as RLinf's, whose last layer has no bias, beside the weights; return it."""
    heads = {}
    for place, (before, after) in enumerate(pairwise(widths)):
        heads[f"value_head.mlp.{2 * place}.weight"] = torch.randn(after, before)
        if place < len(widths) - 2:
            heads[f"value_head.mlp.{2 * place}.bias"] = torch.randn(after)
    save_file(
        load_file(directory / files.WEIGHTS) | heads,
        directory / files.WEIGHTS,
        metadata={"format": "pt"},
    )
    return heads


def test_rlinf_s_value_head_becomes_the_critic_or_is_left_out_with_a_line(tmp_path: Path) -> None:
    policy = tiny()
    for name, widths in (
        ("fits", (policy.backbone.hidden_size, 512, 128, 1)),
        ("other", (policy.backbone.hidden_size, 64, 1)),
    ):
        (tmp_path / name).mkdir()
        policy.save(tmp_path / name, torch.float32)
        heads = with_heads(tmp_path / name, widths)
        found = OpenVLAPolicy.load(tmp_path / name, type(policy.options)())
        assert all(
            torch.equal(one, other)
            for one, other in zip(
                found.backbone.parameters(), policy.backbone.parameters(), strict=True
            )
        )
        weights = found.value_head.state_dict()
        line = found.spec.remarks[-1]
        if name == "fits":
            assert line.startswith("the critic is the checkpoint's (value_head.mlp.0.bias")
            assert all(
                torch.equal(weights[key.removeprefix("value_head.mlp.")], value)
                for key, value in heads.items()
            )
            assert not weights["4.bias"].any()
        else:
            assert (
                "3 weights of heads in the checkpoint (value_head.mlp.0.bias, ...) are left out"
                in line
            )
            assert not weights["4.weight"].any(), "a new critic"


@pytest.mark.parametrize("zipped", [True, False])
def test_rlinf_s_trained_weights_are_read_beside_the_files_of_their_start(
    tmp_path: Path, zipped: bool
) -> None:
    start = tiny()
    trained = tiny(seed=1)
    start.save(tmp_path)
    torch.save(
        trained.backbone.state_dict(),
        tmp_path / "full_weights.pt",
        _use_new_zipfile_serialization=zipped,
    )
    found = OpenVLAPolicy.load(tmp_path, type(start.options)())
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            found.backbone.parameters(), trained.backbone.parameters(), strict=True
        )
    )
    assert found.spec.remarks[-1] == "weights: full_weights.pt, not model.safetensors beside it"
    (tmp_path / "model.safetensors").unlink()
    assert (
        OpenVLAPolicy.load(tmp_path, type(start.options)()).spec.remarks[-1]
        == "weights: full_weights.pt"
    )


def test_one_file_of_weights_takes_precedence_over_an_index(tmp_path: Path) -> None:
    """As transformers reads them; the index may be an older one without its shards."""
    policy = tiny()
    policy.save(tmp_path, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: torch.zeros_like(value) for name, value in weights.items()},
        tmp_path / "old.safetensors",
    )
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(weights, "old.safetensors")})
    )
    for _ in range(2):
        found = OpenVLAPolicy.load(tmp_path, type(policy.options)())
        assert all(
            torch.equal(value, weights[name]) for name, value in found.backbone.state_dict().items()
        )
        assert (
            found.spec.remarks[-1]
            == "weights: model.safetensors, not model.safetensors.index.json beside it"
        )
        (tmp_path / "old.safetensors").unlink(missing_ok=True)
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "_METADATA").touch()
    line = (
        "weights: params/_METADATA, not model.safetensors or model.safetensors.index.json beside it"
    )
    assert files.weight_remarks(tmp_path, Pi0Policy.sources) == [line]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"old\.safetensors cannot be read"):
        OpenVLAPolicy.load(tmp_path, type(policy.options)())


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool, torch.complex64],
)
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2, 2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError,
        match=r"a holds \w+, quantised weights are not supported: convert them to bfloat16",
    ):
        files.read_weight("a", files.read_weights(tmp_path)["a"], tmp_path)


def test_a_prompt_is_not_cut_or_padded_as_the_last_call_of_transformers(
    source: Policy, tmp_path: Path
) -> None:
    """transformers writes truncation and padding of its last call into tokenizer.json."""
    directory = make(tmp_path / "saved")
    source.save(directory)
    document = json.loads((directory / "tokenizer.json").read_text())
    document["truncation"] = {
        "direction": "Right",
        "max_length": 6,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    document["padding"] = {
        "strategy": {"Fixed": 90},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    document["padding"] |= {"pad_token": "<pad>"}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    mine = {name: value for name, value in vars(source.options).items() if name != "random_weights"}
    found: Any = type(source).load(directory, type(source).Config(**mine))
    state = [torch.zeros(source.spec.state_dim)] if source.name == "pi0" else []
    blue, green = (
        found.prompts.ids(
            f"push the cube to the red and white circle near the {colour} bowl", *state
        )
        for colour in ("blue", "green")
    )
    expected = source.prompts.ids(
        "push the cube to the red and white circle near the blue bowl", *state
    )  # type: ignore[union-attr]
    assert blue == expected != green


def test_deeply_nested_json_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("config.json", "dataset_statistics.json"):
        directory = smaller_directory(tmp_path / name)
        (directory / name).write_text('{"a":' + "[" * 100_000)
        with pytest.raises(
            UserError, match=rf"{name} is not valid JSON \(it is nested too deeply\)"
        ):
            OpenVLAPolicy.load(directory, OpenVLAPolicy.Config(random_weights=True))


@pytest.mark.parametrize("held", [{"step": 3}, [1], Path("a")])
def test_a_pickle_of_anything_else_is_refused(tmp_path: Path, held: Any) -> None:
    policy = tiny()
    policy.save(tmp_path)
    torch.save(held, tmp_path / "full_weights.pt")
    with pytest.raises(UserError, match=r"full_weights\.pt cannot be read as tensors"):
        OpenVLAPolicy.load(tmp_path, type(policy.options)())

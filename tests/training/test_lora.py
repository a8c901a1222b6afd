from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.protocols import Policy
from rlinf_vla.models.openvla.options import OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.openvla.prismatic import PrismaticVLA, VisionBackbone
from rlinf_vla.models.openvla.processor import PixelNormalizer
from rlinf_vla.testing.policy_calls import act, observations, with_critic
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import (
    acting,
    adapter_state,
    add_lora,
    is_lora,
    load_adapter,
    merge_lora,
    merged_lora,
    save_adapter,
)
from rlinf_vla.training.trainer import Trainer
from tests.models.frozen_part import assert_computed_once
from tests.models.test_openvla_oft import small as small_oft
from tests.models.test_pi0 import small as small_pi0
from tests.models.tiny_openvla import smaller_config, smaller_directory, tiny


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return smaller_directory(tmp_path / "model")


def adapted(
    directory: Path, seed: int = 0, trained: bool = False, dtype: str = "float32", **options: object
) -> OpenVLAPolicy:
    """``trained`` sets the factors B to values other than zero."""
    policy = tiny(directory=directory, dtype=dtype)
    add_lora(policy, LoraOptions(**({"rank": 4} | options)), seed)  # type: ignore[arg-type]
    if trained:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in policy.named_parameters():
                if is_lora(name):
                    value.normal_(std=0.2, generator=generator)
    return policy


def log_prob(policy: OpenVLAPolicy) -> Tensor:
    inputs = policy.prepare(observations(policy, 3))
    return policy.evaluate(
        inputs, {"token_ids": torch.arange(24).reshape(3, 8) % 7 + 504}, 1.0
    ).log_prob.detach()


@pytest.mark.parametrize("rank", [4, 0])
def test_frozen_vision_towers_are_computed_once_per_update(
    directory: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_computed_once(
        adapted(directory, rank=rank, trained=True, vision=False),
        VisionBackbone,
        "forward",
        monkeypatch,
    )


@pytest.mark.parametrize(
    ("part", "module"), [("vision", "vision_backbone"), ("language", "language_model")]
)
def test_without_adapters_a_part_that_is_switched_off_stays_frozen(
    directory: Path, part: str, module: str
) -> None:
    policy = adapted(directory, rank=0, **{part: False})
    frozen = {name for name, value in policy.named_parameters() if not value.requires_grad}
    assert frozen == {
        name for name, _ in policy.named_parameters() if name.startswith(f"backbone.{module}.")
    }
    assert 0 < len(frozen) < len(list(policy.parameters()))


def test_vision_towers_with_adapters_are_not_precomputed(directory: Path) -> None:
    policy = adapted(directory)
    inputs = policy.prepare(observations(policy, 3))
    assert policy.precompute(inputs) is inputs


def test_new_adapters_do_not_change_the_policy(directory: Path) -> None:
    plain = tiny(directory=directory)
    policy = adapted(directory)
    torch.testing.assert_close(log_prob(policy), log_prob(plain), rtol=0, atol=1e-6)
    inputs = plain.prepare(observations(plain, 3))
    assert torch.equal(act(policy, inputs).actions, act(plain, inputs).actions)
    assert (log_prob(adapted(directory, trained=True)) - log_prob(plain)).abs().max() > 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_adapters_are_merged_and_restored(directory: Path, dtype: str, tolerance: float) -> None:
    policy = adapted(directory, trained=True, dtype=dtype)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    expected = log_prob(policy)
    plain = tiny(directory=directory, dtype=dtype)
    with pytest.raises(ZeroDivisionError), merged_lora(policy):
        found = log_prob(policy)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        assert (found - log_prob(plain)).abs().mean() > tolerance
        layers = [name for name in before if name.endswith(".base_layer.weight")]
        merged = policy.state_dict()
        for layer in layers:
            a, b = (
                before[layer.replace("base_layer", f"lora_{factor}.default")] for factor in "AB"
            )
            if a.ndim == 2:
                assert torch.equal(
                    merged[layer], (before[layer].float() + b @ a).to(before[layer].dtype)
                ), "rounded once"
            assert not torch.equal(merged[layer], before[layer])
        with pytest.raises(RuntimeError, match="merged already"), merged_lora(policy):
            pass
        assert torch.equal(log_prob(policy), found)
        raise ZeroDivisionError
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert torch.equal(log_prob(policy), expected)
    with merged_lora(plain):
        pass


def test_a_gpus_weights_before_merging_are_copied_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for the GPU, without pinned memory. A weight that changes is copied anew."""
    copied = list[Tensor]()
    empty_like = torch.empty_like

    def unpinned(tensor: Tensor, *, pin_memory: bool = False, **keys: Any) -> Tensor:
        if pin_memory:
            copied.append(tensor)
        return empty_like(tensor, **keys)

    monkeypatch.setattr("rlinf_vla.training.lora.is_accelerator", lambda device: True)
    monkeypatch.setattr(torch, "empty_like", unpinned)
    policy = adapted(directory, trained=True)
    base = {
        name: value
        for name, value in policy.named_parameters()
        if name.endswith(".base_layer.weight")
    }
    for version in range(3):
        before = {name: value.clone() for name, value in base.items()}
        with merged_lora(policy):
            assert not any(torch.equal(value, before[name]) for name, value in base.items())
        assert all(torch.equal(value, before[name]) for name, value in base.items())
        assert len(copied) == len(base) + max(0, version - 1)
        if version:
            with torch.no_grad():
                next(iter(base.values())).add_(1)


def test_adapters_stay_unmerged_where_there_is_no_room_for_the_weights_before(
    directory: Path,
) -> None:
    policy = adapted(directory, trained=True, merge=False)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with acting(policy, rounded=False):
        assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_trained_weights_act_rounded_with_a_bfloat16_network(directory: Path) -> None:
    policy, other = (
        with_critic(adapted(directory, trained=trained, dtype="bfloat16"))
        for trained in (True, False)
    )
    exact = {name: value.clone() for name, value in policy.state_dict().items()}
    published = {
        name: value.to(torch.bfloat16)
        for name, value in policy.named_parameters()
        if value.requires_grad
    }
    inputs = policy.prepare(observations(policy, 3))
    with acting(policy, rounded=False):
        unrounded = act(policy, inputs)
    with acting(policy, rounded=True):
        found = act(policy, inputs)
    assert all(torch.equal(value, exact[name]) for name, value in policy.state_dict().items())
    with torch.no_grad():
        for name, value in other.named_parameters():
            if name in published:
                value.copy_(published[name])
    with acting(other, rounded=False):
        same = act(other, inputs)
    for kind in ("log_prob", "value"):
        assert torch.equal(getattr(same, kind), getattr(found, kind))
        assert not torch.equal(getattr(unrounded, kind), getattr(found, kind))


def test_without_merging_a_bfloat16_network_rounds_adapters_itself(directory: Path) -> None:
    policy = adapted(directory, trained=True, dtype="bfloat16")
    expected = log_prob(policy)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if is_lora(name):
                value.copy_(value.bfloat16())
    assert torch.equal(log_prob(policy), expected)


def test_only_adapters_and_the_critic_train(directory: Path) -> None:
    policy = adapted(directory)
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trainable == {
        name
        for name, _ in policy.named_parameters()
        if is_lora(name) or name.startswith("value_head.")
    }
    adapted_modules = {
        name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trainable if is_lora(name)
    }
    language = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert adapted_modules == {"q", "kv", "qkv", "proj", "fc1", "fc2", "fc3"} | language


def test_factors_depend_only_on_the_seed(directory: Path) -> None:
    states = []
    for seed, disturbance in ((0, 1), (0, 2), (1, 3)):
        torch.manual_seed(disturbance)
        before = torch.get_rng_state()
        states.append(
            {
                name: value
                for name, value in adapted(directory, seed).state_dict().items()
                if ".lora_A." in name
            }
        )
        assert torch.equal(torch.get_rng_state(), before), "the global generator is not used"
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert all(not torch.equal(value, states[2][name]) for name, value in states[0].items())


def test_rank_zero_trains_everything(directory: Path) -> None:
    policy = adapted(directory, rank=0)
    assert all(p.requires_grad for p in policy.parameters()) and not any(
        is_lora(name) for name, _ in policy.named_parameters()
    )


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_factors_are_drawn_as_stated(directory: Path, init: str) -> None:
    policy = adapted(directory, init=init, rank=16)
    layers = [part for part in policy.backbone.modules() if hasattr(part, "lora_A")]
    spreads = torch.stack(
        [
            part.lora_A["default"].weight.std()
            * (16 if init == "gaussian" else part.in_features**0.5)
            for part in layers
        ]
    )
    assert len(spreads) > 20
    # a uniform distribution from -b to b has the deviation b / sqrt(3), and b is 1 / sqrt(in_features)
    assert spreads.median().item() == pytest.approx(
        1.0 if init == "gaussian" else 3**-0.5, rel=0.02
    )
    assert not any(part.lora_B["default"].weight.any() for part in layers)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (2, 0.5), (16, 4.0)])
def test_alpha_over_rank_scales(directory: Path, alpha: int | None, scale: float) -> None:
    policy = adapted(directory, alpha=alpha, targets=["lm_head"], trained=True)
    head = policy.backbone.language_model.lm_head
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    delta = x @ head.lora_A["default"].weight.T @ head.lora_B["default"].weight.T
    torch.testing.assert_close(head(x), head.base_layer(x) + scale * delta)


def test_stock_peft_reads_the_adapter_of_a_checkpoint(directory: Path, tmp_path: Path) -> None:
    """It computes the same bits."""
    policy = adapted(directory, trained=True, alpha=8)
    trainer = Trainer(policy, OptimizerConfig(1e-3, 1e-3, 1.0), 8)
    adapter = (
        save_checkpoint(tmp_path / "checkpoints", policy, trainer, {"iteration": 1}, 1) / "adapter"
    )
    base = PrismaticVLA(smaller_config())
    base.load_state_dict(tiny(directory=directory).backbone.state_dict())
    stock = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        assert torch.equal(logits(policy, stock), logits(policy, policy.backbone))
        plain = logits(policy, tiny(directory=directory).backbone)
        assert (logits(policy, base) - plain).abs().max() > 1e-2, "from_pretrained adapts in place"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")


def logits(policy: OpenVLAPolicy, backbone: torch.nn.Module) -> Tensor:
    inputs = policy.prepare(observations(policy, 3))
    prompt = inputs["token_ids"], inputs["token_mask"]
    embeds, mask = backbone.embed_prompt(
        backbone.encode_images(PixelNormalizer()(inputs["image.base"]), *prompt), *prompt
    )
    return backbone.language_model.lm_head(backbone.hidden_states(embeds, mask))


@pytest.fixture
def official(directory: Path, tmp_path: Path) -> Path:
    """As OpenVLA's fine-tuning script writes it with stock peft: all linear layers, including the output layer and its weight."""
    base = tiny(directory=directory).backbone
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    config = LoraConfig(
        r=3,
        lora_alpha=2,
        lora_dropout=0.1,
        target_modules=sorted(linear),
        init_lora_weights="gaussian",
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if is_lora(name):
                value.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(str(tmp_path / "official"), save_embedding_layers=False)
    path = tmp_path / "official" / "adapter_model.safetensors"
    repeated = {
        "base_model.model.language_model.lm_head.base_layer.weight": base.language_model.lm_head.base_layer.weight.detach()
    }
    save_file(
        load_file(path) | repeated, path
    )  # the script's peft finds that layer, ours finds it in transformers' models only
    return tmp_path / "official"


def test_training_may_start_from_an_adapter_of_the_official_script(
    directory: Path, official: Path, tmp_path: Path
) -> None:
    policy = adapted(directory, rank=32, adapter=str(official))
    stock = PeftModel.from_pretrained(tiny(directory=directory).backbone, str(official)).eval()
    with torch.no_grad():
        expected = logits(policy, stock)
        torch.testing.assert_close(logits(policy, policy.backbone), expected, rtol=1e-5, atol=1e-5)
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trainable == {
        name
        for name, _ in policy.named_parameters()
        if is_lora(name) or name.startswith("value_head.")
    }
    trainer = Trainer(policy, OptimizerConfig(1e-3, 1e-3, 1.0), 8)
    written = save_checkpoint(tmp_path / "checkpoints", policy, trainer, {"iteration": 1}, 1)
    other = adapted(directory, seed=1, adapter=str(official))
    load_checkpoint(written, other)
    assert torch.equal(log_prob(other), log_prob(policy))
    merge_lora(other.backbone)
    assert (
        other.backbone.state_dict().keys() == tiny(directory=directory).backbone.state_dict().keys()
    )
    with torch.no_grad():
        torch.testing.assert_close(logits(policy, other.backbone), expected, rtol=0, atol=1e-4)


def test_an_adapter_fits_a_part_that_is_switched_off_if_it_has_nothing_there(
    directory: Path, official: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=r"model\.lora\.vision=false: .* has adapters in the vision modules; set model\.lora\.vision=true",
    ):
        adapted(directory, adapter=str(official), vision=False)
    language = adapted(directory, vision=False, trained=True)
    save_adapter(language.backbone, adapter_state(language.backbone), tmp_path / "language")
    assert torch.equal(
        log_prob(adapted(directory, adapter=str(tmp_path / "language"), vision=False)),
        log_prob(language),
    )


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_factors(number: float) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        path = adapter / "adapter_model.safetensors"
        factors = load_file(path)
        factors[next(name for name in factors if name.endswith("lora_A.weight"))][0, 0] = number
        save_file(factors, path)

    return edit


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda adapter: (adapter / "adapter_config.json").unlink(),
            "adapter_config.json is missing",
        ),
        (
            lambda adapter: (adapter / "adapter_config.json").write_text("{"),
            "adapter_config.json cannot be read",
        ),
        (
            lambda adapter: (adapter / "adapter_model.safetensors").unlink(),
            "adapter_model.safetensors cannot be read",
        ),
        (
            lambda adapter: (adapter / "adapter_model.safetensors").write_bytes(b"\x80\x04."),
            "adapter_model.safetensors cannot be read",
        ),
        (edit_config(init_lora_weights="pissa"), "only plain LoRA"),
        (edit_config(use_dora=True), "only plain LoRA"),
        (
            edit_config(megatron_config={"x": 1}, megatron_core="megatron.hostile"),
            "only plain LoRA",
        ),
        (edit_config(target_modules=["q_proj"]), "does not fit this model"),
        (edit_config(target_modules=["q_proj"], r=3), "does not fit this model"),
        (edit_config(r=5), r"has factors of rank \[3\], adapter_config\.json says \[5\]"),
        (
            edit_config(rank_pattern={"q_proj": 4000}),
            r"has factors of rank \[3\], adapter_config\.json says \[3, 4000\]",
        ),
        (edit_config(r=100_000_000), "r is 100000000, a whole number from 1 to 4096 is supported"),
        (edit_config(r=True), "r is True, a whole number from 1 to 4096 is supported"),
        (edit_config(lora_alpha=float("nan")), "lora_alpha is nan, "),
        (
            edit_config(target_modules="((([a-z._0-9]+)+)+)+!"),
            "target_modules is .*, names of modules in a list is supported",
        ),
        (edit_config(target_modules=["(a+)+!"]), "target_modules is a list, names of modules"),
        (
            edit_config(target_modules=[f"m{i}" for i in range(5000)]),
            "target_modules is a list, names of modules",
        ),
        (
            edit_config(exclude_modules="((([a-z._0-9]+)+)+)+!"),
            "exclude_modules is .*, names of modules",
        ),
        (
            edit_config(rank_pattern={"((([a-z._0-9]+)+)+)+!": 8}),
            "rank_pattern is a dict, names of modules",
        ),
        (edit_config(alpha_pattern={"(a+)+": 8}), "alpha_pattern is a dict, names of modules"),
        (
            edit_config(init_lora_weights="eva"),
            "only plain LoRA is supported, not its init_lora_weights",
        ),
        (
            edit_config(init_lora_weights="corda", corda_config={"cache_file": "/etc/passwd"}),
            "not its corda_config",
        ),
        (
            edit_config(layers_to_transform=[1], layers_pattern="(a+)+!"),
            "only plain LoRA is supported, not its layers_",
        ),
        (
            edit_config(layer_replication=[[0, 4], [2, 5]]),
            "only plain LoRA is supported, not its layer_replication",
        ),
        (edit_config(peft_type="LOHA"), "only plain LoRA is supported, not its peft_type"),
        (
            edit_config(of_a_later_peft=True),
            "only plain LoRA is supported, not its of_a_later_peft",
        ),
        (
            lambda adapter: (adapter / "adapter_config.json").write_text("[" * 100_000),
            r"cannot be read \(it is nested too deeply\)",
        ),
        (
            lambda adapter: (adapter / "adapter_config.json").write_text(" " * 2**21),
            "cannot be read .it has more than 1048576 bytes",
        ),
        (
            lambda adapter: (adapter / "adapter_model.safetensors").rename(
                adapter / "adapter_model.bin"
            ),
            "only adapter_model.bin, a pickle",
        ),
        (
            edit_factors(float("nan")),
            "lora_A.weight holds NaN or infinite values, the file is damaged",
        ),
        (edit_factors(float("inf")), "lora_A.weight holds NaN or infinite values"),
    ],
)
def test_an_adapter_that_training_cannot_start_from(
    directory: Path, official: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(official)
    with pytest.raises(UserError, match=words) as error:
        adapted(directory, adapter=str(official))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_not_applied_to_weights_that_contain_it(
    directory: Path, official: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Official runs leave the adapter beside the weights that it was merged into."""
    merged = adapted(directory, adapter=str(official))
    merge_lora(merged.backbone)
    (tmp_path / "run").mkdir()
    merged.save(tmp_path / "run", dtype)
    shutil.move(official, tmp_path / "run" / "lora_adapter")
    with pytest.raises(
        UserError,
        match=r"lora_adapter: the weights of model\.checkpoint contain this adapter already",
    ) as caught:
        add_lora(
            OpenVLAPolicy.load(tmp_path / "run", OpenVLAOptions()),
            LoraOptions(adapter=str(tmp_path / "run" / "lora_adapter")),
            0,
        )
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_base_is_said(directory: Path, official: Path) -> None:
    lines = {}
    for base in (None, f"somewhere/{directory.name}", "openvla/other-7b\x1b"):
        edit_config(base_model_name_or_path=base)(official)
        lines[base] = adapted(directory, adapter=str(official)).spec.remarks[-1]
    assert [line.startswith("adapter: ") for line in lines.values()] == [False, False, True]
    assert lines["openvla/other-7b\x1b"].startswith(
        r"adapter: trained on openvla/other-7b\x1b, applied to "
    )


def test_adapters_are_float32_on_a_bfloat16_model(directory: Path) -> None:
    policy = tiny(directory=directory, dtype="bfloat16")
    before = log_prob(policy)
    add_lora(policy, LoraOptions(rank=4), 0)
    kinds = {is_lora(name): value.dtype for name, value in policy.backbone.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert torch.equal(log_prob(policy), before)


def save(policy: Policy, adapter: Path) -> None:
    save_adapter(policy.backbone, adapter_state(policy.backbone), adapter)


def test_equal_adapters_are_equal_files(directory: Path, tmp_path: Path) -> None:
    """peft keeps the targets in a set, whose order differs between processes; the policy's own set is not changed."""
    policy = tiny(directory=directory)
    add_lora(policy, LoraOptions(rank=4), 0)
    targets = policy.backbone.peft_config["default"].target_modules
    save_adapter(policy.backbone, adapter_state(policy.backbone), tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[
        "target_modules"
    ]
    assert len(written) > 3 and written == sorted(targets)
    assert policy.backbone.peft_config["default"].target_modules is targets


def test_an_adapter_is_loaded_again(directory: Path, tmp_path: Path) -> None:
    policy = adapted(directory, trained=True)
    save(policy, tmp_path / "adapter")
    other = adapted(directory, seed=1)
    with torch.no_grad():
        load_adapter(other.backbone, tmp_path / "adapter")
    assert torch.equal(log_prob(other), log_prob(policy))


@pytest.mark.parametrize("options", [{"alpha": 8}, {"rank": 8, "alpha": 4}])
def test_an_adapter_with_another_scale_is_refused(
    directory: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    save(adapted(directory, trained=True), tmp_path / "adapter")
    with pytest.raises(
        UserError, match=r"was trained with model\.lora\.rank=4 and alpha=4, the recipe sets"
    ):
        load_adapter(adapted(directory, **options).backbone, tmp_path / "adapter")


@pytest.mark.parametrize(
    "options", [{"rank": 8}, {"targets": ["q_proj"]}, {"targets": ["lm_head"]}]
)
def test_an_adapter_of_another_shape_is_refused(
    directory: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    """A larger one, too: its contents must not be lost silently."""
    save(adapted(directory), tmp_path / "adapter")
    with torch.no_grad(), pytest.raises(UserError, match="lora"):
        load_adapter(adapted(directory, **options).backbone, tmp_path / "adapter")


@pytest.mark.parametrize("target", ["q_prjo", "attention.q_prjo", "value_head"])
def test_an_unknown_target_is_named(directory: Path, target: str) -> None:
    with pytest.raises(UserError, match=rf"model\.lora\.targets.*{target}") as error:
        adapted(directory, targets=["q_proj", target])
    assert "\n" not in str(error.value)


def adapted_parts(policy: Policy) -> set[str]:
    """First two parts of the names of adapted modules inside the backbone."""
    return {
        ".".join(name.split(".")[1:3]) for name, _ in policy.named_parameters() if is_lora(name)
    }


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {},
            {
                "vision_backbone.featurizer",
                "vision_backbone.fused_featurizer",
                "language_model.model",
            },
        ),
        ({"vision": False}, {"language_model.model"}),
        ({"language": False}, {"vision_backbone.featurizer", "vision_backbone.fused_featurizer"}),
        (
            {"vision": False, "targets": ["qkv", "q_proj", "lm_head", "fc1", "fc2", "fc3"]},
            {"language_model.model", "language_model.lm_head"},
        ),
        ({"vision": False, "language": False}, set()),
    ],
)
def test_vision_and_language_are_switched_off(
    directory: Path, tmp_path: Path, options: dict[str, object], parts: set[str]
) -> None:
    """The projector between them belongs to neither."""
    policy = adapted(directory, trained=True, **options)
    assert adapted_parts(policy) == parts | {f"projector.fc{i}" for i in (1, 2, 3)}
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trainable == {
        name
        for name, _ in policy.named_parameters()
        if is_lora(name) or name.startswith("value_head.")
    }
    save(policy, tmp_path / "adapter")
    base = PrismaticVLA(smaller_config())
    stock = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    names = {name.removeprefix("base_model.model.") for name in stock.state_dict() if is_lora(name)}
    assert names == {name for name in policy.backbone.state_dict() if is_lora(name)}, (
        "stock peft adapts the same modules"
    )


def test_settings_that_leave_nothing_are_refused(directory: Path) -> None:
    with pytest.raises(
        UserError, match=r"model\.lora\.targets, vision and language leave no module to adapt"
    ) as error:
        adapted(directory, targets=["q_proj"], language=False)
    assert "\n" not in str(error.value)


def test_vision_cannot_be_excluded_without_vision_modules() -> None:
    with pytest.raises(UserError, match=r"model\.lora\.vision=false: linear"):
        add_lora(LinearPolicy(LinearOptions()), LoraOptions(rank=2, vision=False), 0)


def parts_of_pi0(policy: Policy) -> dict[str, set[str]]:
    """The modules of π₀ with adapters, and those that train in full."""
    names = {
        name.removeprefix("backbone.").removeprefix("paligemma_with_expert."): p
        for name, p in policy.named_parameters()
    }
    cut = {"paligemma.model.vision_tower", "paligemma.model.language_model", "gemma_expert"}
    lora = {part for name in names for part in cut if is_lora(name) and name.startswith(part)}
    assert sum(is_lora(name) for name in names) == sum(
        name.startswith(tuple(lora)) for name in names if is_lora(name)
    )
    return {
        "lora": lora,
        "full": {
            name.split(".")[0] for name, p in names.items() if p.requires_grad and not is_lora(name)
        },
    }


HEADS = {
    "action_in_proj",
    "action_out_proj",
    "state_proj",
    "action_time_mlp_in",
    "action_time_mlp_out",
    "value_head",
}


@pytest.mark.parametrize(
    ("frozen_vlm", "options", "lora"),
    [
        (True, {}, {"gemma_expert"}),
        (
            False,
            {},
            {"gemma_expert", "paligemma.model.language_model", "paligemma.model.vision_tower"},
        ),
        (False, {"vision": False}, {"gemma_expert", "paligemma.model.language_model"}),
        (False, {"language": False}, {"gemma_expert", "paligemma.model.vision_tower"}),
    ],
)
def test_the_trained_weights_of_pi0(
    tmp_path: Path, frozen_vlm: bool, options: dict[str, bool], lora: set[str]
) -> None:
    policy = small_pi0(tmp_path / "pi0", frozen_vlm=frozen_vlm)
    add_lora(policy, LoraOptions(rank=2, **options), 0)
    assert parts_of_pi0(policy) == {"lora": lora, "full": HEADS}


def test_every_adapter_of_a_frozen_vlm_learns(tmp_path: Path) -> None:
    policy = small_pi0(tmp_path / "pi0", frozen_vlm=True)
    add_lora(policy, LoraOptions(rank=2), 0)
    inputs = policy.prepare(observations(policy, 2))
    found = policy.evaluate(inputs, act(policy, inputs).latent, 1.0)
    (found.log_prob.sum() + found.value.sum()).backward()
    assert [
        name for name, p in policy.named_parameters() if p.requires_grad and p.grad is None
    ] == []


def test_a_frozen_vlm_is_no_target(tmp_path: Path) -> None:
    policy = small_pi0(tmp_path / "pi0", frozen_vlm=True)
    with pytest.raises(
        UserError, match=r"model\.lora\.targets: 'linear' is only in modules that are frozen"
    ):
        add_lora(policy, LoraOptions(rank=2, targets=["q_proj", "linear"]), 0)


def test_the_proprioception_of_oft_trains_in_full(tmp_path: Path) -> None:
    policy = small_oft(tmp_path / "oft", proprio=True)
    add_lora(policy, LoraOptions(rank=2), 0)
    full = {
        name.rsplit(".", 1)[0]
        for name, p in policy.named_parameters()
        if p.requires_grad and not is_lora(name)
    }
    assert {name for name in full if "value_head" not in name} == {
        "backbone.proprio_projector.fc1",
        "backbone.proprio_projector.fc2",
    }


def test_custom_targets(directory: Path) -> None:
    policy = adapted(directory, targets=["q_proj", "v_proj"])
    layers = {name.split(".lora_")[0] for name, _ in policy.named_parameters() if is_lora(name)}
    assert layers == {
        f"backbone.language_model.model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"
    }

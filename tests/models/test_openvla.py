from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import Observation
from rlinf_vla.models.openvla.actions import ActionTokenizer
from rlinf_vla.models.openvla.options import OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.openvla.prismatic import PrismaticVLA
from rlinf_vla.models.openvla.processor import PixelNormalizer
from rlinf_vla.testing.policy import DiscretePolicyConformance, PolicyConformance
from rlinf_vla.testing.policy_calls import act, gradients, noise, observations
from tests.models.tiny_openvla import ASSET, OFT_PLUS, smaller_config, smaller_directory, tiny
from tools.tiny_checkpoints import write_openvla


class TestPackagedTinyOpenVLA(PolicyConformance):
    @pytest.fixture
    def policy(self) -> OpenVLAPolicy:
        return tiny()


class TestSmallerOpenVLA(DiscretePolicyConformance):
    @pytest.fixture
    def policy(self, tmp_path: Path) -> OpenVLAPolicy:
        return tiny(directory=smaller_directory(tmp_path / "smaller"))

    def choices(self, latent: dict[str, Tensor]) -> Tensor:
        return (latent["token_ids"] - 504).unflatten(1, (2, 4))

    def test_every_part_learns(self, policy: OpenVLAPolicy) -> None:
        inputs = policy.prepare(observations(policy, 3))
        policy.evaluate(inputs, act(policy, inputs).latent, 1.0).log_prob.sum().backward()
        learning = gradients(policy.backbone)
        for part in (
            "vision_backbone.featurizer.",
            "vision_backbone.fused_featurizer.",
            "projector.",
            "language_model.model.layers.",
        ):
            assert any(name.startswith(part) for name in learning)
        assert "language_model.lm_head.weight" in learning

    def test_actions_follow_the_image_and_the_instruction(self, policy: OpenVLAPolicy) -> None:
        observed = observations(policy, 2)
        same = Observation(observed.images, observed.state, [observed.instruction[0]] * 2)
        both = policy.prepare(observed) | {
            "image.base": policy.prepare(observed)["image.base"][[0, 0]]
        }
        for inputs in (policy.prepare(same), both):
            log_prob = policy.evaluate(inputs, {"token_ids": torch.full((2, 8), 506)}, 1.0).log_prob
            assert (log_prob[0] - log_prob[1]).abs().max() > 1e-3


# the action tokenizer, against the lines of the official code in numpy


def official_encode(
    actions: np.ndarray,
    vocabulary: int,
    bins: int,
    low: np.ndarray,
    high: np.ndarray,
    mask: np.ndarray,
) -> np.ndarray:
    normalised = np.where(mask, 2 * (actions - low) / (high - low) - 1, actions)
    return vocabulary - np.digitize(np.clip(normalised, -1.0, 1.0), np.linspace(-1, 1, bins))


def official_decode(
    token_ids: np.ndarray,
    vocabulary: int,
    bins: int,
    low: np.ndarray,
    high: np.ndarray,
    mask: np.ndarray,
) -> np.ndarray:
    edges = np.linspace(-1, 1, bins)
    centres = (edges[:-1] + edges[1:]) / 2
    normalised = centres[np.clip(vocabulary - token_ids - 1, 0, len(centres) - 1)]
    return np.where(mask, 0.5 * (normalised + 1) * (high - low) + low, normalised)


@st.composite
def tokenizers(draw: st.DrawFn) -> tuple[ActionTokenizer, tuple[Any, ...]]:
    vocabulary, bins = draw(st.sampled_from([(32000, 256), (512, 32)]))
    dims = draw(st.integers(1, 7))
    low = np.array(draw(st.lists(st.integers(-80, 10), min_size=dims, max_size=dims))) / 16
    high = low + np.array(draw(st.lists(st.integers(1, 80), min_size=dims, max_size=dims))) / 16
    mask = np.array(draw(st.lists(st.booleans(), min_size=dims, max_size=dims)))
    statistics = {"q01": low.tolist(), "q99": high.tolist(), "mask": mask.tolist()}
    return ActionTokenizer(vocabulary, bins, statistics), (vocabulary, bins, low, high, mask)


@given(tokenizers(), st.integers(0, 2**32 - 1))
def test_action_tokens_against_the_official_code(
    drawn: tuple[ActionTokenizer, tuple[Any, ...]], seed: int
) -> None:
    tokenizer, official = drawn
    vocabulary, bins, *_ = official
    generator = np.random.default_rng(seed)
    ids = generator.integers(
        vocabulary - bins - 3, vocabulary + 3, (20, tokenizer.action_dim)
    )  # also beside the block: clipped
    np.testing.assert_allclose(
        tokenizer.decode(torch.tensor(ids)).numpy(), official_decode(ids, *official), atol=2e-6
    )
    actions = generator.uniform(-8, 8, (40, tokenizer.action_dim)).astype(np.float32)
    found = tokenizer.encode(torch.tensor(actions)).numpy()
    expected = official_encode(actions.astype(np.float64), *official)
    np.testing.assert_array_equal(found, expected)
    assert found.min() >= vocabulary - bins and found.max() < vocabulary


@given(tokenizers())
def test_a_decoded_action_keeps_its_token(drawn: tuple[ActionTokenizer, tuple[Any, ...]]) -> None:
    """All but the lowest id, whose centre is that of the next one."""
    tokenizer, (vocabulary, bins, *_) = drawn
    ids = torch.arange(vocabulary - bins, vocabulary)[:, None].expand(-1, tokenizer.action_dim)
    again = tokenizer.encode(tokenizer.decode(ids))
    assert torch.equal(again[1:], ids[1:]) and torch.equal(again[0], ids[1])
    assert (tokenizer.decode(ids).diff(dim=0) <= 0).all(), "a higher id is a lower action"


def test_edges_of_the_action_range() -> None:
    tokenizer = ActionTokenizer(32000, 256, {"q01": [-1.0], "q99": [1.0]})
    assert tokenizer.encode(torch.tensor([[1.0], [9.0], [-1.0], [-9.0]])).flatten().tolist() == [
        31744,
        31744,
        31999,
        31999,
    ]


def test_the_gripper_outside_the_mask_is_not_scaled() -> None:
    tokenizer = ActionTokenizer(
        32000, 256, {"q01": [-5.0, 0.0], "q99": [5.0, 1.0], "mask": [True, False]}
    )
    actions = tokenizer.decode(torch.tensor([[31745, 31745]]))
    assert actions.tolist() == [[pytest.approx(5 * 127 / 127.5), pytest.approx(127 / 127.5)]]


# prompts and images


def test_prompts_keep_the_beginning_in_column_0_and_end_in_the_empty_token() -> None:
    policy = tiny()
    ids, mask = policy.prompts(["push the cube", "Stack the RED cube on the green cube"])
    assert (
        ids.shape == mask.shape == (2, 32) and ids.dtype == torch.int64 and mask.dtype == torch.bool
    )
    assert (
        ids[:, 0].tolist() == [1, 1]
        and mask[:, 0].all()
        and ids[:, -1].tolist() == [4, 4]
        and mask[:, -1].all()
    )
    assert (ids[~mask] == 3).all() and not mask[0, 1] and (mask[:, 1:].int().diff(dim=1) >= 0).all()
    text = policy.prompts.tokenizer.decode(ids[1][mask[1]][1:-1].tolist())
    assert (
        text
        == "In: What action should the robot take to stack the red cube on the green cube?\nOut:"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_changes_nothing(temperature: float) -> None:
    policies = [tiny(prompt_length=length) for length in (23, 32, 57)]
    samples, evaluations = [], []
    for policy in policies:
        inputs = policy.prepare(observations(policy, 4))
        samples.append(act(policy, inputs, temperature))
        evaluations.append(policy.evaluate(inputs, samples[0].latent, temperature).log_prob)
    for sample, log_prob in zip(samples[1:], evaluations[1:], strict=True):
        assert torch.equal(sample.actions, samples[0].actions)
        torch.testing.assert_close(log_prob, evaluations[0], rtol=0, atol=1e-5)


def test_a_prompt_that_is_too_long_names_the_key() -> None:
    policy = tiny(prompt_length=20)
    with pytest.raises(UserError, match=r"prompt_length=2\d"):
        policy.prepare(observations(policy, 2))


def test_images_are_resized_as_pil_does_and_normalised_twice() -> None:
    policy = tiny()
    observed = Observation(
        {
            "base": torch.randint(
                0,
                256,
                (2, 80, 100, 3),
                dtype=torch.uint8,
                generator=torch.Generator().manual_seed(0),
            )
        },
        torch.zeros(2, 0),
        ["push the cube"] * 2,
    )
    image = policy.prepare(observed)["image.base"]
    assert image.shape == (2, 3, 64, 64) and image.dtype == torch.uint8
    flat = torch.full((1, 3, 2, 2), 128, dtype=torch.uint8)
    six = PixelNormalizer()(flat)[0, :, 0, 0]
    means = [0.484375, 0.455078125, 0.40625, 0.5, 0.5, 0.5]
    stds = [0.228515625, 0.2236328125, 0.224609375, 0.5, 0.5, 0.5]
    assert six.tolist() == pytest.approx(
        [(128 / 255 - mean) / std for mean, std in zip(means, stds, strict=True)], abs=1e-6
    )


# names and sizes of the published model

FULL_SIZE = {
    "vision_backbone.featurizer": 303_230_976,
    "vision_backbone.fused_featurizer": 427_680_704,
    "projector": 71_385_600,
    "language_model": 6_738_939_904,
}
BLOCK = {
    f"blocks.N.{layer}.{kind}"
    for layer in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    for kind in ("weight", "bias")
}
TOWER = BLOCK | {
    "pos_embed",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    "norm.weight",
    "norm.bias",
}
DINO = TOWER | {"cls_token", "reg_token", "blocks.N.ls1.scale_factor", "blocks.N.ls2.scale_factor"}
POOL = {
    f"attn_pool.{layer}.{kind}"
    for layer in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")
    for kind in ("weight", "bias")
}
LLAMA_LAYER = {f"self_attn.{name}_proj" for name in "qkvo"} | {
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
LLAMA = {
    f"model.layers.N.{name}.weight"
    for name in LLAMA_LAYER | {"input_layernorm", "post_attention_layernorm"}
}
FAMILIES = {
    "vision_backbone.featurizer": DINO,
    "vision_backbone.fused_featurizer": TOWER | POOL | {"attn_pool.latent"},
    "projector": {f"fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")},
    "language_model": LLAMA | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"},
}


def families(model: PrismaticVLA) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {part: set() for part in FAMILIES}
    for key in model.state_dict():
        part = next(part for part in FAMILIES if key.startswith(f"{part}."))
        found[part].add(
            ".".join(
                "N" if word.isdigit() else word for word in key.removeprefix(f"{part}.").split(".")
            )
        )
    return found


def test_weights_carry_the_published_names() -> None:
    assert families(PrismaticVLA(smaller_config())) == FAMILIES


def test_the_published_configuration_gives_the_published_sizes() -> None:
    config = {
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "text_config": {
            "model_type": "llama",
            "pad_token_id": 32000,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
    }
    with torch.device("meta"):
        model = PrismaticVLA(config)
    assert families(model) == FAMILIES and len(model.state_dict()) == 982
    assert {
        part: sum(p.numel() for p in model.get_submodule(part).parameters()) for part in FULL_SIZE
    } == FULL_SIZE
    assert model.prefix_length == 256 and model.hidden_size == 4096
    assert model.language_model.config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(("asset", "oft_plus"), [(ASSET, False), (OFT_PLUS, True)])
def test_the_packaged_assets_are_what_the_module_writes(
    tmp_path: Path, asset: Path, oft_plus: bool
) -> None:
    write_openvla(tmp_path, oft_plus)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (asset / name).read_text()
    written, packaged = (
        json.loads((folder / "dataset_statistics.json").read_text()) for folder in (tmp_path, asset)
    )
    assert written["maniskill"]["action"] == packaged["maniskill"]["action"]


# the wiring, as the official code has it


def stirred(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3
            )


@pytest.fixture
def vla() -> PrismaticVLA:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PrismaticVLA(smaller_config()).eval()


PIXELS = torch.randn(2, 6, 32, 32, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("tower", ["featurizer", "fused_featurizer"])
def test_features_come_from_the_second_to_last_block_without_a_norm(
    vla: PrismaticVLA, tower: str
) -> None:
    part = vla.vision_backbone.get_submodule(tower)
    before = vla.vision_backbone(PIXELS)
    for unused in (
        part.blocks[-1],
        part.norm,
        *([part.attn_pool] if tower == "fused_featurizer" else []),
    ):
        stirred(unused)
        assert torch.equal(vla.vision_backbone(PIXELS), before)
    stirred(part.blocks[-2])
    assert not torch.equal(vla.vision_backbone(PIXELS), before)


@torch.no_grad()
def test_features_are_those_of_the_patches(vla: PrismaticVLA) -> None:
    """Blocks that add nothing leave the patch embeddings; class token and registers are gone."""
    towers = (vla.vision_backbone.featurizer, vla.vision_backbone.fused_featurizer)
    expected = []
    for tower, pixels in zip(towers, PIXELS.split(3, dim=1), strict=True):
        for block in tower.blocks:
            for last in (block.attn.proj, block.mlp.fc2):
                torch.nn.init.zeros_(last.weight)
                torch.nn.init.zeros_(last.bias)
        patches = torch.nn.functional.conv2d(
            pixels, tower.patch_embed.proj.weight, tower.patch_embed.proj.bias, stride=16
        )
        expected.append(patches.flatten(2).transpose(1, 2) + tower.pos_embed)
    torch.testing.assert_close(
        vla.vision_backbone(PIXELS), torch.cat(expected, dim=2), rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_the_prompt_follows_the_image_and_the_image_the_beginning(vla: PrismaticVLA) -> None:
    ids = torch.tensor([[1, 7, 8, 9], [1, 3, 8, 4]])
    token_mask = torch.tensor([[True, False, True, True], [True, True, True, True]])
    embeds, mask = vla.embed_prompt(vla.encode_images(PIXELS, ids, token_mask), ids, token_mask)
    assert (
        mask[0].tolist() == [True] * (1 + vla.prefix_length) + [False, True, True] and mask[1].all()
    )
    table = vla.language_model.model.embed_tokens.weight
    patches = vla.projector(vla.vision_backbone(PIXELS))
    torch.testing.assert_close(
        embeds, torch.cat([table[ids[:, :1]], patches, table[ids[:, 1:]]], dim=1)
    )


@torch.no_grad()
def test_the_language_model_runs_as_transformers_runs_it(vla: PrismaticVLA) -> None:
    """Without padding: a plain causal language model."""
    ids = torch.tensor([[1, 7, 8, 9, 30], [1, 5, 8, 4, 31]])
    hidden = vla.hidden_states(vla.embed_tokens(ids), torch.ones(2, 5, dtype=torch.bool))
    torch.testing.assert_close(
        vla.language_model.lm_head(hidden),
        vla.language_model(input_ids=ids).logits,
        rtol=0,
        atol=1e-5,
    )


@torch.no_grad()
def test_the_same_features_can_be_acted_on_again() -> None:
    """Tokens of an earlier choice, left in the keys and values, must not be seen."""
    policy = tiny()
    features = policy.encode(policy.prepare(observations(policy, 3)))
    first = policy.act(features, noise(torch.arange(3)), 1.0)
    other = policy.act(features, noise(torch.arange(3) + 7), 1.0)
    again = policy.act(features, noise(torch.arange(3)), 1.0)
    assert not torch.equal(first.actions, other.actions)
    assert torch.equal(first.log_prob, again.log_prob) and torch.equal(first.actions, again.actions)


@torch.no_grad()
def test_decoding_allocates_its_keys_and_values_once() -> None:
    policy = tiny()
    features = policy.encode(policy.prepare(observations(policy, 2)))
    count = policy.spec.chunk * policy.spec.action_dim
    assert features.cache.capacity == features.mask.shape[1] + count - 1
    before = [buffer.data_ptr() for buffer in features.cache.buffers]
    policy.act(features, None, 0.0)
    assert before == [buffer.data_ptr() for buffer in features.cache.buffers] and len(before) == 3


# checkpoints that cannot be loaded


def edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        document = json.loads((directory / name).read_text())
        change(document)
        (directory / name).write_text(json.dumps(document))

    return edit


def edit_weights(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        state = load_file(directory / "model.safetensors")
        change(state)
        save_file(state, directory / "model.safetensors")

    return edit


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def as_pickle(name: str) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / name).write_bytes(pickle.dumps({"fc": [1.0]}))

    return edit


def shard(directory: Path, present: int) -> None:
    """Two shards and their index, of which ``present`` shards are there."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    parts = {
        f"model-0000{i + 1}-of-00002.safetensors": dict(list(state.items())[i::2]) for i in range(2)
    }
    for name, part in list(parts.items())[:present]:
        save_file(part, directory / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


HEAD = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("openvla")
    tiny(directory=smaller_directory(tmp_path_factory.mktemp("smaller"))).save(directory)
    return directory


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A good checkpoint, to be spoilt."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(directory: Path, **options: Any) -> OpenVLAPolicy:
    return OpenVLAPolicy.load(directory, OpenVLAOptions(**options))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (edit_weights(lambda state: state.pop(HEAD)), f"missing.*{HEAD}"),
        (edit_weights(lambda state: state.update(surplus=torch.zeros(1))), "unexpected.*surplus"),
        (
            edit_weights(lambda state: state.update({HEAD: torch.zeros(3, 32)})),
            f"{HEAD}.*\\[3, 32\\].*\\[512, 32\\]",
        ),
        (edit_weights(lambda state: state[HEAD].fill_(float("nan"))), f"{HEAD}.*NaN"),
        (edit_weights(lambda state: state[HEAD][0].fill_(float("inf"))), f"{HEAD}.*infinite"),
        (truncate, "model.safetensors"),
        (as_pickle("model.safetensors"), "model.safetensors"),
        (as_pickle("pytorch_model.bin"), "model.safetensors"),
        (lambda directory: shard(directory, 1), "model-00002-of-00002.safetensors"),
        (lambda directory: (directory / "config.json").unlink(), "config.json"),
        (lambda directory: (directory / "config.json").write_text("{"), "config.json"),
        (lambda directory: (directory / "config.json").write_text("[]"), "config.json"),
        (lambda directory: (directory / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda directory: (directory / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (edit_json("config.json", lambda config: config.pop("n_action_bins")), "n_action_bins"),
        (edit_json("config.json", lambda config: config.pop("text_config")), "text_config"),
        (edit_json("config.json", lambda config: config.pop("vision_config")), "timm_model_ids"),
        (
            edit_json(
                "dataset_statistics.json",
                lambda statistics: statistics.update(bridge=statistics["maniskill"]),
            ),
            "unnorm_key.*bridge",
        ),
        (edit_json("dataset_statistics.json", lambda statistics: statistics.clear()), "unnorm_key"),
        (
            edit_json(
                "dataset_statistics.json",
                lambda statistics: statistics["maniskill"]["action"].pop("q01"),
            ),
            "q01",
        ),
    ],
)
def test_a_bad_checkpoint_is_one_line_that_names_the_fault(
    checkpoint: Path, spoil: Callable[[Path], None], named: str
) -> None:
    load(checkpoint)
    spoil(checkpoint)
    with pytest.raises(UserError, match=named) as error:
        load(checkpoint)
    assert "\n" not in str(error.value)


def test_an_unknown_unnorm_key_lists_the_known_ones(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"unnorm_key=libero.*maniskill"):
        load(checkpoint, unnorm_key="libero")


def test_a_sharded_checkpoint_is_the_same_policy(checkpoint: Path) -> None:
    whole = load(checkpoint)
    shard(checkpoint, 2)
    pieces = load(checkpoint)
    for name, value in whole.backbone.state_dict().items():
        assert torch.equal(pieces.backbone.state_dict()[name], value)


def test_statistics_may_stand_in_the_configuration(checkpoint: Path) -> None:
    statistics = json.loads((checkpoint / "dataset_statistics.json").read_text())
    expected = load(checkpoint).action_tokens.scale
    edit_json(
        "config.json",
        lambda config: config.update(norm_stats=statistics | {"other": statistics["maniskill"]}),
    )(checkpoint)
    assert torch.equal(load(checkpoint).action_tokens.scale, expected), (
        "a fine-tune's dataset_statistics.json replaces norm_stats"
    )
    (checkpoint / "dataset_statistics.json").unlink()
    assert torch.equal(load(checkpoint, unnorm_key="maniskill").action_tokens.scale, expected)


def test_the_first_random_weights_are_a_function_of_the_seed() -> None:
    same, other = (tiny(seed).backbone.state_dict() for seed in (0, 1))
    again = tiny(0).backbone.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in same.items())
    assert any(not torch.equal(value, other[name]) for name, value in same.items())

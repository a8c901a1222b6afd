"""openpi's checkpoints in JAX: read as orbax wrote them, and computed with as openpi does."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.files import load_weights
from rlinf_vla.models.pi0.checkpoint import network_config, read_document, read_state
from rlinf_vla.models.pi0.network import Pi0Network
from rlinf_vla.models.pi0.openpi import UNUSED_HEAD, Arrays, JaxCheckpoint, Part, layout
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.testing.policy_calls import act, observations
from tests.models.tiny_openvla import ASSETS
from tests.parity import openpi_jax
from tests.parity.fixtures import ROOT
from tests.skips import needs

pytestmark = needs("openpi")
STATISTICS = {
    name: {"mean": [0.1] * count, "std": [0.5] * count, "q01": [-1.0] * count, "q99": [1.0] * count}
    for name, count in (("state", 8), ("actions", 7))
}
NAMES = ("pi0", "pi05")


def directory(path: Path, name: str) -> Path:
    """As openpi publishes one, with the tokenizer that it downloads separately."""
    shutil.copytree(ROOT / "openpi_orbax" / name, path)
    assets = path / "assets" / "physical-intelligence" / "libero"
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": STATISTICS}))
    shutil.copyfile(ASSETS / "pi0_tiny" / "tokenizer.json", path / "tokenizer.json")
    return path


def load(path: Path, **options: Any) -> Pi0Policy:
    return Pi0Policy.load(path, Pi0Options(denoise_steps=3, prompt_length=96, **options))


@pytest.mark.parametrize("name", NAMES)
def test_every_array_is_read_as_orbax_wrote_it(name: str) -> None:
    arrays = Arrays(ROOT / "openpi_orbax" / name)
    expected = openpi_jax.random_arrays(name == "pi05")
    assert arrays.stored.keys() == expected.keys() == layout(name == "pi05").keys()
    for each, value in expected.items():
        assert arrays.shape(each) == value.shape and torch.equal(
            arrays.read(each), torch.from_numpy(value)
        )


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_velocity_is_that_of_openpis_einsums(name: str) -> None:
    path = ROOT / "openpi_orbax" / name
    with torch.device("meta"):
        network = Pi0Network(
            network_config(read_document(path) | {"action_horizon": openpi_jax.HORIZON})
        )
    load_weights(network, read_state(path), path)
    generator = np.random.default_rng(0)
    pixels = generator.uniform(-1, 1, (2, 8, 8, 3))
    tokens = generator.integers(0, openpi_jax.VOCABULARY, (2, 5))
    state = generator.normal(size=(2, openpi_jax.ACTIONS))
    x = generator.normal(size=(2, openpi_jax.HORIZON, openpi_jax.ACTIONS))
    arrays = {
        name: value.astype(np.float64)
        for name, value in openpi_jax.random_arrays(name == "pi05").items()
    }
    expected = openpi_jax.velocity(arrays, pixels, tokens, state, x, 0.7)
    images = torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2)[:, None]
    everywhere = torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    prefix = network.prefix(images, everywhere[0], torch.tensor(tokens), everywhere[1])
    patches = torch.from_numpy(openpi_jax.images_of(arrays, pixels)).float()
    torch.testing.assert_close(
        network.embed_prefix(images, everywhere[0], torch.tensor(tokens), everywhere[1])[0][:, :16],
        patches,
    )
    found, _ = network.velocity(
        prefix, torch.tensor(state).float(), torch.tensor(x).float(), torch.tensor([0.7])
    )
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), rtol=1e-4, atol=2e-5)


def to_jax(state: dict[str, torch.Tensor], pi05: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Our weights in JAX's layout, by NumPy and independently of the reader."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in state.items():
        arrays[name] = value.float().numpy()
    paligemma = "paligemma_with_expert.paligemma.model"
    vision = f"{paligemma}.vision_tower.vision_model"
    language = f"{paligemma}.language_model"
    found: dict[str, Any] = {}

    def stack(name: str, ours: str, count: int, change: Any = lambda value: value) -> None:
        found[name] = np.stack([change(arrays[ours.format(i)]) for i in range(count)])

    def linear(name: str, ours: str) -> None:
        found[f"{name}/kernel"] = arrays[f"{ours}.weight"].T
        found[f"{name}/bias"] = arrays[f"{ours}.bias"]

    found["PaliGemma/img/embedding/kernel"] = arrays[
        f"{vision}.embeddings.patch_embedding.weight"
    ].transpose(2, 3, 1, 0)
    found["PaliGemma/img/embedding/bias"] = arrays[f"{vision}.embeddings.patch_embedding.bias"]
    found["PaliGemma/img/pos_embedding"] = arrays[f"{vision}.embeddings.position_embedding.weight"][
        None
    ]
    linear("PaliGemma/img/head", f"{paligemma}.multi_modal_projector.linear")
    norm = "PaliGemma/img/Transformer/encoder_norm"
    found[f"{norm}/scale"] = arrays[f"{vision}.post_layernorm.weight"]
    found[f"{norm}/bias"] = arrays[f"{vision}.post_layernorm.bias"]
    depth, heads = openpi_jax.VISION_DEPTH, openpi_jax.VISION_HEADS
    for i in (0, 1):
        layer = f"{vision}.encoder.layers.{{}}"
        stack(f"{openpi_jax.BLOCK}/LayerNorm_{i}/scale", f"{layer}.layer_norm{i + 1}.weight", depth)
        stack(f"{openpi_jax.BLOCK}/LayerNorm_{i}/bias", f"{layer}.layer_norm{i + 1}.bias", depth)
        stack(
            f"{openpi_jax.BLOCK}/MlpBlock_0/Dense_{i}/kernel",
            f"{layer}.mlp.fc{i + 1}.weight",
            depth,
            np.transpose,
        )
        stack(f"{openpi_jax.BLOCK}/MlpBlock_0/Dense_{i}/bias", f"{layer}.mlp.fc{i + 1}.bias", depth)
    for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v")):
        name = f"{layer}.self_attn.{ours}_proj"
        stack(
            f"{openpi_jax.ATTENTION}/{theirs}/kernel",
            f"{name}.weight",
            depth,
            lambda value: value.T.reshape(len(value), heads, -1),
        )
        stack(
            f"{openpi_jax.ATTENTION}/{theirs}/bias",
            f"{name}.bias",
            depth,
            lambda value: value.reshape(heads, -1),
        )
    stack(
        f"{openpi_jax.ATTENTION}/out/kernel",
        f"{layer}.self_attn.out_proj.weight",
        depth,
        lambda value: value.T.reshape(heads, -1, len(value)),
    )
    stack(f"{openpi_jax.ATTENTION}/out/bias", f"{layer}.self_attn.out_proj.bias", depth)
    found["PaliGemma/llm/embedder/input_embedding"] = arrays[
        "paligemma_with_expert.paligemma.lm_head.weight"
    ]
    depth, size = openpi_jax.DEPTH, openpi_jax.HEAD
    for suffix, ours in (("", language), ("_1", "paligemma_with_expert.gemma_expert.model")):
        layers = openpi_jax.LAYERS
        layer = f"{ours}.layers.{{}}"

        def by_head(value: Any) -> Any:
            return value.reshape(-1, size, value.shape[1]).transpose(0, 2, 1)

        stack(
            f"{layers}/attn/q_einsum{suffix}/w", f"{layer}.self_attn.q_proj.weight", depth, by_head
        )
        keys, values = (
            np.stack(
                [
                    by_head(arrays[f"{layer.format(i)}.self_attn.{name}_proj.weight"])
                    for i in range(depth)
                ]
            )
            for name in ("k", "v")
        )
        found[f"{layers}/attn/kv_einsum{suffix}/w"] = np.stack([keys, values], axis=1)
        stack(
            f"{layers}/attn/attn_vec_einsum{suffix}/w",
            f"{layer}.self_attn.o_proj.weight",
            depth,
            lambda value: value.T.reshape(-1, size, len(value)),
        )
        gates, ups = (
            np.stack([arrays[f"{layer.format(i)}.mlp.{name}_proj.weight"].T for i in range(depth)])
            for name in ("gate", "up")
        )
        found[f"{layers}/mlp{suffix}/gating_einsum"] = np.stack([gates, ups], axis=1)
        stack(f"{layers}/mlp{suffix}/linear", f"{layer}.mlp.down_proj.weight", depth, np.transpose)
        for theirs, norm in (
            ("pre_attention_norm", "input_layernorm"),
            ("pre_ffw_norm", "post_attention_layernorm"),
        ):
            if pi05 and suffix:
                stack(
                    f"{layers}/{theirs}{suffix}/Dense_0/kernel",
                    f"{layer}.{norm}.dense.weight",
                    depth,
                    np.transpose,
                )
                stack(
                    f"{layers}/{theirs}{suffix}/Dense_0/bias", f"{layer}.{norm}.dense.bias", depth
                )
            else:
                stack(f"{layers}/{theirs}{suffix}/scale", f"{layer}.{norm}.weight", depth)
        if pi05 and suffix:
            linear(f"PaliGemma/llm/final_norm{suffix}/Dense_0", f"{ours}.norm.dense")
        else:
            found[f"PaliGemma/llm/final_norm{suffix}/scale"] = arrays[f"{ours}.norm.weight"]
    for name in {key.partition(".")[0] for key in state if "." in key} - {"paligemma_with_expert"}:
        linear(name, name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_our_weights_survive_the_way_to_jax_and_back(tmp_path: Path, name: str) -> None:
    policy = load(directory(tmp_path / name, name), card=f"{name}_libero", images=["base"])
    with torch.no_grad():
        for parameter in policy.backbone.parameters():
            parameter.copy_(torch.randn_like(parameter))
    state = dict(policy.backbone.state_dict())
    arrays = to_jax(
        {key: value for key, value in state.items() if key != UNUSED_HEAD}, name == "pi05"
    )
    for key, tensors in layout(name == "pi05").items():
        array = torch.from_numpy(np.ascontiguousarray(arrays.pop(key)))
        for ours, change in tensors.items():
            for layer in range(len(array)) if "{}" in ours else [None]:
                place = ours.format(layer)
                assert torch.equal(
                    change(array if layer is None else array[layer]), state.pop(place)
                ), place
    assert not arrays and state.keys() == {UNUSED_HEAD}


@pytest.mark.parametrize("name", NAMES)
def test_a_published_directory_acts_and_is_saved_as_ours(tmp_path: Path, name: str) -> None:
    path = directory(tmp_path / "pi05_libero" if name == "pi05" else tmp_path / "pi0_libero", name)
    policy = load(path)
    assert policy.config.horizon == (10 if name == "pi05" else 50) and policy.config.pi05 == (
        name == "pi05"
    ), "the card's"
    assert not any(value.is_meta for value in policy.parameters()) and all(
        value.is_contiguous() for value in policy.parameters()
    )
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    assert {
        value.dtype
        for key, value in load_file(saved / "model.safetensors").items()
        if key != UNUSED_HEAD
    } == {torch.float32}
    again = load(saved)
    assert again.config == policy.config and again.spec == policy.spec
    inputs = policy.prepare(observations(policy, 2))
    assert torch.equal(act(again, inputs).actions, act(policy, inputs).actions)


def test_the_horizon_is_asked_for_where_nothing_tells_it(tmp_path: Path) -> None:
    path = directory(tmp_path / "mine", "pi05")
    with pytest.raises(
        UserError, match=r"model.options.action_horizon: .* \(50 by default, 10 for pi05_libero\)"
    ):
        load(path)
    assert load(path, action_horizon=6).config.horizon == 6
    (path / "config.json").write_text(json.dumps({"action_horizon": 8}))
    assert load(path).config.horizon == 8


def test_without_the_extra_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(
        UserError,
        match=r"is a checkpoint of openpi in JAX, which needs tensorstore: pip install 'rlinf-vla\[openpi\]'$",
    ):
        load(directory(tmp_path / "pi05_libero", "pi05"))


def renamed(path: Path, change: Any) -> Path:
    """With other names of arrays in its metadata."""
    file = path / "params" / "_METADATA"
    document = json.loads(file.read_text())
    document["tree_metadata"] = change(document["tree_metadata"])
    file.write_text(json.dumps(document))
    return path


def entry(*name: str) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": each, "key_type": 2} for each in ("params", *name)],
        "value_metadata": {},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tree: {key: value for key, value in tree.items() if "q_einsum_1" not in key},
            r"lacks of openpi's π₀.₅: 1 arrays, first PaliGemma/llm/layers/attn/q_einsum_1/w$",
        ),
        (
            lambda tree: tree | {"x": entry("PaliGemma", "extra")},
            "has beside those of openpi's π₀.₅: 1 arrays, first PaliGemma/extra$",
        ),
        (
            lambda tree: (
                tree | {"x": entry("PaliGemma", "llm", "layers", "attn", "q_einsum", "lora_a")}
            ),
            r"holds LoRA adapters \(first PaliGemma/llm/layers/attn/q_einsum/lora_a\), which are not read: merge them in openpi$",
        ),
        (
            lambda tree: {key: value for key, value in tree.items() if "action_in" not in key},
            r"is not a π₀ or π₀.₅ \(it has no action_in_proj",
        ),
        (
            lambda tree: {"x": {}},
            r"_METADATA cannot be read: it is missing or damaged, copy the checkpoint again$",
        ),
    ],
)
def test_another_model_is_refused_in_one_line(tmp_path: Path, change: Any, words: str) -> None:
    path = renamed(directory(tmp_path / "pi05_libero", "pi05"), change)
    with pytest.raises(UserError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_the_folder_of_the_arrays_is_not_the_checkpoint(tmp_path: Path) -> None:
    path = directory(tmp_path / "pi05_libero", "pi05")
    with pytest.raises(
        UserError,
        match=r"params has only the arrays of a checkpoint: set model.checkpoint=.*pi05_libero$",
    ):
        load(path / "params")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = directory(tmp_path / "pi05_libero", "pi05")
    largest = max(
        (file for file in path.rglob("ocdbt.process_0/d/*")), key=lambda file: file.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:1000])
    with pytest.raises(
        UserError,
        match=r"params: .* cannot be read \(.*\): the checkpoint is damaged, copy it again",
    ) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_an_array_is_read_once_for_all_its_layers() -> None:
    """In the order of the state, so that no more than one is in memory beside the weights."""
    state = JaxCheckpoint(ROOT / "openpi_orbax" / "pi05").state()
    names = [part.name for part in state.values() if isinstance(part, Part)]
    assert [name for name, _ in groupby(names)] == list(layout(pi05=True)), (
        "the layers of an array follow one another"
    )
    arrays = Arrays(ROOT / "openpi_orbax" / "pi05")
    first = arrays.read(names[0])
    assert (
        arrays.read(names[0]) is first
        and arrays.read(names[-1]) is not first
        and arrays.read(names[0]) is not first
    )


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("folders", [False, True])
def test_other_formats_of_orbax_and_bfloat16_are_read(
    tmp_path: Path, driver: str, folders: bool
) -> None:
    """Older ones have a folder per array, and newer ones can be zarr 3."""
    import ml_dtypes
    import tensorstore

    params = tmp_path / "params"
    params.mkdir()
    arrays = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in openpi_jax.random_arrays(pi05=True).items()
    }
    for name, value in arrays.items():
        stored = ".".join(("params", *name.split("/")))
        base = {"driver": "file", "path": f"{params / stored if folders else params}/"}
        store = base if folders else {"driver": "ocdbt", "base": base, "path": f"{stored}/"}
        spec = {"driver": driver, "kvstore": store}
        tensorstore.open(
            spec, create=True, dtype=tensorstore.bfloat16, shape=value.shape
        ).result().write(value).result()
    tree = {name: entry(*name.split("/")) for name in arrays}
    (params / "_METADATA").write_text(
        json.dumps({"tree_metadata": tree, "use_zarr3": driver == "zarr3"})
    )
    checkpoint = JaxCheckpoint(tmp_path)
    for name, value in arrays.items():
        found = checkpoint.arrays.read(name)
        assert found.dtype == torch.bfloat16 and torch.equal(
            found.float(), torch.from_numpy(value.astype(np.float32))
        )


def test_statistics_that_early_openpi_padded_have_the_robots_size(tmp_path: Path) -> None:
    path = directory(tmp_path / "pi05_libero", "pi05")
    padded = {
        name: {key: values + [0.0] * (32 - len(values)) for key, values in each.items()}
        for name, each in STATISTICS.items()
    }
    file = path / "assets" / "physical-intelligence" / "libero" / "norm_stats.json"
    file.write_text(json.dumps({"norm_stats": padded}))
    policy = load(path)
    assert (policy.spec.state_dim, policy.spec.action_dim) == (8, 7)


def test_the_tokenizer_is_that_of_paligemma_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = directory(tmp_path / "pi05_libero", "pi05")
    tokenizer = (path / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    words = r"has no tokenizer.json, and that of google/paligemma-3b-pt-224 cannot be downloaded .* or copy its tokenizer.json into"
    with pytest.raises(UserError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    folder = tmp_path / "hub" / "models--google--paligemma-3b-pt-224"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copyfile(tokenizer, folder / "snapshots" / ("0" * 40) / "tokenizer.json")
    policy = load(path)
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    assert (saved / "tokenizer.json").read_bytes() == tokenizer.read_bytes()

"""OpenVLA's network against the official code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.models.openvla.actions import ActionTokenizer
from rlinf_vla.models.openvla.cache import StaticCache
from rlinf_vla.models.openvla.decoding import Decoder
from rlinf_vla.models.openvla.prismatic import PrismaticVLA

from .fixtures import Arrays, Fixture, difference, prompts
from .precision import EPS, Precision, agree, gradients_agree


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return Fixture("openvla_tiny")


@pytest.fixture(scope="module")
def network(fixture: Fixture) -> PrismaticVLA:
    network = PrismaticVLA(fixture.config)
    network.load_state_dict(fixture.weights)
    return network


def teacher_forced(
    at: Precision, network: PrismaticVLA, pixels: Tensor, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Last states ``[B, patches + L, d]``."""
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    patches = at(network).encode_images(at(pixels), ids, mask)
    return at(network).hidden_states(*at(network).embed_prompt(patches, ids, mask))


@torch.no_grad()
def test_patches(fixture: Fixture, network: PrismaticVLA) -> None:
    def compute(at: Precision) -> dict[str, Tensor]:
        pixels = at(fixture.inputs["pixel_values"])
        towers = at(network).vision_backbone
        return {
            "dino_patches": towers.featurizer(pixels[:, :3]),
            "siglip_patches": towers.fused_featurizer(pixels[:, 3:]),
            "projected_patches": at(network).projector(towers(pixels)),
        }

    agree(compute, fixture.expected)


@torch.no_grad()
def test_states_and_logits(fixture: Fixture, network: PrismaticVLA) -> None:
    config, expected = fixture.config, fixture.expected
    first = (
        config["text_config"]["vocab_size"] - config["pad_to_multiple_of"] - config["n_action_bins"]
    )
    for i, prompt in enumerate(prompts(fixture)):
        ids = expected[f"generated_ids_{i}"][None]
        assert (ids[:, : prompt.shape[1]] == prompt).all()
        count = ids.shape[1] - prompt.shape[1]

        def compute(
            at: Precision, i: int = i, ids: Tensor = ids, count: int = count
        ) -> dict[str, Tensor]:
            states = teacher_forced(at, network, fixture.inputs["pixel_values"][i : i + 1], ids)
            logits = at(network).language_model.lm_head(states)[0]
            actions = ids[0, -count:, None]
            slots = logits[-count - 1 : -1]
            among_actions = torch.log_softmax(slots[:, first : first + config["n_action_bins"]], -1)
            return {
                f"tf_last_hidden_{i}": states[0],
                f"tf_logits_{i}": logits[:, expected["logit_columns"]],
                f"tf_logprob_fullvocab_{i}": torch.log_softmax(slots, -1).gather(1, actions)[:, 0],
                f"tf_logprob_action_vocab_{i}": among_actions,
            }

        agree(compute, expected)


@torch.no_grad()
def test_greedy_decoding(fixture: Fixture, network: PrismaticVLA) -> None:
    config = fixture.config
    statistics = config["norm_stats"]["toy_ds"]["action"]
    tokenizer = ActionTokenizer(
        config["text_config"]["vocab_size"] - config["pad_to_multiple_of"],
        config["n_action_bins"],
        statistics,
    )
    assert difference(tokenizer.centres, fixture.expected["bin_centers"]) <= EPS
    for i, prompt in enumerate(prompts(fixture)):
        mask = torch.ones_like(prompt, dtype=torch.bool)
        patches = network.encode_images(fixture.inputs["pixel_values"][i : i + 1], prompt, mask)
        embeds, mask = network.embed_prompt(patches, prompt, mask)
        cache = StaticCache(mask.shape[1] + tokenizer.action_dim - 1)
        tokens = [
            network.language_model.lm_head(
                network.hidden_states(embeds, mask, cache)[:, -1]
            ).argmax(-1)
        ]
        decoder = Decoder(network, cache, mask)
        for index in range(tokenizer.action_dim - 1):
            tokens.append(
                network.language_model.lm_head(decoder.step(index, tokens[-1])).argmax(-1)
            )
        ids = torch.cat([prompt[0], *tokens])
        assert ids.tolist() == fixture.expected[f"generated_ids_{i}"].tolist()
        assert (
            difference(tokenizer.decode(torch.cat(tokens)), fixture.expected[f"actions_{i}"])
            <= 4 * EPS
        )


def test_a_padded_batch_its_loss_and_gradients(fixture: Fixture, network: PrismaticVLA) -> None:
    inputs = fixture.inputs
    expected = fixture.expected
    norms = fixture.json("grad_norms.json")
    counts = F.pad(inputs["batch_mask"], (network.prefix_length, 0), value=True)
    labels = F.pad(inputs["batch_labels"][:, 1:], (network.prefix_length + 1, 0), value=-100)

    def forward(at: Precision) -> dict[str, Tensor]:
        states = teacher_forced(
            at, network, inputs["pixel_values"], inputs["batch_ids"], inputs["batch_mask"]
        )
        logits = at(network).language_model.lm_head(states)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"batch_logits": logits[..., expected["logit_columns"]][counts], "batch_loss": loss}

    def gradients(at: Precision) -> dict[str, Tensor]:
        named = dict(at(network).named_parameters())
        loss = forward(at)["batch_loss"]
        return dict(
            zip(
                norms,
                torch.autograd.grad(loss, [named[name] for name in norms], materialize_grads=True),
                strict=True,
            )
        )

    agree(
        forward,
        {"batch_logits": expected["batch_logits"][counts], "batch_loss": expected["batch_loss"]},
    )
    gradients_agree(gradients, norms)


@torch.no_grad()
def test_an_adapter_of_the_official_script(fixture: Fixture, tmp_path: Path) -> None:
    """Stock peft loads it into this network."""
    from peft import PeftModel
    from safetensors.torch import save_file

    network = PrismaticVLA(fixture.config)
    network.load_state_dict(fixture.weights)
    shutil.copyfile(
        fixture.path / "lora_adapter" / "adapter_config.json", tmp_path / "adapter_config.json"
    )
    save_file(
        fixture.tensors("lora_adapter/adapter_model.safetensors.gz"),
        tmp_path / "adapter_model.safetensors",
    )
    adapted = PeftModel.from_pretrained(network, str(tmp_path))
    expected = fixture.expected
    lora = Arrays(fixture.path / "expected_lora.npz")

    def logits(at: Precision, model: PrismaticVLA, i: int) -> Tensor:
        states = teacher_forced(
            at,
            model,
            fixture.inputs["pixel_values"][i : i + 1],
            expected[f"generated_ids_{i}"][None],
        )
        return at(model).language_model.lm_head(states)[0][:, expected["logit_columns"]]

    agree(lambda at: {f"lora_logits_{i}": logits(at, network, i) for i in range(2)}, lora)
    merged = adapted.merge_and_unload()
    agree(lambda at: {"merged_logits_0": logits(at, merged, 0)}, lora)


def test_everything_was_compared(fixture: Fixture) -> None:
    assert fixture.expected.keys() == fixture.expected.used

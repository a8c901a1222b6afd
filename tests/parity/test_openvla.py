"""OpenVLA's network against the official code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.models.openvla.actions import ActionTokenizer
from rlinf_vla.models.openvla.decoding import Decoder, StaticCache
from rlinf_vla.models.openvla.prismatic import PrismaticVLA

from .fixtures import Arrays, Fixture, difference, gradient_norms_differ, prompts


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return Fixture("openvla_tiny")


@pytest.fixture(scope="module")
def network(fixture: Fixture) -> PrismaticVLA:
    network = PrismaticVLA(fixture.config)
    network.load_state_dict(fixture.weights)
    return network


def teacher_forced(network: PrismaticVLA, pixels: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Last states ``[B, patches + L, d]``."""
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return network.hidden_states(*network.embed_prompt(pixels, ids, mask))


@torch.no_grad()
def test_patches(fixture: Fixture, network: PrismaticVLA) -> None:
    pixels, expected = fixture.inputs["pixel_values"], fixture.expected
    towers = network.vision_backbone
    assert difference(towers.featurizer(pixels[:, :3]), expected["dino_patches"]) <= 2e-5
    assert difference(towers.fused_featurizer(pixels[:, 3:]), expected["siglip_patches"]) <= 2e-5
    assert difference(network.projector(towers(pixels)), expected["projected_patches"]) <= 2e-5


@torch.no_grad()
def test_states_and_logits(fixture: Fixture, network: PrismaticVLA) -> None:
    expected, columns = fixture.expected, fixture.expected["logit_columns"]
    for i, prompt in enumerate(prompts(fixture)):
        ids = expected[f"generated_ids_{i}"][None]
        assert (ids[:, : prompt.shape[1]] == prompt).all()
        states = teacher_forced(network, fixture.inputs["pixel_values"][i : i + 1], ids)
        logits = network.logits(states)[0]
        assert difference(states[0], expected[f"tf_last_hidden_{i}"]) <= 2e-5
        assert difference(logits[:, columns], expected[f"tf_logits_{i}"]) <= 2e-5
        count = ids.shape[1] - prompt.shape[1]
        actions, slots = ids[0, -count:], logits[-count - 1 : -1]
        chosen = torch.log_softmax(slots, -1).gather(1, actions[:, None])[:, 0]
        assert difference(chosen, expected[f"tf_logprob_fullvocab_{i}"]) <= 1e-4
        first = fixture.config["text_config"]["vocab_size"] - fixture.config["pad_to_multiple_of"] - fixture.config["n_action_bins"]
        among_actions = torch.log_softmax(slots[:, first : first + fixture.config["n_action_bins"]], -1)
        assert difference(among_actions, expected[f"tf_logprob_action_vocab_{i}"]) <= 1e-4


@torch.no_grad()
def test_greedy_decoding(fixture: Fixture, network: PrismaticVLA) -> None:
    config = fixture.config
    statistics = config["norm_stats"]["toy_ds"]["action"]
    tokenizer = ActionTokenizer(config["text_config"]["vocab_size"] - config["pad_to_multiple_of"], config["n_action_bins"], statistics)
    assert difference(tokenizer.centres, fixture.expected["bin_centers"]) <= 1e-7
    for i, prompt in enumerate(prompts(fixture)):
        embeds, mask = network.embed_prompt(fixture.inputs["pixel_values"][i : i + 1], prompt, torch.ones_like(prompt, dtype=torch.bool))
        cache = StaticCache(mask.shape[1] + tokenizer.action_dim - 1)
        tokens = [network.logits(network.hidden_states(embeds, mask, cache)[:, -1]).argmax(-1)]
        decoder = Decoder(network, cache, mask)
        for index in range(tokenizer.action_dim - 1):
            tokens.append(network.logits(decoder.step(index, tokens[-1])).argmax(-1))
        ids = torch.cat([prompt[0], *tokens])
        assert ids.tolist() == fixture.expected[f"generated_ids_{i}"].tolist()
        assert difference(tokenizer.decode(torch.cat(tokens)), fixture.expected[f"actions_{i}"]) <= 1e-6


def test_a_padded_batch_its_loss_and_gradients(fixture: Fixture, network: PrismaticVLA) -> None:
    inputs, expected = fixture.inputs, fixture.expected
    network.zero_grad(set_to_none=True)
    states = teacher_forced(network, inputs["pixel_values"], inputs["batch_ids"], inputs["batch_mask"])
    logits = network.logits(states)
    counts = torch.cat([inputs["batch_mask"].new_ones(len(logits), network.prefix_length), inputs["batch_mask"]], dim=1)
    wrong = (logits[..., expected["logit_columns"]] - expected["batch_logits"]).abs().amax(-1)
    assert float(wrong.detach()[counts].max()) <= 5e-5
    labels = F.pad(inputs["batch_labels"][:, 1:], (network.prefix_length + 1, 0), value=-100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert abs(float(loss) - float(expected["batch_loss"])) <= 1e-5
    loss.backward()
    assert not gradient_norms_differ(dict(network.named_parameters()), fixture.json("grad_norms.json"))


@torch.no_grad()
def test_an_adapter_of_the_official_script(fixture: Fixture, tmp_path: Path) -> None:
    """Stock peft puts it onto this network."""
    from peft import PeftModel
    from safetensors.torch import save_file

    network = PrismaticVLA(fixture.config)
    network.load_state_dict(fixture.weights)
    shutil.copyfile(fixture.path / "lora_adapter" / "adapter_config.json", tmp_path / "adapter_config.json")
    save_file(fixture.tensors("lora_adapter/adapter_model.safetensors.gz"), tmp_path / "adapter_model.safetensors")
    adapted = PeftModel.from_pretrained(network, str(tmp_path))
    expected = fixture.expected
    lora = Arrays(fixture.path / "expected_lora.npz")
    for i in range(2):
        states = teacher_forced(network, fixture.inputs["pixel_values"][i : i + 1], expected[f"generated_ids_{i}"][None])
        assert difference(network.logits(states)[0][:, expected["logit_columns"]], lora[f"lora_logits_{i}"]) <= 2e-5
    merged = adapted.merge_and_unload()
    states = teacher_forced(merged, fixture.inputs["pixel_values"][:1], expected["generated_ids_0"][None])
    assert difference(merged.logits(states)[0][:, expected["logit_columns"]], lora["merged_logits_0"]) <= 2e-5


def test_everything_was_compared(fixture: Fixture) -> None:
    assert fixture.expected.keys() == fixture.expected.used

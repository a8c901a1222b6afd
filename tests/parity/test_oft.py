"""OpenVLA-OFT's network, heads and log-probabilities against the official code and RLinf's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rlinf_vla.models.openvla.actions import ActionTokenizer
from rlinf_vla.models.openvla.oft import L1RegressionHead, slot_states
from rlinf_vla.models.openvla.prismatic import PrismaticVLA

from .fixtures import Arrays, Fixture, closed, difference, gradient_norms_differ, prompts

STOP, FIRST, BINS = 2, 31744, 256


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return Fixture("oft_tiny")


@pytest.fixture(scope="module")
def film() -> Fixture:
    return Fixture("oft_film_tiny")


@pytest.fixture(scope="module")
def rl(fixture: Fixture) -> Arrays:
    return Arrays(fixture.path / "rl_expected.npz")


def network(fixture: Fixture, **switches: Any) -> PrismaticVLA:
    result = PrismaticVLA(fixture.config, bidirectional=True, **switches)
    weights = dict(fixture.weights)
    if switches.get("proprio_dim"):
        weights |= {f"proprio_projector.{name}": value for name, value in fixture.component("proprio_projector").items()}
    result.load_state_dict(weights)
    return result


@pytest.fixture(scope="module")
def one_image(fixture: Fixture) -> PrismaticVLA:
    return network(fixture)


@pytest.fixture(scope="module")
def two_images(fixture: Fixture) -> PrismaticVLA:
    return network(fixture, num_images=2, proprio_dim=fixture.inputs["proprio"].shape[1])


@pytest.fixture(scope="module")
def head(fixture: Fixture) -> L1RegressionHead:
    return l1_head(fixture)


def l1_head(fixture: Fixture) -> L1RegressionHead:
    weights = fixture.component("action_head")
    hidden_dim, width = weights["model.fc1.weight"].shape
    chunk, action_dim = fixture.inputs["train_actions"].shape[1:]
    head = L1RegressionHead(chunk, action_dim, width // action_dim, hidden_dim)
    head.load_state_dict(weights)
    return head


def slots_of(fixture: Fixture) -> int:
    chunk, action_dim = fixture.inputs["train_actions"].shape[1:]
    return chunk * action_dim


@torch.no_grad()
def test_discrete_actions(fixture: Fixture, one_image: PrismaticVLA) -> None:
    expected, action_dim = fixture.expected, fixture.inputs["train_actions"].shape[2]
    tokenizer = ActionTokenizer(FIRST + BINS, BINS, fixture.json("dataset_statistics.json")["toy_ds"]["action"])
    for i, ids in enumerate(prompts(fixture)):
        embeds, mask = one_image.embed_prompt(fixture.inputs["pixel_values_1img"][i : i + 1], ids, torch.ones_like(ids, dtype=torch.bool))
        states = slot_states(one_image, embeds, mask, slots_of(fixture), STOP)[0]
        logits, official = one_image.logits(states), expected[f"llm_input_embeds_{i}"]
        assert difference(embeds[0], official[: embeds.shape[1]]) <= 2e-6
        assert difference(states, expected[f"discrete1_action_hidden_{i}"]) <= 2e-5
        # three layers make 50 times as much of a rounding in the patches; in float64 the official logits are off by as much
        assert difference(logits[:, expected["logit_columns"]], expected[f"discrete1_logits_{i}"]) <= 1e-4
        tokens = logits.argmax(-1)
        assert tokens.tolist() == expected[f"discrete1_tokens_{i}"].tolist()
        chosen = torch.log_softmax(logits[:, FIRST : FIRST + BINS], -1).gather(1, (tokens - FIRST)[:, None])[:, 0]
        assert difference(chosen, expected[f"discrete1_logprob_action_vocab_{i}"]) <= 1e-4
        assert difference(tokenizer.decode(tokens.view(-1, action_dim)), expected[f"discrete1_actions_{i}"]) <= 1e-6


@torch.no_grad()
def test_the_language_model_from_the_official_embeddings(fixture: Fixture, one_image: PrismaticVLA) -> None:
    for i in range(len(prompts(fixture))):
        official = fixture.expected[f"llm_input_embeds_{i}"][None]
        before = official.shape[1] - slots_of(fixture) - 1
        embeds, mask = official[:, :before], torch.ones(1, before, dtype=torch.bool)
        states = slot_states(one_image, embeds, mask, slots_of(fixture), STOP)[0]
        assert difference(states, fixture.expected[f"discrete1_action_hidden_{i}"]) <= 2e-5


@torch.no_grad()
def test_regression_with_two_images_and_proprioception(fixture: Fixture, two_images: PrismaticVLA, head: L1RegressionHead) -> None:
    statistics = fixture.json("dataset_statistics.json")["toy_ds"]["action"]
    tokenizer = ActionTokenizer(FIRST + BINS, BINS, statistics)
    for i, ids in enumerate(prompts(fixture)):
        pixels, proprio = fixture.inputs["pixel_values_2img"][i : i + 1], fixture.inputs["proprio"][i : i + 1]
        embeds, mask = two_images.embed_prompt(pixels, ids, torch.ones_like(ids, dtype=torch.bool), proprio)
        states = slot_states(two_images, embeds, mask, slots_of(fixture), STOP)
        actions = head(states)[0]
        assert difference(states[0], fixture.expected[f"l1_action_hidden_{i}"]) <= 2e-5
        assert difference(actions, fixture.expected[f"l1_normalized_{i}"]) <= 2e-5
        assert difference(tokenizer.denormalise(actions), fixture.expected[f"l1_actions_{i}"]) <= 2e-5


@torch.no_grad()
def test_log_probabilities_as_rlinf(fixture: Fixture, one_image: PrismaticVLA, rl: Arrays) -> None:
    """Left-padded batch, no stop token."""
    inputs = Arrays(fixture.path / "rl_inputs.npz")
    embeds, mask = one_image.embed_prompt(fixture.inputs["pixel_values_1img"], inputs["input_ids"], inputs["attention_mask"])
    states = slot_states(one_image, embeds, mask, slots_of(fixture), None)
    logits = one_image.logits(states)[..., FIRST : FIRST + BINS]
    weights = {name: rl[f"value_head/mlp.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")}
    value = F.gelu(F.linear(states[:, 0], weights["0.weight"], weights["0.bias"]))
    value = F.linear(F.gelu(F.linear(value, weights["2.weight"], weights["2.bias"])), weights["4.weight"])
    for temperature in (1.0, 1.6):
        log_prob = torch.log_softmax(logits / temperature, -1)
        chosen = log_prob.gather(-1, (inputs["action_tokens"].flatten(1) - FIRST)[..., None])[..., 0]
        assert difference(chosen, rl[f"logprobs_T{temperature}"]) <= 1e-4
        assert difference(-(log_prob.exp() * log_prob).sum(-1), rl[f"entropy_T{temperature}"]) <= 1e-4
        assert difference(value, rl[f"values_T{temperature}"]) <= 1e-4
    tokens = logits.argmax(-1) + FIRST
    assert tokens.tolist() == rl["greedy_tokens"].flatten(1).tolist()
    assert difference(torch.log_softmax(logits, -1).amax(-1), rl["greedy_logprobs"]) <= 1e-4
    assert difference(value, rl["greedy_values"]) <= 1e-4


@torch.no_grad()
def test_film(film: Fixture, fixture: Fixture, head: L1RegressionHead) -> None:
    ids, modulated = closed(film.inputs["prompt_ids"]), network(film, film=True)
    embeds, mask = modulated.embed_prompt(film.inputs["pixel_values"], ids, torch.ones_like(ids, dtype=torch.bool), stop_id=STOP)
    states = slot_states(modulated, embeds, mask, slots_of(fixture), STOP)
    actions = head(states)[0]
    assert difference(states[0], film.expected["action_hidden"]) <= 2e-5
    assert difference(actions, film.expected["normalized"]) <= 2e-5


@pytest.mark.parametrize("kind", ["discrete", "l1"])
def test_training_and_gradients(fixture: Fixture, kind: str) -> None:
    """The official training pass over a padded batch, sample by sample; the stop token is learnt too."""
    inputs, expected, labels = fixture.inputs, fixture.expected, fixture.inputs["train_labels"]
    model = network(fixture, num_images=2, proprio_dim=inputs["proprio"].shape[1])
    head = l1_head(fixture)
    rows = []
    for i, ids in enumerate(inputs["train_ids"]):
        prompt = ids[: int((labels[i] != -100).nonzero()[0])][None]
        pixels, proprio = inputs["pixel_values_2img"][i : i + 1], inputs["proprio"][i : i + 1]
        embeds, mask = model.embed_prompt(pixels, prompt, torch.ones_like(prompt, dtype=torch.bool), proprio)
        parts = [embeds, embeds.new_zeros(1, slots_of(fixture), embeds.shape[2]), model.embed_tokens(torch.tensor([[STOP]]))]
        states = model.hidden_states(torch.cat(parts, dim=1), F.pad(mask, (0, slots_of(fixture) + 1), value=True))
        rows.append(states[:, embeds.shape[1] - 1 : -1])
    states = torch.cat(rows)
    if kind == "discrete":
        loss = F.cross_entropy(model.logits(states).flatten(0, 1), labels[labels != -100])
        assert abs(float(loss.detach()) - float(expected["train_discrete_loss"])) <= 2e-5
    else:
        actions = head(states[:, :-1])
        assert difference(states[:, :-1].detach(), expected["train_action_hidden"]) <= 5e-5
        assert difference(actions.detach(), expected["train_l1_normalized"]) <= 5e-5
        loss = (actions - inputs["train_actions"]).abs().mean()
        assert abs(float(loss.detach()) - float(expected["train_l1_loss_check"])) <= 2e-5
    loss.backward()
    named = dict(model.named_parameters()) | {f"action_head.{name}": p for name, p in head.named_parameters()}
    norms = fixture.json("grad_norms.json")
    assert not gradient_norms_differ(named, {name.removeprefix(f"{kind}/"): norm for name, norm in norms.items() if name.startswith(kind)})


def test_everything_was_compared(fixture: Fixture, film: Fixture, rl: Arrays) -> None:
    assert fixture.expected.keys() - fixture.expected.used == {"train_discrete_loss_check"}  # the same number
    assert film.expected.keys() - film.expected.used == {"logit_columns", "actions"}
    assert rl.keys() - rl.used == {"greedy_actions"}

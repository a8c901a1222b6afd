"""OpenVLA-OFT's network, heads and log-probabilities against the official code and RLinf's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.models.openvla.actions import ActionTokenizer
from rlinf_vla.models.openvla.oft import L1RegressionHead, slot_states
from rlinf_vla.models.openvla.prismatic import PrismaticVLA

from .fixtures import Arrays, Fixture, closed, difference, prompts
from .precision import EPS, Precision, agree, gradients_agree

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
        weights |= {
            f"proprio_projector.{name}": value
            for name, value in fixture.component("proprio_projector").items()
        }
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


Prompt = tuple[Tensor, Tensor]
"""Embeddings and their mask."""


def embedded(
    at: Precision, network: PrismaticVLA, pixels: Tensor, ids: Tensor, proprio: Tensor | None = None
) -> Prompt:
    proprio = None if proprio is None else at(proprio)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return at(network).embed_prompt(
        at(network).encode_images(at(pixels), ids, mask), ids, mask, proprio
    )


@torch.no_grad()
def test_embeddings(fixture: Fixture, one_image: PrismaticVLA) -> None:
    """The official ones continue with empty slots and the stop token."""
    for i, ids in enumerate(prompts(fixture)):
        name = f"llm_input_embeds_{i}"
        length = one_image.prefix_length + ids.shape[1]

        def compute(
            at: Precision, i: int = i, ids: Tensor = ids, name: str = name
        ) -> dict[str, Tensor]:
            return {
                name: embedded(at, one_image, fixture.inputs["pixel_values_1img"][i : i + 1], ids)[
                    0
                ][0]
            }

        agree(compute, {name: fixture.expected[name][:length]})


@torch.no_grad()
def test_discrete_actions(fixture: Fixture, one_image: PrismaticVLA) -> None:
    expected = fixture.expected
    action_dim = fixture.inputs["train_actions"].shape[2]
    tokenizer = ActionTokenizer(
        FIRST + BINS, BINS, fixture.json("dataset_statistics.json")["toy_ds"]["action"]
    )
    for i, ids in enumerate(prompts(fixture)):
        tokens = expected[f"discrete1_tokens_{i}"]

        def compute(
            at: Precision, i: int = i, ids: Tensor = ids, tokens: Tensor = tokens
        ) -> dict[str, Tensor]:
            embeds, mask = embedded(
                at, one_image, fixture.inputs["pixel_values_1img"][i : i + 1], ids
            )
            states = slot_states(at(one_image), embeds, mask, slots_of(fixture), STOP)[0]
            logits = at(one_image).language_model.lm_head(states)
            assert logits.argmax(-1).tolist() == tokens.tolist()
            chosen = torch.log_softmax(logits[:, FIRST : FIRST + BINS], -1).gather(
                1, (tokens - FIRST)[:, None]
            )[:, 0]
            return {
                f"discrete1_action_hidden_{i}": states,
                f"discrete1_logits_{i}": logits[:, expected["logit_columns"]],
                f"discrete1_logprob_action_vocab_{i}": chosen,
            }

        agree(compute, expected)
        assert (
            difference(
                tokenizer.decode(tokens.view(-1, action_dim)), expected[f"discrete1_actions_{i}"]
            )
            <= 4 * EPS
        )


@torch.no_grad()
def test_the_language_model_from_the_official_embeddings(
    fixture: Fixture, one_image: PrismaticVLA
) -> None:
    for i in range(len(prompts(fixture))):

        def compute(at: Precision, i: int = i) -> dict[str, Tensor]:
            official = at(fixture.expected[f"llm_input_embeds_{i}"][None])
            before = official.shape[1] - slots_of(fixture) - 1
            embeds = official[:, :before]
            mask = torch.ones(1, before, dtype=torch.bool)
            return {
                f"discrete1_action_hidden_{i}": slot_states(
                    at(one_image), embeds, mask, slots_of(fixture), STOP
                )[0]
            }

        agree(compute, fixture.expected)


@torch.no_grad()
def test_regression_with_two_images_and_proprioception(
    fixture: Fixture, two_images: PrismaticVLA, head: L1RegressionHead
) -> None:
    statistics = fixture.json("dataset_statistics.json")["toy_ds"]["action"]
    tokenizer = ActionTokenizer(FIRST + BINS, BINS, statistics)
    for i, ids in enumerate(prompts(fixture)):

        def compute(at: Precision, i: int = i, ids: Tensor = ids) -> dict[str, Tensor]:
            pixels = fixture.inputs["pixel_values_2img"][i : i + 1]
            proprio = fixture.inputs["proprio"][i : i + 1]
            embeds, mask = embedded(at, two_images, pixels, ids, proprio)
            states = slot_states(at(two_images), embeds, mask, slots_of(fixture), STOP)
            actions = at(head)(states)[0]
            return {
                f"l1_action_hidden_{i}": states[0],
                f"l1_normalized_{i}": actions,
                f"l1_actions_{i}": at(tokenizer).denormalise(actions),
            }

        agree(compute, fixture.expected)


@torch.no_grad()
def test_log_probabilities_as_rlinf(fixture: Fixture, one_image: PrismaticVLA, rl: Arrays) -> None:
    """Left-padded batch, no stop token."""
    inputs = Arrays(fixture.path / "rl_inputs.npz")
    weights = {
        name: rl[f"value_head/mlp.{name}"]
        for name in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")
    }

    def compute(at: Precision) -> dict[str, Tensor]:
        pixels = at(fixture.inputs["pixel_values_1img"])
        prompt = inputs["input_ids"], inputs["attention_mask"]
        embeds, mask = at(one_image).embed_prompt(
            at(one_image).encode_images(pixels, *prompt), *prompt
        )
        states = slot_states(at(one_image), embeds, mask, slots_of(fixture), None)
        logits = at(one_image).language_model.lm_head(states)[..., FIRST : FIRST + BINS]
        value = F.gelu(F.linear(states[:, 0], at(weights["0.weight"]), at(weights["0.bias"])))
        value = F.linear(
            F.gelu(F.linear(value, at(weights["2.weight"]), at(weights["2.bias"]))),
            at(weights["4.weight"]),
        )
        assert (logits.argmax(-1) + FIRST).tolist() == rl["greedy_tokens"].flatten(1).tolist()
        found = {"greedy_logprobs": torch.log_softmax(logits, -1).amax(-1), "greedy_values": value}
        for temperature in (1.0, 1.6):
            log_prob = torch.log_softmax(logits / temperature, -1)
            chosen = log_prob.gather(-1, (inputs["action_tokens"].flatten(1) - FIRST)[..., None])[
                ..., 0
            ]
            found[f"logprobs_T{temperature}"] = chosen
            found[f"entropy_T{temperature}"] = -(log_prob.exp() * log_prob).sum(-1)
            found[f"values_T{temperature}"] = value
        return found

    agree(compute, rl)


@torch.no_grad()
def test_film(film: Fixture, fixture: Fixture, head: L1RegressionHead) -> None:
    ids = closed(film.inputs["prompt_ids"])
    modulated = network(film, film=True)

    def compute(at: Precision) -> dict[str, Tensor]:
        mask = torch.ones_like(ids, dtype=torch.bool)
        patches = at(modulated).encode_images(at(film.inputs["pixel_values"]), ids, mask, STOP)
        embeds, mask = at(modulated).embed_prompt(patches, ids, mask)
        states = slot_states(at(modulated), embeds, mask, slots_of(fixture), STOP)
        return {"action_hidden": states[0], "normalized": at(head)(states)[0]}

    agree(compute, film.expected)


def training_states(at: Precision, fixture: Fixture, model: PrismaticVLA) -> Tensor:
    """The official training pass over a padded batch, sample by sample: states ``[B, slots + 1, d]`` that predict slots and stop token."""
    inputs = fixture.inputs
    labels = fixture.inputs["train_labels"]
    rows = []
    for i, ids in enumerate(inputs["train_ids"]):
        prompt = ids[: int((labels[i] != -100).nonzero()[0])][None]
        embeds, mask = embedded(
            at, model, inputs["pixel_values_2img"][i : i + 1], prompt, inputs["proprio"][i : i + 1]
        )
        parts = [
            embeds,
            embeds.new_zeros(1, slots_of(fixture), embeds.shape[2]),
            at(model).embed_tokens(torch.tensor([[STOP]])),
        ]
        states = at(model).hidden_states(
            torch.cat(parts, dim=1), F.pad(mask, (0, slots_of(fixture) + 1), value=True)
        )
        rows.append(states[:, embeds.shape[1] - 1 : -1])
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["discrete", "l1"])
def test_training_and_gradients(
    fixture: Fixture, two_images: PrismaticVLA, head: L1RegressionHead, kind: str
) -> None:
    """The stop token is learnt too."""
    inputs = fixture.inputs
    expected = fixture.expected
    labels = fixture.inputs["train_labels"]

    def forward(at: Precision) -> dict[str, Tensor]:
        states = training_states(at, fixture, two_images)
        if kind == "discrete":
            return {
                "train_discrete_loss": F.cross_entropy(
                    at(two_images).language_model.lm_head(states).flatten(0, 1),
                    labels[labels != -100],
                )
            }
        actions = at(head)(states[:, :-1])
        loss = (actions - at(inputs["train_actions"])).abs().mean()
        return {
            "train_action_hidden": states[:, :-1],
            "train_l1_normalized": actions,
            "train_l1_loss_check": loss,
        }

    norms = {
        name.removeprefix(f"{kind}/"): norm
        for name, norm in fixture.json("grad_norms.json").items()
        if name.startswith(kind)
    }

    def gradients(at: Precision) -> dict[str, Tensor]:
        loss = list(forward(at).values())[-1]
        named = dict(at(two_images).named_parameters()) | {
            f"action_head.{name}": p for name, p in at(head).named_parameters()
        }
        return dict(
            zip(
                norms,
                torch.autograd.grad(loss, [named[name] for name in norms], materialize_grads=True),
                strict=True,
            )
        )

    agree(forward, expected)
    gradients_agree(gradients, norms)


def test_everything_was_compared(fixture: Fixture, film: Fixture, rl: Arrays) -> None:
    assert fixture.expected.keys() - fixture.expected.used == {
        "train_discrete_loss_check"
    }  # the same number
    assert film.expected.keys() - film.expected.used == {"logit_columns", "actions"}
    assert rl.keys() - rl.used == {"greedy_actions"}

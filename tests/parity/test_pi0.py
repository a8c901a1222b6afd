"""π₀ and π₀.₅ against openpi, and the probabilities of their stochastic samplers against RLinf's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlinf_vla.models.pi0 import flow
from rlinf_vla.models.pi0.gemma import GemmaConfig
from rlinf_vla.models.pi0.heads import NoiseHead
from rlinf_vla.models.pi0.network import Pi0Config, Pi0Network, Prefix, time_embedding

from .fixtures import Arrays, Fixture, difference, gradient_norms_differ

TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module", params=["pi0_tiny", "pi05_tiny"])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return Fixture(request.param)


@pytest.fixture(scope="module")
def network(fixture: Fixture) -> Pi0Network:
    config = fixture.config
    gemma, expert = (
        GemmaConfig(**{key: value for key, value in config[name].items() if key != "vocab_size"}) for name in ("paligemma", "action_expert")
    )
    sizes = Pi0Config(
        gemma,
        expert,
        config["vision"],
        config["paligemma"]["vocab_size"],
        action_dim=config["action_dim"],
        horizon=config["action_horizon"],
        pi05=config["pi05"],
    )
    network = Pi0Network(sizes)
    network.load_state_dict(fixture.weights)
    return network


def prefix_inputs(fixture: Fixture) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, names = fixture.inputs, fixture.config["image_keys"]
    images = torch.stack([inputs[f"image_{name}"] for name in names], dim=1)
    masks = torch.stack([inputs[f"image_mask_{name}"] for name in names], dim=1)
    return images, masks, inputs["tokenized_prompt"], inputs["tokenized_prompt_mask"]


@pytest.fixture(scope="module")
def prefix(fixture: Fixture, network: Pi0Network) -> Prefix:
    with torch.no_grad():
        return network.prefix(*prefix_inputs(fixture))


@torch.no_grad()
def test_prefix(fixture: Fixture, network: Pi0Network, prefix: Prefix) -> None:
    expected = fixture.expected
    embeds, mask = network.embed_prefix(*prefix_inputs(fixture))
    assert mask.tolist() == expected["prefix_pad_masks"].tolist()
    assert not expected["prefix_att_masks"].any()  # one block
    assert difference(embeds, expected["prefix_embs"]) <= 2e-5
    patches = expected["image_features_base"]
    assert difference(embeds[:, : patches.shape[1]], patches) <= 2e-5
    assert difference(prefix.states[mask], expected["prefix_out"][mask]) <= 2e-5
    keys, values = prefix.keys_and_values[0][0], prefix.keys_and_values[2][1]
    assert difference(keys.transpose(1, 2)[mask], expected["kv_k_layer0"].transpose(1, 2)[mask]) <= 2e-5
    assert difference(values.transpose(1, 2)[mask], expected["kv_v_layer2"].transpose(1, 2)[mask]) <= 2e-5


@torch.no_grad()
def test_suffix(fixture: Fixture, network: Pi0Network, prefix: Prefix) -> None:
    inputs, expected = fixture.inputs, fixture.expected
    embeds, condition = network.embed_suffix(inputs["state"], inputs["noise"], inputs["time"])
    assert difference(embeds, expected["suffix_embs"]) <= 2e-5
    assert difference(time_embedding(inputs["time"], embeds.shape[-1]), expected["time_emb"]) <= 1e-6
    assert (network.suffix_starts(embeds.shape[1]) == expected["suffix_att_masks"].bool()).all()
    assert (condition is None) == ("adarms_cond" not in expected)
    if condition is not None:
        assert difference(condition, expected["adarms_cond"]) <= 2e-5
    velocity, _ = network.velocity(prefix, inputs["state"], inputs["noise"], inputs["time"])
    assert difference(velocity, expected["velocity_at_noise_time"]) <= 2e-5


@torch.no_grad()
def test_masked_cameras_may_be_left_out(fixture: Fixture, network: Pi0Network) -> None:
    images, masks, ids, token_mask = prefix_inputs(fixture)
    for row in range(len(images)):
        one, seen = slice(row, row + 1), masks[row]
        state, noise, time = (fixture.inputs[name][one] for name in ("state", "noise", "time"))
        short = network.prefix(images[one][:, seen], masks[one][:, seen], ids[one], token_mask[one])
        velocity, _ = network.velocity(short, state, noise, time)
        assert difference(velocity[0], fixture.expected["velocity_at_noise_time"][row]) <= 2e-5


@torch.no_grad()
@pytest.mark.parametrize("steps", [4, 10])
def test_sampling(fixture: Fixture, network: Pi0Network, prefix: Prefix, steps: int) -> None:
    x = fixture.inputs["noise"]
    for time in flow.times(steps):
        x = flow.ode_step(x, network.velocity(prefix, fixture.inputs["state"], x, time.expand(len(x)))[0], steps)
    assert difference(x, fixture.expected[f"sample_actions_{steps}"]) <= 1e-4


def test_loss_and_gradients(fixture: Fixture, network: Pi0Network) -> None:
    inputs, expected = fixture.inputs, fixture.expected
    network.zero_grad(set_to_none=True)
    x, target = flow.interpolate(inputs["actions"], inputs["noise"], inputs["time"])
    velocity, _ = network.velocity(network.prefix(*prefix_inputs(fixture)), inputs["state"], x, inputs["time"])
    loss = (velocity - target) ** 2
    assert difference(velocity.detach(), expected["velocity_train_xt"]) <= 2e-5
    assert difference(loss.detach(), expected["loss_elementwise"]) <= 2e-5
    loss.mean().backward()
    parameters: dict[str, Tensor] = dict(network.named_parameters())
    parameters[TIED] = parameters["paligemma_with_expert.paligemma.lm_head.weight"]
    assert not gradient_norms_differ(parameters, fixture.json("grad_norms.json"))


@torch.no_grad()
def test_transitions_as_rlinf(fixture: Fixture, network: Pi0Network, prefix: Prefix) -> None:
    inputs, expected = Arrays(fixture.path / "rl_inputs.npz"), Arrays(fixture.path / "rl_expected.npz")
    steps, x = int(inputs["num_steps"]), inputs["x_t"]
    for i, index in enumerate(inputs["denoise_idx"]):
        time = flow.times(steps)[index]
        velocity, _ = network.velocity(prefix, fixture.inputs["state"], x, time)
        assert difference(velocity, expected[f"velocity_{i}"]) <= 2e-5
        assert difference(flow.ode_step(x, velocity, steps), expected[f"flow_ode_mean_{i}"]) <= 2e-5
        # from their velocity: the last step divides a rounding in it by a standard deviation of 0.1
        mean, std = flow.sde_step(x, expected[f"velocity_{i}"], time, steps, 0.5)
        assert difference(mean, expected[f"flow_sde_mean_{i}"]) <= 2e-5
        assert difference(std.expand_as(mean), expected[f"flow_sde_std_{i}"]) <= 1e-6
        assert difference(flow.gaussian_log_prob(inputs["x_next"], mean, std), expected[f"flow_sde_logprob_{i}"]) <= 1e-4


@torch.no_grad()
def test_learnt_noise_as_rlinf(fixture: Fixture, network: Pi0Network, prefix: Prefix) -> None:
    inputs, expected = Arrays(fixture.path / "rl_inputs.npz"), Arrays(fixture.path / "rl_expected.npz")
    low, high = ((0.5 * expected[f"noise_head/logvar_{bound}"]).exp().item() for bound in ("min", "max"))
    head = NoiseHead(network.config.expert.width, network.config.action_dim, low, high)
    theirs = {f"{2 * i}.{kind}": f"{i}.linear_1.{kind}" for i in range(3) for kind in ("weight", "bias")}
    head.mlp.load_state_dict({ours: expected[f"noise_head/mlp_logvar.moduleList.{name}"] for ours, name in theirs.items()})
    steps, x = int(inputs["num_steps"]), inputs["x_t"]
    for i, index in enumerate(inputs["denoise_idx"]):
        velocity, states = network.velocity(prefix, fixture.inputs["state"], x, flow.times(steps)[index])
        mean, std = flow.ode_step(x, velocity, steps), head(states)
        assert difference(mean, expected[f"flow_noise_mean_{i}"]) <= 2e-5
        assert difference(std, expected[f"flow_noise_std_{i}"]) <= 1e-6
        official = expected[f"flow_noise_logprob_{i}"]
        found = flow.gaussian_log_prob(inputs["x_next"], expected[f"flow_noise_mean_{i}"], std)
        assert difference(found, official) <= 2e-6 * float(official.abs().max())
    chain = inputs["chains"]
    log_probs, entropies = [flow.standard_log_prob(chain[:, 0])], [flow.gaussian_entropy(torch.ones_like(chain[:, 0]))]
    for i, time in enumerate(flow.times(steps)):
        velocity, states = network.velocity(prefix, fixture.inputs["state"], chain[:, i], time.expand(len(chain)))
        std = head(states)
        log_probs.append(flow.gaussian_log_prob(chain[:, i + 1], flow.ode_step(chain[:, i], velocity, steps), std))
        entropies.append(flow.gaussian_entropy(std))
    official = expected["flow_noise_chain_logprob"]
    assert difference(torch.stack(log_probs, 1), official) <= 2e-6 * float(official.abs().max())
    assert difference(torch.stack(entropies, 1), expected["flow_noise_chain_entropy"]) <= 1e-5


@torch.no_grad()
def test_chains_of_flow_sde_as_rlinf(fixture: Fixture, network: Pi0Network, prefix: Prefix) -> None:
    inputs, expected = Arrays(fixture.path / "rl_inputs.npz"), Arrays(fixture.path / "rl_expected.npz")
    chain, steps = inputs["chains"], int(inputs["num_steps"])
    index = inputs["flow_sde_denoise_inds"][:, 0]
    rows, time = torch.arange(len(chain)), flow.times(steps)[index]
    before, after = chain[rows, index], chain[rows, index + 1]
    velocity, _ = network.velocity(prefix, fixture.inputs["state"], before, time)
    mean, std = flow.sde_step(before, velocity, time, steps, 0.5)
    # in the thousands where a chain is unlikely
    official = expected["flow_sde_chain_logprob"][:, 0]
    assert difference(flow.gaussian_log_prob(after, mean, std), official) <= 1e-6 * float(official.abs().max())
    assert not expected["flow_sde_chain_entropy"].any()  # RLinf reports none


def test_everything_was_compared(fixture: Fixture) -> None:
    assert fixture.expected.keys() == fixture.expected.used

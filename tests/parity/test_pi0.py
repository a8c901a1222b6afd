"""π₀ and π₀.₅ against openpi, and the probabilities of their stochastic samplers against RLinf's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlinf_vla.models import flow
from rlinf_vla.models.flow_network import NoiseHead, Prefix, time_embedding
from rlinf_vla.models.pi0.gemma import GemmaConfig
from rlinf_vla.models.pi0.network import Pi0Config, Pi0Network

from .fixtures import Arrays, Fixture
from .precision import Precision, agree, gradients_agree

TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module", params=["pi0_tiny", "pi05_tiny"])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return Fixture(request.param)


@pytest.fixture(scope="module")
def network(fixture: Fixture) -> Pi0Network:
    config = fixture.config
    gemma, expert = (
        GemmaConfig(**{key: value for key, value in config[name].items() if key != "vocab_size"})
        for name in ("paligemma", "action_expert")
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


def prefix_inputs(at: Precision, fixture: Fixture) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = fixture.inputs
    names = fixture.config["image_keys"]
    images = torch.stack([inputs[f"image_{name}"] for name in names], dim=1)
    masks = torch.stack([inputs[f"image_mask_{name}"] for name in names], dim=1)
    return at(images), masks, inputs["tokenized_prompt"], inputs["tokenized_prompt_mask"]


def prefix_of(at: Precision, fixture: Fixture, network: Pi0Network) -> Prefix:
    return at(network).prefix(*prefix_inputs(at, fixture))


@torch.no_grad()
def test_prefix(fixture: Fixture, network: Pi0Network) -> None:
    expected = fixture.expected
    mask = expected["prefix_pad_masks"].bool()
    assert not expected["prefix_att_masks"].any()  # one block

    def compute(at: Precision) -> dict[str, Tensor]:
        embeds, counts = at(network).embed_prefix(*prefix_inputs(at, fixture))
        assert counts.tolist() == mask.tolist()
        prefix = prefix_of(at, fixture, network)
        keys, values = prefix.keys_and_values[0][0], prefix.keys_and_values[2][1]
        return {
            "prefix_embs": embeds,
            "image_features_base": embeds[:, : expected["image_features_base"].shape[1]],
            "prefix_out": prefix.states[mask],
            "kv_k_layer0": keys.transpose(1, 2)[mask],
            "kv_v_layer2": values.transpose(1, 2)[mask],
        }

    counted = {"prefix_out": expected["prefix_out"][mask]}
    counted |= {
        name: expected[name].transpose(1, 2)[mask] for name in ("kv_k_layer0", "kv_v_layer2")
    }
    agree(
        compute, {name: expected[name] for name in ("prefix_embs", "image_features_base")} | counted
    )


@torch.no_grad()
def test_suffix(fixture: Fixture, network: Pi0Network) -> None:
    inputs, expected = fixture.inputs, fixture.expected

    def compute(at: Precision) -> dict[str, Tensor]:
        state, x, time = (at(inputs[name]) for name in ("state", "noise", "time"))
        embeds, condition = at(network).embed_suffix(state, x, time)
        assert (network.suffix_starts(embeds.shape[1]) == expected["suffix_att_masks"].bool()).all()
        assert (condition is None) == ("adarms_cond" not in expected)
        found = {
            "suffix_embs": embeds,
            "time_emb": time_embedding(time, embeds.shape[-1]),
            "velocity_at_noise_time": at(network).velocity(
                prefix_of(at, fixture, network), state, x, time
            )[0],
        }
        return found if condition is None else found | {"adarms_cond": condition}

    agree(compute, expected)


@torch.no_grad()
def test_masked_cameras_may_be_left_out(fixture: Fixture, network: Pi0Network) -> None:
    def compute(at: Precision) -> dict[str, Tensor]:
        images, masks, ids, token_mask = prefix_inputs(at, fixture)
        rows = []
        for row, seen in enumerate(masks):
            one = slice(row, row + 1)
            state, noise, time = (
                at(fixture.inputs[name][one]) for name in ("state", "noise", "time")
            )
            short = at(network).prefix(
                images[one][:, seen], masks[one][:, seen], ids[one], token_mask[one]
            )
            rows.append(at(network).velocity(short, state, noise, time)[0])
        return {"velocity_at_noise_time": torch.cat(rows)}

    agree(compute, fixture.expected)


@torch.no_grad()
@pytest.mark.parametrize("steps", [4, 10])
def test_sampling(fixture: Fixture, network: Pi0Network, steps: int) -> None:
    def compute(at: Precision) -> dict[str, Tensor]:
        prefix = prefix_of(at, fixture, network)
        state = at(fixture.inputs["state"])
        x = at(fixture.inputs["noise"])
        for time in flow.times(steps):
            x = flow.ode_step(
                x, at(network).velocity(prefix, state, x, time.expand(len(x)))[0], steps
            )
        return {f"sample_actions_{steps}": x}

    agree(compute, fixture.expected)


def test_loss_and_gradients(fixture: Fixture, network: Pi0Network) -> None:
    inputs = fixture.inputs
    norms = fixture.json("grad_norms.json")

    def forward(at: Precision) -> dict[str, Tensor]:
        actions, noise, time, state = (
            at(inputs[name]) for name in ("actions", "noise", "time", "state")
        )
        x, target = flow.interpolate(actions, noise, time)
        velocity, _ = at(network).velocity(prefix_of(at, fixture, network), state, x, time)
        return {"velocity_train_xt": velocity, "loss_elementwise": (velocity - target) ** 2}

    def gradients(at: Precision) -> dict[str, Tensor]:
        named = dict(at(network).named_parameters())
        named[TIED] = named["paligemma_with_expert.paligemma.lm_head.weight"]
        loss = forward(at)["loss_elementwise"].mean()
        return dict(
            zip(
                norms,
                torch.autograd.grad(loss, [named[name] for name in norms], materialize_grads=True),
                strict=True,
            )
        )

    agree(forward, fixture.expected)
    gradients_agree(gradients, norms)


def rlinf_times(steps: int) -> Tensor:
    """openpi, and so ``flow.times``, subtracts the step repeatedly. One float32 spacing of the time changes the fastest
    part of its embedding, of period 4e-3, by 1e-4: that is no rounding of the network's."""
    return torch.linspace(1, 1 / steps, steps)


@torch.no_grad()
def test_transitions_as_rlinf(fixture: Fixture, network: Pi0Network) -> None:
    inputs = Arrays(fixture.path / "rl_inputs.npz")
    expected = Arrays(fixture.path / "rl_expected.npz")
    steps = int(inputs["num_steps"])
    times = rlinf_times(steps)

    def compute(at: Precision) -> dict[str, Tensor]:
        prefix = prefix_of(at, fixture, network)
        state = at(fixture.inputs["state"])
        x = at(inputs["x_t"])
        found = {}
        for i, index in enumerate(inputs["denoise_idx"]):
            time = at(times[index])
            velocity, _ = at(network).velocity(prefix, state, x, time)
            mean, std = flow.sde_step(x, velocity, time, steps, 0.5)
            found |= {
                f"velocity_{i}": velocity,
                f"flow_ode_mean_{i}": flow.ode_step(x, velocity, steps),
            }
            found |= {f"flow_sde_mean_{i}": mean, f"flow_sde_std_{i}": std.expand_as(mean)}
            found[f"flow_sde_logprob_{i}"] = flow.gaussian_log_prob(at(inputs["x_next"]), mean, std)
        return found

    agree(compute, expected)


@torch.no_grad()
def test_learnt_noise_as_rlinf(fixture: Fixture, network: Pi0Network) -> None:
    inputs = Arrays(fixture.path / "rl_inputs.npz")
    expected = Arrays(fixture.path / "rl_expected.npz")
    low, high = (
        (0.5 * expected[f"noise_head/logvar_{bound}"]).exp().item() for bound in ("min", "max")
    )
    head = NoiseHead(network.config.expert.width, network.config.action_dim, low, high)
    theirs = {
        f"{2 * i}.{kind}": f"{i}.linear_1.{kind}" for i in range(3) for kind in ("weight", "bias")
    }
    head.mlp.load_state_dict(
        {
            ours: expected[f"noise_head/mlp_logvar.moduleList.{name}"]
            for ours, name in theirs.items()
        }
    )
    steps = int(inputs["num_steps"])
    times = rlinf_times(steps)

    def compute(at: Precision) -> dict[str, Tensor]:
        prefix = prefix_of(at, fixture, network)
        state = at(fixture.inputs["state"])
        x = at(inputs["x_t"])
        found = {}
        for i, index in enumerate(inputs["denoise_idx"]):
            velocity, states = at(network).velocity(prefix, state, x, at(times[index]))
            mean = flow.ode_step(x, velocity, steps)
            std = at(head)(states)
            found |= {f"flow_noise_mean_{i}": mean, f"flow_noise_std_{i}": std}
            found[f"flow_noise_logprob_{i}"] = flow.gaussian_log_prob(
                at(inputs["x_next"]), mean, std
            )
        chain = at(inputs["chains"])
        log_probs = [flow.standard_log_prob(chain[:, 0])]
        entropies = [flow.gaussian_entropy(torch.ones_like(chain[:, 0]))]
        for i, time in enumerate(at(times)):
            velocity, states = at(network).velocity(
                prefix, state, chain[:, i], time.expand(len(chain))
            )
            std = at(head)(states)
            log_probs.append(
                flow.gaussian_log_prob(
                    chain[:, i + 1], flow.ode_step(chain[:, i], velocity, steps), std
                )
            )
            entropies.append(flow.gaussian_entropy(std))
        return found | {
            "flow_noise_chain_logprob": torch.stack(log_probs, 1),
            "flow_noise_chain_entropy": torch.stack(entropies, 1),
        }

    agree(compute, expected)


@torch.no_grad()
def test_chains_of_flow_sde_as_rlinf(fixture: Fixture, network: Pi0Network) -> None:
    inputs = Arrays(fixture.path / "rl_inputs.npz")
    expected = Arrays(fixture.path / "rl_expected.npz")
    chain = inputs["chains"]
    steps = int(inputs["num_steps"])
    index = inputs["flow_sde_denoise_inds"][:, 0]
    rows = torch.arange(len(chain))
    time = rlinf_times(steps)[index]

    def compute(at: Precision) -> dict[str, Tensor]:
        before = at(chain[rows, index])
        after = at(chain[rows, index + 1])
        velocity, _ = at(network).velocity(
            prefix_of(at, fixture, network), at(fixture.inputs["state"]), before, at(time)
        )
        mean, std = flow.sde_step(before, velocity, at(time), steps, 0.5)
        return {"flow_sde_chain_logprob": flow.gaussian_log_prob(after, mean, std)}

    agree(compute, {"flow_sde_chain_logprob": expected["flow_sde_chain_logprob"][:, 0]})
    assert not expected["flow_sde_chain_entropy"].any()  # RLinf reports none


def test_everything_was_compared(fixture: Fixture) -> None:
    assert fixture.expected.keys() == fixture.expected.used

"""Small mistakes exceed rounding on all instruction sets."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.models.openvla.prismatic import PrismaticVLA
from rlinf_vla.models.openvla.vit import Mlp

from .fixtures import Fixture
from .precision import Precision, agree, gradients_agree


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return Fixture("openvla_tiny")


@pytest.fixture
def network(fixture: Fixture) -> PrismaticVLA:
    network = PrismaticVLA(fixture.config)
    network.load_state_dict(fixture.weights)
    return network


@torch.no_grad()
def compare(fixture: Fixture, network: PrismaticVLA) -> None:
    ids = fixture.expected["generated_ids_0"][None]
    expected = fixture.expected

    def compute(at: Precision) -> dict[str, Tensor]:
        mask = torch.ones_like(ids, dtype=torch.bool)
        patches = at(network).encode_images(at(fixture.inputs["pixel_values"][:1]), ids, mask)
        states = at(network).hidden_states(*at(network).embed_prompt(patches, ids, mask))
        return {
            "tf_last_hidden_0": states[0],
            "tf_logits_0": at(network).language_model.lm_head(states)[0][
                :, expected["logit_columns"]
            ],
        }

    agree(compute, expected)


def test_the_right_network(fixture: Fixture, network: PrismaticVLA) -> None:
    compare(fixture, network)


class TanhMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def tanh(network: PrismaticVLA) -> None:
    for block in network.vision_backbone.fused_featurizer.blocks:
        block.mlp.__class__ = TanhMlp


def layer_norm_eps(network: PrismaticVLA) -> None:
    for block in network.vision_backbone.featurizer.blocks:
        block.norm1.eps = 1e-4


def rms_norm_eps(network: PrismaticVLA) -> None:
    network.language_model.model.norm.variance_epsilon *= 100


def rotary_base(network: PrismaticVLA) -> None:
    network.language_model.model.rotary_emb.inv_freq *= 1.001


def one_weight(network: PrismaticVLA) -> None:
    with torch.no_grad():
        network.language_model.model.layers[0].mlp.down_proj.weight[0, 0] += 0.01


class Bfloat16(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(torch.bfloat16).to(x.dtype))


def one_layer_in_bfloat16(network: PrismaticVLA) -> None:
    network.projector.fc3 = Bfloat16(network.projector.fc3)


@pytest.mark.parametrize(
    "mistake", [tanh, layer_norm_eps, rms_norm_eps, rotary_base, one_weight, one_layer_in_bfloat16]
)
def test_a_mistake(
    fixture: Fixture, network: PrismaticVLA, mistake: Callable[[PrismaticVLA], None]
) -> None:
    mistake(network)
    with pytest.raises(AssertionError, match="times this machine's rounding"):
        compare(fixture, network)


def test_less_than_float32_is_no_rounding(fixture: Fixture, network: PrismaticVLA) -> None:
    """If float32 is computed in bfloat16 but float64 is not, the measured rounding would hide it."""

    def compute(at: Precision) -> dict[str, Tensor]:
        x = at(fixture.expected["tf_last_hidden_0"])
        return {
            "tf_last_hidden_0": x.to(torch.bfloat16).to(x.dtype) if at.dtype == torch.float32 else x
        }

    with pytest.raises(AssertionError, match="more than rounding in float32"):
        agree(compute, fixture.expected)


def kinked(weight: Tensor, x: Tensor) -> Callable[[Precision], dict[str, Tensor]]:
    def gradients(at: Precision) -> dict[str, Tensor]:
        w = at(weight).clone().requires_grad_()
        return {"w": torch.autograd.grad(torch.relu(at(x) @ w).sum(), w)[0]}

    return gradients


def test_a_relu_within_rounding_of_zero_has_two_right_gradients() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64)
    x = torch.randn(20, 64)
    x[0] -= (
        weight * (x[0] @ weight) / weight.square().sum()
    )  # orthogonal to the weight up to rounding
    positive = x.double() @ weight.double() > 0
    norms = []
    for side in (False, True):
        positive[0] = side
        norms.append(float(x.double()[positive].sum(0).norm()))
    assert abs(norms[0] / norms[1] - 1) > 1e-2
    for norm in norms:
        gradients_agree(kinked(weight, x), {"w": norm})
    with pytest.raises(AssertionError, match="gradient of w"):
        gradients_agree(kinked(weight, x), {"w": norms[0] * (1 + 1e-4)})


def test_a_gradient_that_is_wrong(fixture: Fixture) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)
    wrong = copy.deepcopy(layer)
    with torch.no_grad():
        wrong.weight[0, 0] += 1e-3

    def gradients(at: Precision, layer: nn.Module = layer) -> dict[str, Tensor]:
        names, parameters = zip(*at(layer).named_parameters(), strict=True)
        return dict(
            zip(
                names, torch.autograd.grad(at(layer)(at(x)).square().sum(), parameters), strict=True
            )
        )

    norms = {
        name: float(value.norm()) for name, value in gradients(Precision(torch.float32)).items()
    }
    gradients_agree(gradients, norms)
    with pytest.raises(AssertionError, match="gradient of"):
        gradients_agree(lambda at: gradients(at, wrong), norms)

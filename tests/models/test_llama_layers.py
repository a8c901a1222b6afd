"""Llama layers: the rotation, and the last layer for the last tokens only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from rlinf_vla.models import fused_llama
from rlinf_vla.models.openvla.cache import StaticCache
from rlinf_vla.models.openvla.prismatic import PrismaticVLA
from rlinf_vla.models.rotation import rotate
from tests.models.tiny_openvla import smaller_config


def angles(width: int) -> tuple[Tensor, Tensor]:
    """cos and sin ``[2, 5, width]`` as transformers computes them."""
    config = LlamaConfig(hidden_size=2 * width, num_attention_heads=2, num_hidden_layers=1)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 2, 7]])
    return modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)


def test_the_rotation_and_its_gradient_have_the_bits_of_transformers() -> None:
    cos, sin = angles(8)
    q, k, weight = (
        torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    )
    q.requires_grad_()
    expected, expected_k = (
        x * cos[:, None] + modeling_llama.rotate_half(x) * sin[:, None] for x in (q, k)
    )
    found, found_k = fused_llama.rotary(q, k, cos, sin)
    assert torch.equal(found, expected) and torch.equal(found_k, expected_k)
    gradients = [torch.autograd.grad((each * weight).sum(), q)[0] for each in (found, expected)]
    assert torch.equal(*gradients)


def test_the_rotation_is_computed_in_the_dtype_of_its_angles() -> None:
    cos, sin = (each[:, None, :, :4] for each in angles(8))
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_last_rows_are_those_of_all_rows(rows: int, bidirectional: bool, kv_heads: int) -> None:
    config = smaller_config()
    config["text_config"] |= {"num_attention_heads": 2, "num_key_value_heads": kv_heads}
    network = PrismaticVLA(config, bidirectional=bidirectional)
    network.requires_grad_(True)
    x = torch.randn(2, 7, network.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 7, [True, False, True, True, False, True, True]])

    def run(count: int | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        cache = StaticCache(7)
        embeds = x.clone().requires_grad_()
        with torch.no_grad():
            network.hidden_states(embeds, mask, cache, rows=count)
        states = network.hidden_states(embeds, mask, rows=count)[:, -rows:]
        # padding among the last rows is undefined
        (gradient,) = torch.autograd.grad((states * mask[:, -rows:, None]).square().sum(), embeds)
        return states, gradient, cache.buffers

    states, gradient, kept = run(rows)
    every, whole, all_kept = run(None)
    assert states.shape == (2, rows, network.hidden_size)
    torch.testing.assert_close(states, every, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-5)
    assert len(kept) == len(all_kept) and all(map(torch.equal, kept, all_kept))

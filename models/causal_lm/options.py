"""Recipe options of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from rlinf_vla.config.ranges import Label, Range, Size

from ..options import LLAMA_LINEARS, WeightOptions


@dataclass
class CausalLMOptions(WeightOptions):
    """Recipe node ``model.options``."""

    lora_targets: ClassVar[tuple[str, ...]] = LLAMA_LINEARS
    chunk: Annotated[int, Range(1, 4096)] = 2
    """Tokens per policy call; an answer that ends earlier is padded."""
    prompt_length: Size = 32
    """Token ids per prompt, padding included."""
    alphabet: Label | None = None
    """The characters that it may write; null: all that its tokens have."""

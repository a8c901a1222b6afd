"""A causal language model of transformers: a policy call writes up to ``chunk`` tokens of text.

An action is a token, as UTF-8 bytes padded with zeros (``envs/dialogue``). After the end of an
answer nothing is written: these actions are zeros with log-probability 0. Its checkpoint is a
transformers directory with tokenizer.json. The attention mask is a matrix that this module makes:
models with several kinds of it (sliding windows, state spaces) are not supported.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise, Policy, PolicySpec
from rlinf_vla.core.types import DTYPES, ActionEval, ActionSample, Inputs, Observation

from .. import files
from .options import CausalLMOptions
from .vocabulary import Vocabulary

COMPANIONS = (
    files.TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@dataclass
class Prefix:
    """Features: logits of the first token ``[B, V]``, last state ``[B, d]``, which positions of
    the prompt count ``[B, P]``, and its keys and values."""

    logits: Tensor
    state: Tensor
    mask: Tensor
    cache: Cache


class Cache:
    """Keys and values of each layer: what transformers' attention asks of a cache, as tensors that
    never change, so that several answers may continue a copy."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.layers = list(layers)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.layers[layer][0].shape[2] if self.layers else 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, heads, N, head_dim]`` to those of the layer; return all of them."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
        else:
            before = self.layers[layer]
            self.layers[layer] = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        return self.layers[layer]


class CausalLMPolicy(Policy):
    """Features are a Prefix. ``backbone`` is the transformers model."""

    name: ClassVar[str] = "causal_lm"
    Config: ClassVar[type] = CausalLMOptions
    lora_targets: ClassVar[tuple[str, ...]] = CausalLMOptions.lora_targets
    split_unsupported: ClassVar[str | None] = (
        "passes every token through its whole language model: it has no separate action head"
    )
    backbone: Any  # transformers' annotations reject its own models
    forbidden: Tensor
    bytes: Tensor

    def __init__(self, directory: Path, options: Any, backbone: Any) -> None:
        super().__init__()
        # without dropout: it draws from noise only
        self.directory = directory
        self.options = options
        self.backbone = backbone.eval()
        config = backbone.config
        ends = (
            config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        )
        if (
            len(ends) != 1 or ends[0] is None
        ):  # a chat model ends its turn by another than its config names first
            raise UserError(
                f"{directory / files.CONFIG}: eos_token_id is {ends}: write there the one token that ends an answer"
            )
        self.vocabulary = Vocabulary(
            files.read_tokenizer(directory), config.vocab_size, ends[0], options.alphabet
        )
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)
        self.register_buffer("forbidden", self.vocabulary.forbidden, persistent=False)
        self.register_buffer("bytes", self.vocabulary.bytes, persistent=False)
        self.spec = PolicySpec(
            options.chunk,
            self.vocabulary.width,
            0,
            images={},
            env={"token_bytes": self.vocabulary.width},
        )

    @classmethod
    def load(cls, checkpoint: Path, config: Any) -> Self:
        return cls(checkpoint, config, cls._backbone(checkpoint, config))

    @staticmethod
    def _backbone(checkpoint: Path, config: Any) -> Any:
        dtype = DTYPES[config.dtype or "float32"]
        try:
            if config.random_weights:
                return AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(checkpoint, local_files_only=True), dtype=dtype
                )
            return AutoModelForCausalLM.from_pretrained(
                checkpoint, local_files_only=True, use_safetensors=True, dtype=dtype
            )
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{checkpoint} is no causal language model of transformers ({reason}): choose another model.checkpoint"
            ) from None

    @classmethod
    def without_weights(cls, checkpoint: Path, config: Any) -> Self:
        with torch.device("meta"):
            backbone = cls._backbone(checkpoint, replace(config, random_weights=True))
        return cls(checkpoint, config, backbone)

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        weights = {
            name: value.to(dtype or value.dtype)
            for name, value in self.backbone.state_dict().items()
        }
        self.backbone.save_pretrained(checkpoint, state_dict=weights)
        for path in (
            self.directory / name for name in COMPANIONS if (self.directory / name).exists()
        ):
            shutil.copyfile(path, checkpoint / path.name)

    def prepare(self, obs: Observation) -> Inputs:
        return {
            "token_ids": self.vocabulary.prompts(obs.instruction, self.options.prompt_length).to(
                obs.state.device
            )
        }

    def _run(
        self, ids: Tensor, mask: Tensor, keep: int, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the tokens ``ids`` ``[B, N]``, the last of the positions ``mask`` ``[B, K]``.

        Returns logits ``[B, keep, V]`` in float32 and states ``[B, keep, d]`` of the last ones.
        """
        count, length = ids.shape[1], mask.shape[1]
        causal = torch.ones(count, length, dtype=torch.bool, device=ids.device).tril(length - count)
        dtype = self.backbone.dtype
        bias = torch.zeros((), dtype=dtype, device=ids.device).masked_fill(
            ~(causal & mask[:, None]), torch.finfo(dtype).min
        )
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
        out = self.backbone(
            input_ids=ids.long().clamp(min=0),
            attention_mask=bias[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=True,
            logits_to_keep=keep,
        )
        logits = out.logits.float().masked_fill(self.forbidden, float("-inf"))
        return logits, out.hidden_states[-1][:, -keep:]

    def encode(self, inputs: Inputs) -> Prefix:
        ids = inputs["token_ids"]
        cache = Cache()
        mask = ids >= 0
        logits, states = self._run(ids, mask, 1, cache)
        return Prefix(logits[:, 0], states[:, 0], mask, cache)

    def pooled(self, features: Prefix) -> Tensor:
        return features.state.float()

    def act(self, features: Prefix, noise: Noise | None, temperature: float) -> ActionSample:
        """Sample by the inverse of the cumulative distribution: one random number per token."""
        chunk = self.spec.chunk
        logits = features.logits
        mask = features.mask
        cache = Cache(features.cache.layers)
        drawn = noise.uniform(chunk) if noise is not None and temperature > 0 else None
        tokens, log_probs = [], []
        for i in range(chunk):
            log_prob = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            if drawn is None:
                token = log_prob.argmax(-1)
            else:
                cumulative = log_prob.double().exp().cumsum(-1)
                token = (
                    (cumulative <= drawn[:, i, None] * cumulative[:, -1:])
                    .sum(-1)
                    .clamp(max=log_prob.shape[1] - 1)
                )
            tokens.append(token)
            log_probs.append(log_prob.gather(-1, token[:, None])[:, 0])
            if i + 1 < chunk:
                mask = F.pad(mask, (0, 1), value=True)
                logits = self._run(token[:, None], mask, 1, cache)[0][:, 0]
        chosen = torch.stack(tokens, 1)
        written = self._written(chosen)
        chosen = chosen.where(written, self.vocabulary.end_id)
        actions = self.bytes[chosen].float() * written[..., None]
        return ActionSample(
            actions,
            {"tokens": chosen},
            self._per_byte(torch.stack(log_probs, 1), written),
            self.value(features),
        )

    def _written(self, tokens: Tensor) -> Tensor:
        """Return which tokens ``[B, C]`` the answer has, its end among them."""
        ends = (tokens == self.vocabulary.end_id).long()
        return ends.cumsum(1) - ends == 0

    def _per_byte(self, per_token: Tensor, written: Tensor) -> Tensor:
        """Return ``[B, C, D]``: a token's number at its first byte, 0 where nothing is written."""
        return F.pad(per_token.where(written, 0.0)[..., None], (0, self.spec.action_dim - 1))

    def _forced(self, inputs: Inputs, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[B, C, V]`` of the tokens, and the prompt's last state."""
        prompt = inputs["token_ids"]
        ids = torch.cat([prompt.long(), tokens[:, :-1]], 1)
        mask = F.pad(prompt >= 0, (0, tokens.shape[1] - 1), value=True)
        logits, states = self._run(ids, mask, tokens.shape[1])
        return torch.log_softmax(logits / (temperature or 1.0), dim=-1), states[:, 0]

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        tokens = latent["tokens"]
        log_prob, state = self._forced(inputs, tokens, temperature)
        written = self._written(tokens)
        entropy = self._per_byte(
            -(log_prob.exp() * log_prob.masked_fill(self.forbidden, 0.0)).sum(-1), written
        )
        return ActionEval(
            self._per_byte(_of(log_prob, tokens), written),
            entropy,
            self.value_head(state.float()).squeeze(-1),
        )

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        tokens = self.vocabulary.tokens(actions)
        written = self._written(tokens)
        return -(_of(self._forced(inputs, tokens, 1.0)[0], tokens) * written).sum(1) / written.sum(
            1
        )


def _of(log_prob: Tensor, tokens: Tensor) -> Tensor:
    return log_prob.gather(-1, tokens[..., None])[..., 0]

"""Map between tokens and text: which tokens may be written, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rlinf_vla.config.errors import UserError

END = b"\n"  # of an answer


class Vocabulary:
    """Tokens that stand for whole text without line breaks, and the end of an answer.

    Special tokens, parts of a character, and texts outside ``alphabet`` are never written.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, end_id: int, alphabet: str | None) -> None:
        self.tokenizer = tokenizer
        self.end_id = end_id
        special = tokenizer.get_added_tokens_decoder().keys()
        texts = {
            token: tokenizer.decode([token])
            for token in range(min(size, tokenizer.get_vocab_size()))
            if token not in special
        }
        if any(
            (tokenizer.id_to_token(token) or "").startswith("\u2581") and not text.startswith(" ")
            for token, text in texts.items()
            if text
        ):
            raise UserError(
                "this tokenizer drops a token's leading space when it is decoded alone: choose another model.checkpoint"
            )
        allowed = {
            token: text.encode()
            for token, text in texts.items()
            if text
            and text.isprintable()
            and "\ufffd" not in text
            and set(text) <= set(alphabet or text)
        }
        if not allowed:
            raise UserError(
                f"model.options.alphabet={alphabet}: no token of this model is written with it"
            )
        self.width = max(map(len, allowed.values()))
        """Bytes of the longest token."""
        self.ids = {text: token for token, text in reversed(allowed.items())}
        self.bytes = torch.zeros(size, self.width, dtype=torch.uint8)
        for token, text in (allowed | {end_id: END}).items():
            self.bytes[token, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self.forbidden = (self.bytes == 0).all(1)

    def prompts(self, texts: Sequence[str], length: int) -> Tensor:
        """Return token ids int32 ``[B, length]``, padded on the left with -1. Raises UserError."""
        prompts = torch.full((len(texts), length), -1, dtype=torch.int32)
        for row, text in enumerate(texts):
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > length:
                raise UserError(
                    f"prompt {text!r} takes {len(ids)} tokens: set model.options.prompt_length={len(ids)} or more"
                )
            prompts[row, length - len(ids) :] = torch.tensor(ids, dtype=torch.int32)
        return prompts

    def tokens(self, actions: Tensor) -> Tensor:
        """Return the tokens int64 ``[B, C]`` of bytes ``[B, C, D]``; other bytes are the end."""
        rows = actions.round().clamp(0, 255).to(torch.uint8).cpu().tolist()
        tokens = [
            [self.ids.get(bytes(row).rstrip(b"\0"), self.end_id) for row in chunk] for chunk in rows
        ]
        return torch.tensor(tokens, device=actions.device)

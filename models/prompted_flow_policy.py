"""A flow policy whose prompt is the instruction alone, and which pads its state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from rlinf_vla.core.types import Inputs, Observation

from . import files
from .flow_policy import FlowPolicy


class PromptedFlowPolicy(FlowPolicy):
    """Part of SmolVLA and GR00T.

    A subclass sets ``config``, whose ``state_dim`` is the padded size, and calls
    ``_read_tokenizer``.
    """

    condition_unsupported: str | None = None
    config: Any
    prompt_length: int
    """Tokens that an instruction is padded to."""

    @abstractmethod
    def ids(self, instruction: str) -> list[int]:
        """Return the token ids that depend on the instruction."""

    def _read_tokenizer(self, path: Path, default_length: int) -> None:
        self.tokenizer_file = path
        self._default_length = default_length
        self.prompt_length = self.options.prompt_length or default_length
        self.tokenizer = files.read_tokenizer(path.parent)

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        needed = {instruction: len(self.ids(instruction)) for instruction in instructions}
        self.prompt_length = files.prompt_length(
            self.options.prompt_length, self._default_length, needed
        )

    def prepare(self, obs: Observation) -> Inputs:
        """Images keep their size, which may be smaller than the model's, until they are encoded."""
        inputs = {f"image.{name}": obs.images[name] for name in self.spec.images}
        state = self.state_normalizer(obs.state)
        padding = (0, self.config.state_dim - state.shape[-1])
        return inputs | self.prompt(obs) | {"state": F.pad(state, padding)}

    def prompt(self, obs: Observation) -> Inputs:
        ids, mask = files.padded_prompts(
            [(instruction, self.ids(instruction)) for instruction in obs.instruction],
            self.prompt_length,
        )
        return {"token_ids": ids.to(obs.state.device), "token_mask": mask.to(obs.state.device)}

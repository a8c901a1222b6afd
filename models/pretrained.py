"""Load a policy from a checkpoint, in the same way for every family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import DTYPES

from . import files
from .cards import Card, find_card, with_card
from .config_file import building_errors

CRITIC = "value_head.mlp."
HEADS = ("value_head.", "noise_head.")
"""Prefixes of RLinf's heads; its critic of OpenVLA has the layers of ours."""


class PretrainedPolicy(Policy):
    """A policy whose ``backbone`` is built without weights, unless it begins with random ones."""

    built_from: ClassVar[tuple[str, ...]]
    """Files from which the constructor builds the model; errors name them."""
    float32_weights: ClassVar[tuple[str, ...]] = ()
    """Parts of names of the backbone's weights that are float32, whatever ``dtype`` is."""
    sources: ClassVar[Sequence[str]] = files.SOURCES
    """Files of weights in their order of precedence."""
    cards: ClassVar[Sequence[Card]]
    sizes: ClassVar[Mapping[str, str]]
    """Part of a card's name -> location of files with the sizes of its checkpoints, which have no
    weights and made-up statistics. The first that fits counts."""
    dataset_option: ClassVar[str]
    """The option that chooses one of the datasets in a checkpoint."""

    dtype: torch.dtype = torch.float32
    """Data type of the backbone in memory, but see ``dtype_of``."""

    def __init__(self, directory: Path, options: Any) -> None:
        super().__init__()
        self.directory = directory
        self.options = options
        self.remarks: list[str] = []
        """Lines on the checkpoint, to which the constructor adds; they become those of ``spec``."""
        self.stored_dtypes: dict[str, torch.dtype] = {}

    @classmethod
    def _build(cls, checkpoint: Path, config: Any) -> Self:
        with building_errors(checkpoint, *cls.built_from):
            policy = cls(checkpoint, config)
        lines = (
            *policy.remarks,
            *policy.spec.remarks,
            *([] if config.random_weights else files.weight_remarks(checkpoint, cls.sources)),
        )
        policy.spec = replace(policy.spec, remarks=lines)
        return policy

    @classmethod
    def card(cls, directory: Path, options: Any, config: Mapping[str, Any]) -> Card | None:
        """Return the card of the checkpoint, if it has one. Raises UserError."""
        return find_card(
            cls.cards, cls.name, directory, options.card, config.get("card"), cls.layout(config)
        )

    def take_card(self, config: dict[str, Any]) -> Card | None:
        """Apply the checkpoint's card, if it has one, to ``options``; put its name into ``config``.

        Sets ``dtype``, too. Raises UserError.
        """
        card = self.card(self.directory, self.options, config)
        self.options = with_card(self.options, card, config)
        self.dtype = DTYPES[self.options.dtype or "float32"]
        if card is not None:
            config["card"] = card.name
        if self.cards:
            chosen = (
                "none, null options are defaults"
                if card is None
                else f"{card.name} gives what is null"
            )
            self.remarks.append(f"model.options.card: {chosen}")
        return card

    @staticmethod
    def layout(config: Mapping[str, Any]) -> str | None:
        """Return the layout by which cards of one name differ; None: any."""
        return None

    @classmethod
    def published_sizes(cls, location: str, config: Any) -> tuple[str, Any] | None:
        card = cls.card(Path(location.partition("@")[0]), config, {})
        if card is None:
            return None
        sizes = next((files for part, files in cls.sizes.items() if part in card.name), None)
        return (
            None
            if sizes is None
            else (sizes, replace(config, card=card.name, **{cls.dataset_option: None}))
        )

    described_by_json: ClassVar[bool] = False
    """Whether JSON files and the tokenizer say all of a checkpoint but its weights."""

    @classmethod
    def is_described(cls, directory: Path) -> bool:
        """Return whether the files without weights suffice to build the network."""
        return cls.described_by_json

    @classmethod
    def without_weights(cls, checkpoint: Path, config: Any) -> Self:
        policy = cls._build(checkpoint, replace(config, random_weights=False))
        policy._cast()
        return policy

    @classmethod
    def load(cls, checkpoint: Path, config: Any) -> Self:
        policy = cls._build(checkpoint, config)
        if config.random_weights:
            policy._cast()
        else:
            policy.load_weights(checkpoint)
        return policy

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in memory of the backbone's weight ``name``."""
        return torch.float32 if any(part in name for part in self.float32_weights) else self.dtype

    def _cast(self) -> None:
        """Cast the weights; rotary frequencies and other buffers keep their precision."""
        for name, parameter in self.backbone.named_parameters():
            parameter.data = parameter.data.to(self.dtype_of(name))

    def load_weights(self, checkpoint: Path) -> None:
        network, heads = self._parts(checkpoint)
        self.stored_dtypes = files.load_weights(self.backbone, network, checkpoint, self.dtype_of)
        if heads:
            self.spec = replace(
                self.spec, remarks=(*self.spec.remarks, self._take_critic(heads, checkpoint))
            )

    def stored_weights(self, checkpoint: Path) -> dict[str, Callable[[], Tensor]]:
        return self.readers("backbone.", self._parts(checkpoint)[0], checkpoint)

    def _parts(self, checkpoint: Path) -> tuple[files.State, files.State]:
        """Return the weights of the backbone, and those of heads that RLinf stores beside them."""
        state = self.read_state(checkpoint)
        heads = {name: value for name, value in state.items() if name.startswith(HEADS)}
        return {name: value for name, value in state.items() if name not in heads}, heads

    def _take_critic(self, heads: files.State, checkpoint: Path) -> str:
        """Load RLinf's value head if it has the shape of the critic; return a line on the heads."""
        expected = self.value_head.state_dict()
        weights = {
            name.removeprefix(CRITIC): value
            for name, value in heads.items()
            if name.startswith(CRITIC)
        }
        # RLinf's last layer has none
        *_, bias = (name for name in expected if name.endswith("bias"))
        fits = weights.keys() | {bias} == expected.keys() and all(
            value.shape == expected[name].shape for name, value in weights.items()
        )
        if not fits:
            return f"{len(heads)} weights of heads in the checkpoint ({min(heads)}, ...) are left out: training begins with new ones"
        read = {
            name: files.read_weight(name, value, checkpoint).float()
            for name, value in weights.items()
        }
        self.value_head.load_state_dict({bias: torch.zeros_like(expected[bias])} | read)
        return f"the critic is the checkpoint's ({min(heads)}, ...)"

    @staticmethod
    def readers(
        prefix: str, state: files.State, checkpoint: Path
    ) -> dict[str, Callable[[], Tensor]]:
        """Return what reads each weight of a module whose names in the policy have this prefix."""
        return {
            f"{prefix}{key}": partial(files.read_weight, key, value, checkpoint)
            for key, value in state.items()
        }

    def read_state(self, checkpoint: Path) -> files.State:
        """Return the weights of the backbone under its own names."""
        return files.read_weights(checkpoint)

"""OpenVLA-OFT policy (arXiv 2502.19645): a chunk of actions in one bidirectional pass.

Actions are read from slots with zero embeddings, which only their rotary positions distinguish.
Sources: openvla-oft ``prismatic/extern/hf/modeling_prismatic.py``,
``prismatic/models/action_heads.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Tensors

from .. import files
from ..cards import with_card
from ..config_file import read_config
from .checkpoint import COMPONENTS, component_files, read_component
from .keys import OFT_KEYS
from .options import OpenVLAOFTOptions
from .policy import OpenVLAPolicy, gumbel
from .prismatic import PrismaticVLA

OFFICIAL = {"head": "discrete", "chunk": 8, "proprio": False, "film": False, "stop_token": True}


def _action_head(checkpoint: Path) -> files.State:
    path = component_files(checkpoint).get("action_head")
    if path is None:
        raise UserError(
            f"{checkpoint} has no action_head--STEP_checkpoint.pt: use model.options.head=discrete, or copy the file"
        )
    return read_component(path)


class ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class L1RegressionHead(nn.Module):
    """Map slot states ``[B, C * D, d]`` to normalised actions ``[B, C, D]``, as openvla-oft."""

    def __init__(self, chunk: int, action_dim: int, state_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.chunk = chunk
        width = action_dim * state_dim
        layers = {
            "layer_norm1": nn.LayerNorm(width),
            "fc1": nn.Linear(width, hidden_dim),
            "mlp_resnet_blocks": nn.ModuleList(ResidualBlock(hidden_dim) for _ in range(2)),
            "layer_norm2": nn.LayerNorm(hidden_dim),
            "fc2": nn.Linear(hidden_dim, action_dim),
        }
        self.model: Any = nn.ModuleDict(layers)

    def forward(self, states: Tensor) -> Tensor:
        model = self.model
        x = F.relu(model.fc1(model.layer_norm1(states.reshape(len(states), self.chunk, -1))))
        for block in model.mlp_resnet_blocks:
            x = block(x)
        return model.fc2(model.layer_norm2(x))


def slot_states(
    network: PrismaticVLA, embeds: Tensor, mask: Tensor, slots: int, stop_id: int | None
) -> Tensor:
    """Return the states ``[B, slots, d]`` that predict the slots after a prompt ``[B, L, d]``.

    Slot ``i`` is read one position earlier, as in a causal model. ``stop_id``: token that ends the
    sequence, or None.
    """
    first = embeds.shape[1] - 1
    parts = [embeds, embeds.new_zeros(len(embeds), slots, embeds.shape[2])]
    if stop_id is not None:
        parts.append(
            network.embed_tokens(torch.full((len(embeds), 1), stop_id, device=embeds.device)).to(
                embeds.dtype
            )
        )
    embeds = torch.cat(parts, dim=1)
    mask = F.pad(mask, (0, embeds.shape[1] - mask.shape[1]), value=True)
    return network.hidden_states(embeds, mask, rows=embeds.shape[1] - first)[:, :slots]


class OpenVLAOFTPolicy(OpenVLAPolicy):
    """OpenVLA-OFT. Features are the states ``[B, C * D, d]`` that predict the slots."""

    name: ClassVar[str] = "openvla_oft"
    Config: ClassVar[type] = OpenVLAOFTOptions
    keys = OFT_KEYS
    has_components: ClassVar[bool] = True
    full_modules: ClassVar[tuple[str, ...]] = ("proprio_projector",)
    split_unsupported: ClassVar[str | None] = None
    options: OpenVLAOFTOptions

    def __init__(self, directory: Path, options: OpenVLAOFTOptions) -> None:
        config = read_config(directory)
        stored = config.get("oft", {})
        options = with_card(options, self.card(directory, options, config), config | stored)
        component_options = {
            option: value
            for part, (option, value) in COMPONENTS.items()
            if part in component_files(directory)
        }
        unstated = [
            name
            for name in ("images", "chunk")
            if component_options and getattr(options, name) is None and name not in stored
        ]
        for name, value in (OFFICIAL | component_options | stored).items():
            if getattr(options, name) is None:
                options = replace(options, **{name: value})
        if options.head not in ("discrete", "l1"):
            raise UserError(f"model.options.head={options.head}: choose discrete or l1")
        images = options.images or ["base"]
        super().__init__(
            directory,
            options,
            cameras=images,
            chunk=options.chunk or 1,
            proprio=bool(options.proprio),
            num_images=len(images),
            film=bool(options.film),
            bidirectional=True,
        )
        self.remarks += self._component_remarks(unstated)
        self.config["oft"] = {name: getattr(options, name) for name in OFFICIAL}
        self.stop_id = (
            self.config["text_config"].get("eos_token_id", 2) if options.stop_token else None
        )
        self.action_head: L1RegressionHead | None = None
        if options.head == "discrete":
            first = self.action_tokens.first_id
            self.head_modules = ("language_model.lm_head",)
            self.head_rows = {
                "language_model.lm_head.weight": slice(first, first + self.action_tokens.n_bins)
            }
        else:
            self.distributions_unsupported = "has no distribution with model.options.head=l1"
            width = self.backbone.hidden_size
            with files.build_device(options.random_weights):
                self.action_head = L1RegressionHead(
                    self.spec.chunk, self.spec.action_dim, width, width
                )

    @classmethod
    def is_described(cls, directory: Path) -> bool:
        """Without a card or our config.json, the files of its components tell which model it is."""
        config = read_config(directory)
        return "oft" in config or cls.card(directory, OpenVLAOFTOptions(), config) is not None

    def _component_remarks(self, unstated: list[str]) -> list[str]:
        """Return lines on components that are not used, and on ``unstated`` options."""
        unused = [path.name for part, path in self.components.items() if not self._uses(part)]
        lines = (
            [f"{', '.join(unused)}: not used, as model.options or the card say"] if unused else []
        )
        if unstated:
            assumed = {"images": list(self.spec.images), "chunk": self.spec.chunk}
            settings = ", ".join(f"model.options.{name}={assumed[name]}" for name in unstated)
            lines.append(
                f"the files of an OpenVLA-OFT do not state its cameras or chunk, assumed: {settings}"
            )
        return lines

    def _uses(self, part: str) -> bool:
        option, value = COMPONENTS[part]
        return getattr(self.options, option) == value

    def read_state(self, checkpoint: Path) -> files.State:
        weights: dict[str, Tensor | files.Unread] = dict(files.read_weights(checkpoint))
        for name, path in component_files(checkpoint).items():
            if name != "action_head" and self._uses(name):
                weights = {
                    key: value for key, value in weights.items() if not key.startswith(f"{name}.")
                }
                weights |= {f"{name}.{key}": value for key, value in read_component(path).items()}
        return weights

    def load_weights(self, checkpoint: Path) -> None:
        super().load_weights(checkpoint)
        if self.action_head is not None:
            files.load_weights(self.action_head, _action_head(checkpoint), checkpoint)

    def stored_weights(self, checkpoint: Path) -> dict[str, Callable[[], Tensor]]:
        readers = super().stored_weights(checkpoint)
        return (
            readers
            if self.action_head is None
            else readers | self.readers("action_head.", _action_head(checkpoint), checkpoint)
        )

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        super().save(checkpoint, dtype)
        if self.action_head is not None:
            state = {
                key: value.to(dtype or torch.bfloat16)
                for key, value in self.action_head.state_dict().items()
            }
            files.write_safetensors(state, checkpoint / "action_head.safetensors")

    def encode(self, inputs: Inputs) -> Tensor:
        embeds, mask = self.embed_prompt(inputs)
        states = slot_states(
            self.backbone, embeds, mask, self.spec.chunk * self.spec.action_dim, self.stop_id
        )
        return (
            states.contiguous()
        )  # as after serialisation: strides can select the kernel, and so the last bit

    def pooled(self, features: Any) -> Tensor:
        return features[:, 0].float()

    def act(self, features: Any, noise: Noise | None, temperature: float) -> ActionSample:
        if self.action_head is not None:
            actions = self.action_tokens.denormalise(self.action_head(features.float()))
            return ActionSample(actions, {}, torch.zeros_like(actions), self.value(features))
        log_prob = self._log_softmax(features, temperature)
        scores = (
            log_prob + gumbel(noise, *log_prob.shape[1:])
            if noise is not None and temperature > 0
            else log_prob
        )
        choice = scores.argmax(dim=-1)
        token_ids = choice + self.action_tokens.first_id
        return self._sample(token_ids, self._chosen(log_prob, token_ids), self.value(features))

    def pack(self, features: Any) -> Tensors:
        return {"states": features}

    def unpack(self, tensors: Tensors) -> Any:
        return tensors["states"]

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        if self.action_head is not None:
            raise UserError(
                "model.options.head=l1 has no action distribution, which reinforcement learning needs: use head=discrete"
            )
        return super().evaluate(inputs, latent, temperature)

    def _predicting(self, inputs: Inputs, token_ids: Tensor) -> Tensor:
        return self.encode(inputs)

    def reference_actions(self, inputs: Inputs) -> Tensor | None:
        return None  # a single pass has no slower reference

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        states = self.encode(inputs)
        if self.action_head is not None:
            return (
                (self.action_head(states.float()) - self.action_tokens.normalise(actions))
                .abs()
                .mean(dim=(1, 2))
            )
        return self._cross_entropy(states, self.action_tokens.encode(actions).flatten(1))

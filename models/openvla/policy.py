"""OpenVLA policy: decode ``C * D`` action tokens autoregressively from an image and an instruction.

OpenVLA itself predicts one control step (``C = 1``); ``chunk`` in our config.json sets more.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import through_jpeg
from rlinf_vla.core.protocols import Convention, Noise, PolicySpec
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation

from .. import files
from ..config_file import read_config
from ..config_keys import Table, check_keys
from ..pretrained import PretrainedPolicy
from .actions import BOUNDS, ActionTokenizer, ProprioNormalizer
from .cache import StaticCache
from .cards import CARDS, suite_of
from .checkpoint import STATISTICS, component_files, read_conventions, read_statistics
from .decoding import Decoder, generate_reference_tokens
from .keys import KEYS
from .options import OpenVLAOptions
from .prismatic import PrismaticVLA
from .processor import PixelNormalizer, PromptEncoder, center_crop, lanczos, resize

if TYPE_CHECKING:
    from rlinf_vla.core.distributions import Categorical

COMPANIONS = (
    *(
        STATISTICS,
        files.TOKENIZER,
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("preprocessor_config.json", "generation_config.json"),
)
"""Files that official programs need beside config.json and the weights; code is not copied."""


PROMPT_LENGTH = 32
PATCHES = "patches"


class ValueHead(nn.Sequential):
    """Critic on the state that predicts the first action token; its initial output is zero.

    Layer sizes follow RLinf (hidden -> 512 -> 128 -> 1).
    """

    def __init__(self, hidden_size: int) -> None:
        last = nn.Linear(128, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(
            nn.Linear(hidden_size, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), last
        )


@dataclass
class Prefix:
    """Features: last state of the prompt ``[B, d]``, its mask ``[B, P]``, its keys and values."""

    state: Tensor
    mask: Tensor
    cache: StaticCache


def gumbel(noise: Noise, *shape: int) -> Tensor:
    """Return Gumbel noise: ``argmax(logits / T + gumbel)`` samples from ``softmax(logits / T)``.

    As ``noise`` does, it depends on the episode and step only, not on the batch.
    """
    return -torch.log(-torch.log(noise.uniform(*shape)))


class OpenVLAPolicy(PretrainedPolicy):
    """OpenVLA with a value head; actions are sampled token by token. Features are a Prefix."""

    name: ClassVar[str] = "openvla"
    Config: ClassVar[type] = OpenVLAOptions
    built_from: ClassVar[tuple[str, ...]] = (files.CONFIG, STATISTICS, files.TOKENIZER)
    cards = CARDS
    sizes: ClassVar[dict[str, str]] = {"": "asset://openvla_7b"}
    dataset_option: ClassVar[str] = "unnorm_key"
    described_by_json: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = OpenVLAOptions.lora_targets
    vision_modules: ClassVar[tuple[str, ...]] = ("vision_backbone",)
    language_modules: ClassVar[tuple[str, ...]] = ("language_model",)
    keys: ClassVar[Table] = KEYS
    has_components: ClassVar[bool] = False
    distributions_unsupported: str | None = None
    stop_id: int | None = None
    """Token that ends the sequence, if the model reads it."""
    split_unsupported: ClassVar[str | None] = (
        "passes every action token through its whole language model: it has no separate action head"
    )

    def __init__(
        self,
        directory: Path,
        options: Any,
        *,
        cameras: list[str] | None = None,
        chunk: int | None = None,
        proprio: bool = False,
        **network: Any,
    ) -> None:
        """For OpenVLA-OFT: cameras, chunk, whether it reads proprioception, network options."""
        super().__init__(directory, options)
        self.config = config = read_config(directory)
        self.remarks += check_keys(config, self.keys, directory / files.CONFIG)
        self.components = component_files(directory)
        if self.components and not self.has_components:
            file = next(iter(self.components.values())).name
            raise UserError(
                f"{directory} holds a part of an OpenVLA-OFT ({file}): set model=openvla_oft"
            )
        card = self.take_card(config)
        options = self.options
        dataset = read_statistics(directory, config, options.unnorm_key, card)
        self.dataset = dataset.name
        self.statistics = dataset.statistics
        config |= read_conventions(directory, config, options)
        text = config["text_config"]
        proprio_dim = len(self.statistics["proprio"][BOUNDS[config["bounds"]][0]]) if proprio else 0
        with files.build_device(options.random_weights):
            self.backbone: PrismaticVLA = PrismaticVLA(config, proprio_dim=proprio_dim, **network)
        self.value_head = ValueHead(self.backbone.hidden_size)
        size = text["vocab_size"] - config["pad_to_multiple_of"]
        bins = config["n_action_bins"]
        where = f"{directory}: statistics of {dataset.name}"
        self.action_tokens = ActionTokenizer(
            size,
            bins,
            self.statistics["action"],
            config["gripper"],
            config["bounds"],
            f"{where}, action",
        )
        self.pixels = PixelNormalizer()
        self.proprio = (
            ProprioNormalizer(self.statistics["proprio"], config["bounds"], f"{where}, proprio")
            if proprio
            else None
        )
        self.state_limit = ("proprio", 1.0) if proprio else None
        self.prompts = PromptEncoder(
            files.read_tokenizer(directory),
            options.prompt_length or PROMPT_LENGTH,
            bos_id=text.get("bos_token_id", 1),
            pad_id=config["pad_token_id"],
            empty_id=config.get("empty_token_id", 29871),
        )
        height, width = config["image_sizes"]
        images = dict.fromkeys(cameras or [options.image or "base"], (height, width))
        meaning = Convention() if card is None else card.meaning(dataset.name, dataset.inherited)
        self.spec = PolicySpec(
            chunk=chunk or config.get("chunk", 1),
            action_dim=self.action_tokens.action_dim,
            state_dim=proprio_dim,
            images=images,
            convention=replace(
                meaning,
                gripper=self.action_tokens.gripper_convention,
                jpeg=config["resize"] == "rlds",
            ),
            env={} if card is None else card.env_for(images),
            suite=None if options.unnorm_key else suite_of(dataset.name),
            remarks=() if card is None else card.remarks(dataset.name, dataset.inherited),
        )

    @classmethod
    def dataset_of(cls, directory: Path, options: Any) -> str:
        """Return the dataset that a checkpoint's actions are un-normalised as. Raises UserError."""
        config = read_config(directory)
        return read_statistics(
            directory, config, options.unnorm_key, cls.card(directory, options, config)
        ).name

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        for name in COMPANIONS:
            if (self.directory / name).exists():
                shutil.copyfile(self.directory / name, checkpoint / name)
        files.save(self.backbone.state_dict(), self.config, checkpoint, self.stored_dtypes, dtype)

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        needed = {instruction: len(self.prompts.ids(instruction)) for instruction in instructions}
        self.prompts.length = files.prompt_length(self.options.prompt_length, PROMPT_LENGTH, needed)

    @property
    def augmentation_unsupported(self) -> str | None:  # type: ignore[override]
        if self.config["center_crop"]:
            return None
        return "crops images in training, so it must also do so when it acts: set model.options.center_crop=true"

    def prepare(self, obs: Observation) -> Inputs:
        inputs = self.prepare_to_augment(obs)
        if self.config["center_crop"]:
            inputs |= {name: center_crop(inputs[name]) for name in self._images()}
        return inputs

    def _images(self) -> list[str]:
        return [f"image.{name}" for name in self.spec.images]

    def augment(self, inputs: Inputs, noise: Noise) -> Inputs:
        from .augmentation import prismatic_augmented

        images = {name: prismatic_augmented(inputs[name], noise) for name in self._images()}
        return inputs | images

    def prepare_to_augment(self, obs: Observation) -> Inputs:
        """Prepare without the centre crop, which the augmentation's random crop replaces."""
        inputs = {
            f"image.{name}": self._image(obs, name, size) for name, size in self.spec.images.items()
        }
        token_ids, token_mask = self.prompts(obs.instruction)
        device = obs.state.device
        inputs |= {"token_ids": token_ids.to(device), "token_mask": token_mask.to(device)}
        return inputs | {"proprio": self.proprio(obs.state)} if self.proprio else inputs

    def _image(self, obs: Observation, name: str, size: tuple[int, int]) -> Tensor:
        if self.spec.convention.jpeg:
            return lanczos(
                obs.jpeg[name] if name in obs.jpeg else through_jpeg(obs.images[name]), size
            )
        return resize(
            obs.images[name], size, self.config.get("image_resize_strategy", "resize-naive")
        )

    def encode(self, inputs: Inputs) -> Any:
        """Return a :class:`Prefix`."""
        embeds, mask = self.embed_prompt(inputs)
        cache = StaticCache(embeds.shape[1] + self.spec.chunk * self.spec.action_dim - 1)
        return Prefix(self.backbone.hidden_states(embeds, mask, cache, rows=1)[:, -1], mask, cache)

    def pooled(self, features: Any) -> Tensor:
        return features.state.float()

    def act(self, features: Any, noise: Noise | None, temperature: float) -> ActionSample:
        count = self.spec.chunk * self.spec.action_dim
        state = features.state
        decoder = Decoder(self.backbone, features.cache, features.mask)
        tokens: list[Tensor] = []
        log_probs: list[Tensor] = []
        perturbation = (
            gumbel(noise, count, self.action_tokens.n_bins)
            if noise is not None and temperature > 0
            else None
        )
        for i in range(count):
            if i > 0:
                state = decoder.step(i - 1, tokens[-1])
            log_prob = self._log_softmax(state, temperature)
            choice = (log_prob if perturbation is None else log_prob + perturbation[:, i]).argmax(
                dim=-1
            )
            tokens.append(choice + self.action_tokens.first_id)
            log_probs.append(log_prob.gather(-1, choice[:, None])[:, 0])
        token_ids = torch.stack(tokens, dim=1)
        return self._sample(token_ids, torch.stack(log_probs, dim=1), self.value(features))

    def _sample(self, token_ids: Tensor, log_prob: Tensor, value: Tensor) -> ActionSample:
        actions = self.action_tokens.decode(self._per_action(token_ids))
        return ActionSample(actions, {"token_ids": token_ids}, self._per_action(log_prob), value)

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        token_ids = latent["token_ids"]
        return self._evaluate(self._predicting(inputs, token_ids), token_ids, temperature)

    def _evaluate(self, states: Tensor, token_ids: Tensor, temperature: float) -> ActionEval:
        log_prob = self._log_softmax(states, temperature)
        return ActionEval(
            log_prob=self._per_action(self._chosen(log_prob, token_ids)),
            entropy=self._per_action(-(log_prob.exp() * log_prob).sum(-1)),
            value=self.value_head(states[:, 0].float()).squeeze(-1),
        )

    def distributions(
        self, inputs: Inputs, latent: dict[str, Tensor], temperature: float
    ) -> Categorical:
        from rlinf_vla.core.distributions import Categorical

        tokens = self.action_tokens
        log_prob = self._log_softmax(self._predicting(inputs, latent["token_ids"]), temperature)
        every = tokens.first_id + torch.arange(tokens.n_bins, device=log_prob.device)
        numbers = tokens.decode(every[:, None].expand(-1, tokens.action_dim))
        return Categorical(self._per_action(log_prob), numbers)

    def _predicting(self, inputs: Inputs, token_ids: Tensor) -> Tensor:
        """Return the states ``[B, C * D, d]`` that predict the sampled tokens."""
        return self._teacher_forced(inputs, token_ids)

    def reference_actions(self, inputs: Inputs) -> Tensor | None:
        embeds, mask = self.embed_prompt(inputs)
        count = self.spec.chunk * self.spec.action_dim
        return self.action_tokens.decode(
            self._per_action(
                generate_reference_tokens(self.backbone, embeds, mask, self.action_tokens, count)
            )
        )

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        token_ids = self.action_tokens.encode(actions).flatten(1)
        return self._cross_entropy(self._teacher_forced(inputs, token_ids), token_ids)

    def _cross_entropy(self, states: Tensor, token_ids: Tensor) -> Tensor:
        return -self._chosen(self._log_softmax(states, temperature=1.0), token_ids).mean(dim=1)

    def _chosen(self, log_prob: Tensor, token_ids: Tensor) -> Tensor:
        """Select log-probabilities of ``token_ids`` ``[B, N]`` from ``[B, N, n_bins]``."""
        return log_prob.gather(-1, (token_ids - self.action_tokens.first_id)[..., None])[..., 0]

    def _per_action(self, per_token: Tensor) -> Tensor:
        """Reshape ``[B, C * D, ...]`` to ``[B, C, D, ...]``."""
        return per_token.unflatten(1, (self.spec.chunk, self.spec.action_dim))

    def precompute(self, inputs: Inputs) -> Inputs:
        """Replace images by their patch features, if no update changes the vision towers."""
        if any(parameter.requires_grad for parameter in self.backbone.vision_backbone.parameters()):
            return inputs
        rest = {name: value for name, value in inputs.items() if not name.startswith("image.")}
        return rest | {PATCHES: self.patches(inputs)}

    def patches(self, inputs: Inputs) -> Tensor:
        if PATCHES in inputs:
            return inputs[PATCHES]
        pixels = torch.cat(
            [self.pixels(inputs[f"image.{name}"]) for name in self.spec.images], dim=1
        )
        return self.backbone.encode_images(
            pixels, inputs["token_ids"], inputs["token_mask"], self.stop_id
        )

    def embed_prompt(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.backbone.embed_prompt(
            self.patches(inputs), inputs["token_ids"], inputs["token_mask"], inputs.get("proprio")
        )

    def _teacher_forced(self, inputs: Inputs, token_ids: Tensor) -> Tensor:
        """Return the states ``[B, C * D, d]`` that predict the action tokens ``[B, C * D]``."""
        embeds, mask = self.embed_prompt(inputs)
        embeds = torch.cat([embeds, self.backbone.embed_tokens(token_ids[:, :-1])], dim=1)
        mask = F.pad(mask, (0, token_ids.shape[1] - 1), value=True)
        return self.backbone.hidden_states(embeds, mask, rows=token_ids.shape[1])

    def _log_softmax(self, states: Tensor, temperature: float) -> Tensor:
        """Return log-probabilities of the action ids, for sampling, greedy choice and training.

        Temperature 0 (greedy) counts as 1.
        """
        logits = self.backbone.logits_of(
            states, self.action_tokens.first_id, self.action_tokens.n_bins
        ).float()
        return torch.log_softmax(logits / (temperature or 1.0), dim=-1)

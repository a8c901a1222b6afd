"""π₀ and π₀.₅ policy: denoise a chunk in ``K`` steps with a tractable log-probability.

Samplers (``model.options.sampler``), after piRL (arXiv 2510.25889): in ``flow_sde`` one randomly
chosen step is stochastic and gives the log-probability; the others are Euler steps. In
``flow_sde_all`` every step is stochastic, in ``flow_noise`` with a learnt standard deviation; the
log-probability is that of the whole chain, initial noise included.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise, PolicySpec
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation, Tensors

from .. import files
from ..pretrained import PretrainedPolicy
from . import flow, lerobot, real_time
from .cards import CARDS
from .checkpoint import find_tokenizer, network_config, read_document, read_normalizers, read_state
from .network import NoiseHead, Pi0Network, Prefix, mlp
from .options import Pi0Options
from .processor import NORM_STATS, PromptEncoder, absolute, copy_statistics, delta_dimensions, relative, resize_with_pad, to_unit_range

PROMPT_LENGTHS = {False: 48, True: 200}
"""Whether the state is in the prompt -> token ids per prompt, as in openpi."""


@dataclass
class Features:
    """Inputs of the action expert."""

    prefix: Prefix
    state: Tensor
    critic: Tensor
    """Input of the value head, ``[B, width]``."""


class Pi0Policy(PretrainedPolicy):
    """π₀ or π₀.₅ with a value head and, for flow_noise, a noise head."""

    name: ClassVar[str] = "pi0"
    Config: ClassVar[type] = Pi0Options
    built_from: ClassVar[tuple[str, ...]] = (files.CONFIG, NORM_STATS, files.TOKENIZER)
    cards = CARDS
    layout = staticmethod(lerobot.layout_of)
    sizes: ClassVar[dict[str, str]] = {"pi05": "asset://pi05_3b", "pi0": "asset://pi0_3b"}
    dataset_option: ClassVar[str] = "asset_id"
    lora_targets: ClassVar[tuple[str, ...]] = Pi0Options.lora_targets
    vision_modules: ClassVar[tuple[str, ...]] = ("paligemma_with_expert.paligemma.model.vision_tower",)
    language_modules: ClassVar[tuple[str, ...]] = ("paligemma_with_expert.paligemma.model.language_model",)
    full_modules: ClassVar[tuple[str, ...]] = (
        *("action_in_proj", "action_out_proj", "state_proj"),
        *("action_time_mlp_in", "action_time_mlp_out", "time_mlp_in", "time_mlp_out"),
    )
    float32_weights: ClassVar[tuple[str, ...]] = (
        *("vision_model.embeddings.", "input_layernorm", "post_attention_layernorm", "model.norm"),
        *full_modules,
    )
    """Those of openpi's ``to_bfloat16_for_selected_params``, and what is outside its cast."""
    split_unsupported: ClassVar[str | None] = None
    head_modules: tuple[str, ...] = ("paligemma_with_expert.gemma_expert.model", *full_modules)

    def __init__(self, directory: Path, options: Pi0Options) -> None:
        super().__init__(directory, options)
        document = self.document = read_document(directory)
        card = self.take_card(document)
        options = self.options
        delta_mask = None if options.delta_mask is None else list(options.delta_mask)
        asked = {"action_horizon": options.action_horizon, "simulated_delay": options.simulated_delay, "delta_mask": delta_mask}
        document |= {key: value for key, value in asked.items() if value is not None}
        config = self.config = network_config(document)
        self.state_normalizer, self.action_normalizer = read_normalizers(directory, document, options.asset_id)
        with_state = config.pi05 if options.state_in_prompt is None else options.state_in_prompt
        self.delta = delta_dimensions(document.get("delta_mask", []), len(self.action_normalizer), len(self.state_normalizer))
        self.simulated_delay: int = document.get("simulated_delay", 0)
        length = options.prompt_length or PROMPT_LENGTHS[with_state]
        self.tokenizer = find_tokenizer(directory)
        bos, numbers = document.get("bos_token_id", 2), options.prompt_state_dim or 0
        self.prompts = PromptEncoder(files.read_tokenizer(self.tokenizer.parent), length, bos, with_state, numbers)
        with files.build_device(options.random_weights):
            self.backbone: Pi0Network = Pi0Network(config)
        widths = {"expert": config.expert.width, "vlm": config.paligemma.width}
        self.value_head = mlp(widths.get(options.value_on, sum(widths.values())), 512, 128, 1, activation=nn.GELU)
        for parameter in self.value_head[-1].parameters():
            nn.init.zeros_(parameter)
        low, high = options.noise_range
        self.noise_head = NoiseHead(config.expert.width, config.action_dim, low, high) if options.sampler == "flow_noise" else None
        self.noise_dim = config.action_dim
        chunk = options.chunk or document.get("n_action_steps", config.horizon)
        if chunk > config.horizon:
            raise UserError(f"model.options.chunk={chunk} is more than the model's horizon of {config.horizon} actions")
        if self.simulated_delay >= chunk:
            raise UserError(f"model.options.simulated_delay={self.simulated_delay} leaves nothing of a chunk of {chunk} actions: reduce it")
        size = (config.vision["image_size"],) * 2
        images = dict.fromkeys(options.images or ["base"], size)
        self.spec = PolicySpec(chunk, len(self.action_normalizer), len(self.state_normalizer), images)
        if card is not None:
            self.spec = replace(self.spec, convention=card.convention, env=card.env_for(images), remarks=card.remarks)
        if options.frozen_vlm:
            self.backbone.paligemma_with_expert.paligemma.requires_grad_(False)

    def read_state(self, checkpoint: Path) -> files.State:
        return read_state(checkpoint)

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        shutil.copyfile(self.tokenizer, checkpoint / files.TOKENIZER)
        copy_statistics(self.directory, checkpoint)
        files.save(self.backbone, self.document, checkpoint, self.stored_dtypes, dtype)

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        highest = torch.ones(self.spec.state_dim)  # its bins have three digits each
        needed = {instruction: len(self.prompts.ids(instruction, highest)) for instruction in instructions}
        default = PROMPT_LENGTHS[self.prompts.with_state]
        self.prompts.length = files.prompt_length(self.options.prompt_length, default, needed)

    def prepare(self, obs: Observation) -> Inputs:
        inputs = {f"image.{name}": resize_with_pad(obs.images[name], size) for name, size in self.spec.images.items()}
        state = self.state_normalizer(obs.state)
        token_ids, token_mask = self.prompts(obs.instruction, state)
        inputs |= {"token_ids": token_ids.to(state.device), "token_mask": token_mask.to(state.device)}
        return inputs | {"state": F.pad(state, (0, self.config.action_dim - state.shape[-1]))}

    def precompute(self, inputs: Inputs) -> Inputs:
        if not self.options.frozen_vlm:
            return inputs
        return self._prefix(inputs).pack(states=True) | {"state": inputs["state"]}

    def _prefix(self, inputs: Inputs) -> Prefix:
        if (stored := Prefix.unpack(inputs)) is not None:
            return stored
        images = to_unit_range(torch.stack([inputs[f"image.{name}"] for name in self.spec.images], dim=1))
        everywhere = inputs["token_mask"].new_ones(images.shape[:2])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.options.frozen_vlm):
            return self.backbone.prefix(images, everywhere, inputs["token_ids"], inputs["token_mask"])

    def encode(self, inputs: Inputs) -> Features:
        prefix = self._prefix(inputs)
        critics = []
        if self.options.value_on != "vlm":
            state = inputs["state"]
            x = state.new_zeros(len(state), self.config.horizon, self.config.action_dim)
            critics.append(self._velocity(prefix, state, x, state.new_ones(1))[1].mean(1))
        if self.options.value_on != "expert":
            critics.append((prefix.states * prefix.mask[..., None]).sum(1) / prefix.mask.sum(1, keepdim=True))
        return Features(prefix, inputs["state"], torch.cat(critics, dim=1))

    def pooled(self, features: Features) -> Tensor:
        return features.critic.float()

    def pack(self, features: Features) -> Tensors:
        return features.prefix.pack(states=False) | {"state": features.state, "critic": features.critic}

    def unpack(self, tensors: Tensors) -> Features:
        prefix = Prefix.unpack(tensors)
        assert prefix is not None
        return Features(prefix, tensors["state"], tensors["critic"])

    def act(self, features: Features, noise: Noise | None, temperature: float) -> ActionSample:
        return self._denoise(features, noise, temperature, self._flow(features))

    def act_with_prefix(self, features: Features, noise: Noise | None, temperature: float, committed: Tensor, frozen: int) -> ActionSample:
        """See ``RealTimeChunking``. The log-probability is that of the guided or conditioned chain.
        Of a longer delay than the simulated ones, the model is given the actions of the longest."""
        count, horizon = committed.shape[1], self.config.horizon
        known = self.action_normalizer(relative(committed, self._robot_state(features), self.delta))
        target = F.pad(known, (0, self.config.action_dim - known.shape[-1], 0, horizon - count))
        if self.simulated_delay:
            flow_onto = real_time.conditioned_velocity(self._flow(features), target, min(frozen, self.simulated_delay))
        else:
            real = torch.arange(self.config.action_dim) < known.shape[-1]
            weights = real_time.prefix_weights(count, frozen, horizon)[:, None] * real
            flow_onto = real_time.guided_velocity(self._flow(features), target, weights.to(target.device))
        sample = self._denoise(features, noise, temperature, flow_onto)
        return replace(sample, actions=torch.cat([committed[:, :frozen], sample.actions[:, frozen:]], dim=1))

    def _flow(self, features: Features) -> real_time.Velocity:
        return lambda x, time: self._velocity(features.prefix, features.state, x, time)

    def _denoise(self, features: Features, noise: Noise | None, temperature: float, velocity_at: real_time.Velocity) -> ActionSample:
        steps, batch = self.options.denoise_steps, len(features.state)
        shape = (self.config.horizon, self.config.action_dim)
        device = features.state.device
        last = torch.full((batch,), steps - 1, device=device)
        if noise is None or temperature == 0:  # greedy: start from zero noise, and take the mean of each step
            draws, index = torch.zeros(batch, steps + 1, *shape, device=device), last
        else:
            draws = noise.normal(steps + 1, *shape)
            index = (noise.uniform(1)[:, 0] * steps).long()
        chain = [draws[:, 0]]
        log_prob = features.state.new_zeros(batch, *shape) if self._one_step else flow.standard_log_prob(chain[0])
        for i, time in enumerate(flow.times(steps, device)):
            x = chain[-1]
            velocity, states = velocity_at(x, time)
            mean, std = self._transition(x, velocity, states, time.expand(batch), temperature)
            moved = mean + std * draws[:, i + 1]
            here = flow.gaussian_log_prob(moved, mean, std)
            if self._one_step:
                chosen = (index == i)[:, None, None]
                moved = torch.where(chosen, moved, flow.ode_step(x, velocity, steps))
                here = torch.where(chosen, here, 0)
            chain.append(moved)
            log_prob = log_prob + here
        latent = {"chain": torch.stack(chain, dim=1)}
        if self._one_step:
            rows = torch.arange(batch, device=device)
            latent = {"before": latent["chain"][rows, index], "after": latent["chain"][rows, index + 1], "index": index}
        return ActionSample(self._actions(chain[-1], features), latent, self._executed(log_prob), self.value(features))

    def act_from_noise(self, features: Features, noise: Tensor) -> Tensor:
        """See ``Policy``. Uses the same noise for every action of the horizon."""
        x, steps = noise[:, None].expand(-1, self.config.horizon, -1), self.options.denoise_steps
        for time in flow.times(steps, x.device):
            x = flow.ode_step(x, self._velocity(features.prefix, features.state, x, time)[0], steps)
        return self._actions(x, features)

    def _actions(self, x: Tensor, features: Features) -> Tensor:
        """Convert denoised ``x`` ``[B, H, A]`` to actions in environment units ``[B, C, D]``."""
        return absolute(self.action_normalizer.inverse(self._executed(x)), self._robot_state(features), self.delta)

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        features = self.encode(inputs)
        times = flow.times(self.options.denoise_steps, features.state.device)
        if self._one_step:
            log_prob, entropy = self._evaluate(features, latent["before"], latent["after"], times[latent["index"]], temperature)
        else:
            chain = latent["chain"]
            log_prob, entropy = flow.standard_log_prob(chain[:, 0]), flow.gaussian_entropy(torch.ones_like(chain[:, 0]))
            for i, time in enumerate(times):
                parts = self._evaluate(features, chain[:, i], chain[:, i + 1], time.expand(len(chain)), temperature)
                log_prob, entropy = log_prob + parts[0], entropy + parts[1]
        return ActionEval(self._executed(log_prob), self._executed(entropy), self.value(features))

    def reference_actions(self, inputs: Inputs) -> Tensor | None:
        """Denoise greedily, encoding images and text again at each step."""
        return self.act(_Recomputed(self, inputs), None, 0.0).actions

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        """Return the conditional flow-matching loss; short chunks repeat their last action."""
        features, horizon = self.encode(inputs), self.config.horizon
        target = self.action_normalizer(relative(actions, self._robot_state(features), self.delta))
        target = torch.cat([target, target[:, -1:].expand(-1, horizon - target.shape[1], -1)], dim=1)
        target = F.pad(target, (0, self.config.action_dim - target.shape[2]))
        time = flow.training_times(noise.uniform(1)[:, 0])
        if self.simulated_delay:
            time = real_time.simulated_times(time, noise.uniform(1)[:, 0], self.simulated_delay, horizon)
        x, velocity = flow.interpolate(target, noise.normal(*target.shape[1:]), time)
        found, _ = self._velocity(features.prefix, features.state, x, time)
        return flow.matching_loss(found, velocity, time)

    @property
    def _one_step(self) -> bool:
        return self.options.sampler == "flow_sde"

    def _executed(self, chunk: Tensor) -> Tensor:
        return chunk[:, : self.spec.chunk, : self.spec.action_dim]

    def _robot_state(self, features: Features) -> Tensor:
        """Return the state ``[B, S]`` in the robot's units."""
        return self.state_normalizer.inverse(features.state[:, : self.spec.state_dim])

    def _velocity(self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.backbone.velocity(prefix, state, x, time if time.ndim == 2 else time.expand(len(x)))

    def _transition(self, x: Tensor, velocity: Tensor, states: Tensor, time: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of a stochastic step; temperature 0 counts as 1."""
        if self.noise_head is not None:
            return flow.ode_step(x, velocity, self.options.denoise_steps), self.noise_head(states) * (temperature or 1.0)
        level = self.options.noise_level * (temperature or 1.0)
        mean, std = flow.sde_step(x, velocity, time, self.options.denoise_steps, level)
        return mean, std.expand_as(mean)

    def _evaluate(self, features: Features, before: Tensor, after: Tensor, time: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        velocity, states = self._velocity(features.prefix, features.state, before, time)
        mean, std = self._transition(before, velocity, states, time, temperature)
        return flow.gaussian_log_prob(after, mean, std), flow.gaussian_entropy(std)


class _Recomputed(Features):
    """Features whose prefix is computed again at every access."""

    def __init__(self, policy: Pi0Policy, inputs: Inputs) -> None:
        features = policy.encode(inputs)
        self.state, self.critic = features.state, features.critic
        self._again = lambda: policy._prefix(inputs)

    @property
    def prefix(self) -> Prefix:  # type: ignore[override]
        return self._again()

"""Policies that denoise a chunk in ``K`` steps with a tractable log-probability.

Samplers (``model.options.sampler``), after piRL (arXiv 2510.25889): in ``flow_sde`` one randomly
chosen step is stochastic and gives the log-probability; the others are Euler steps. In
``flow_sde_all`` every step is stochastic, in ``flow_noise`` with a learnt standard deviation; the
log-probability is that of the whole chain, initial noise included.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import ImageSize, Noise, PolicySpec
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Tensors

from . import flow, real_time
from .cards import Card
from .flow_network import NoiseHead, Prefix, Velocity, mlp
from .gripper import to_dataset, to_environment
from .normalizer import Normalizer, absolute, relative
from .options import GRIPPERS
from .pretrained import PretrainedPolicy


@dataclass
class Features:
    """Inputs of the action expert."""

    prefix: Prefix
    state: Tensor
    critic: Tensor
    """Input of the value head, ``[B, width]``."""
    without: Prefix | None = None
    """Prefix without a condition, from whose velocity is extrapolated (``guided``)."""
    scale: float = 1.0


class FlowPolicy(PretrainedPolicy):
    """A flow policy with a value head and, for flow_noise, a noise head.

    A subclass sets its ``backbone``, which has ``velocity(prefix, state, x, time)`` as π₀'s network
    has, and both normalisers; then it calls ``_add_heads``.
    """

    backbone: Any
    state_normalizer: Normalizer
    action_normalizer: Normalizer
    delta: list[int]
    """Action dimensions relative to the state at the start of the chunk."""
    bars: ClassVar[float | None] = None
    """As of ``PolicySpec``."""
    simulated_delay: int = 0
    """Longest delay that supervised training simulates, in control steps."""
    padding_learns: ClassVar[bool] = True
    """Whether supervised training counts the dimensions that pad an action, whose target is 0."""
    noise_dim: int

    def _add_heads(self, widths: tuple[int, int], action_dim: int, horizon: int, chunk: int) -> int:
        """Add the heads; return how many actions are executed.

        ``widths`` are those of the expert and the language model; ``chunk`` is the default. Raises
        UserError for options that do not fit.
        """
        options = self.options
        (expert, vlm) = widths
        self.value_head = mlp(
            {"expert": expert, "vlm": vlm}.get(options.value_on, expert + vlm),
            512,
            128,
            1,
            activation=nn.GELU,
        )
        for parameter in self.value_head[-1].parameters():
            nn.init.zeros_(parameter)
        low, high = options.noise_range
        self.noise_head = (
            NoiseHead(expert, action_dim, low, high) if options.sampler == "flow_noise" else None
        )
        self.noise_dim = action_dim
        self.horizon = horizon
        chunk = options.chunk or chunk
        if chunk > horizon:
            raise UserError(
                f"model.options.chunk={chunk} is more than the model's horizon of {horizon} actions"
            )
        if self.simulated_delay >= chunk:
            raise UserError(
                f"model.options.simulated_delay={self.simulated_delay} leaves nothing of a chunk of {chunk} actions: reduce it"
            )
        return chunk

    def _spec_of(self, chunk: int, size: ImageSize, card: Card | None) -> PolicySpec:
        images = dict.fromkeys(self.options.images or ["base"], size)
        limit = self.state_normalizer.limit
        self.state_limit = None if limit is None else ("state", limit)
        spec = PolicySpec(
            chunk, len(self.action_normalizer), len(self.state_normalizer), images, bars=self.bars
        )
        if card is not None:
            spec = replace(
                spec, convention=card.convention, env=card.env_for(images), remarks=card.remarks()
            )
        if self._gripper and spec.convention.gripper is not None:
            raise UserError(
                f"model.options.gripper={self.options.gripper}: the gripper's numbers of this checkpoint are signs already "
                f"({spec.convention.gripper}), not from 0 to 1: leave it out"
            )
        if self._gripper:
            spec = replace(spec, convention=replace(spec.convention, gripper=self.options.gripper))
        return spec

    @abstractmethod
    def encode_prefix(self, inputs: Inputs) -> Prefix:
        """Encode what the recipe's ``frozen_vlm`` freezes: images and text."""

    def context(self, inputs: Inputs) -> Prefix:
        """Return what the action expert attends to."""
        return self._prefix(inputs)

    def precompute(self, inputs: Inputs) -> Inputs:
        if not self.options.frozen_vlm:
            return inputs
        return self._prefix(inputs).pack(states=self.options.value_on != "expert") | {
            "state": inputs["state"]
        }

    def _prefix(self, inputs: Inputs) -> Prefix:
        if (stored := Prefix.unpack(inputs)) is not None:
            return stored
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.options.frozen_vlm):
            return self.encode_prefix(inputs)

    def encode(self, inputs: Inputs) -> Features:
        prefix = self.context(inputs)
        state = inputs["state"]
        critics = []
        if self.options.value_on != "vlm":
            x = state.new_zeros(len(state), self.horizon, self.noise_dim)
            critics.append(self._velocity(prefix, state, x, state.new_ones(1))[1].mean(1))
        if self.options.value_on != "expert":
            critics.append(
                (prefix.states * prefix.mask[..., None]).sum(1) / prefix.mask.sum(1, keepdim=True)
            )
        critic = torch.cat(critics, dim=1)
        return Features(prefix, state, critic.detach() if self.options.detach_critic else critic)

    def pooled(self, features: Features) -> Tensor:
        return features.critic.float()

    def pack(self, features: Features) -> Tensors:
        return features.prefix.pack(states=False) | {
            "state": features.state,
            "critic": features.critic,
        }

    def unpack(self, tensors: Tensors) -> Features:
        prefix = Prefix.unpack(tensors)
        assert prefix is not None
        return Features(prefix, tensors["state"], tensors["critic"])

    def guided(self, features: Features, without: Features, scale: float) -> Features:
        return replace(features, without=without.prefix, scale=scale)

    def act(self, features: Features, noise: Noise | None, temperature: float) -> ActionSample:
        return self._denoise(features, noise, temperature, self._flow(features))

    def act_with_prefix(
        self,
        features: Features,
        noise: Noise | None,
        temperature: float,
        committed: Tensor,
        frozen: int,
    ) -> ActionSample:
        """See ``RealTimeChunking``. The log-probability is that of the guided or conditioned chain.
        Of a longer delay than the simulated ones, the model is given the actions of the longest."""
        count = committed.shape[1]
        prefix = self._model_units(committed, features)
        target = F.pad(prefix, (0, self.noise_dim - prefix.shape[-1], 0, self.horizon - count))
        if self.simulated_delay:
            flow_onto = real_time.conditioned_velocity(
                self._flow(features), target, min(frozen, self.simulated_delay)
            )
        else:
            real = torch.arange(self.noise_dim) < prefix.shape[-1]
            weights = real_time.prefix_weights(count, frozen, self.horizon)[:, None] * real
            flow_onto = real_time.guided_velocity(
                self._flow(features), target, weights.to(target.device)
            )
        sample = self._denoise(features, noise, temperature, flow_onto)
        return replace(
            sample, actions=torch.cat([committed[:, :frozen], sample.actions[:, frozen:]], dim=1)
        )

    def _flow(self, features: Features) -> Velocity:
        def guided(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            velocity, states = self._velocity(features.prefix, features.state, x, time)
            if features.without is None:
                return velocity, states
            plain, _ = self._velocity(features.without, features.state, x, time)
            return plain + features.scale * (velocity - plain), states

        return guided

    def _denoise(
        self, features: Features, noise: Noise | None, temperature: float, velocity_at: Velocity
    ) -> ActionSample:
        steps = self.options.denoise_steps
        batch = len(features.state)
        shape = (self.horizon, self.noise_dim)
        device = features.state.device
        random = (
            noise if temperature > 0 else None
        )  # greedily there are only Euler steps, as in openpi
        draws = (
            torch.zeros(batch, steps + 1, *shape, device=device)
            if noise is None
            else noise.normal(steps + 1, *shape)
        )
        index = (
            torch.full((batch,), steps - 1, device=device)
            if random is None
            else (random.uniform(1)[:, 0] * steps).long()
        )
        chain = [draws[:, 0]]
        log_prob = (
            features.state.new_zeros(batch, *shape)
            if self._one_step
            else flow.standard_log_prob(chain[0])
        )
        for i, time in enumerate(flow.times(steps, device)):
            x = chain[-1]
            velocity, states = velocity_at(x, time)
            mean, std = self._transition(x, velocity, states, time.expand(batch), temperature)
            moved = (
                flow.ode_step(x, velocity, steps)
                if random is None
                else mean + std * draws[:, i + 1]
            )
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
            latent = {
                "before": latent["chain"][rows, index],
                "after": latent["chain"][rows, index + 1],
                "index": index,
            }
        return ActionSample(
            self._actions(chain[-1], features),
            latent,
            self._executed(log_prob / self._draws),
            self.value(features),
        )

    def act_from_noise(self, features: Features, noise: Tensor) -> Tensor:
        """See ``Policy``. Uses the same noise for every action of the horizon."""
        x = noise[:, None].expand(-1, self.horizon, -1)
        steps = self.options.denoise_steps
        velocity_at = self._flow(features)
        for time in flow.times(steps, x.device):
            x = flow.ode_step(x, velocity_at(x, time)[0], steps)
        return self._actions(x, features)

    def _actions(self, x: Tensor, features: Features) -> Tensor:
        """Convert denoised ``x`` ``[B, H, A]`` to actions in environment units ``[B, C, D]``."""
        actions = absolute(
            self.action_normalizer.inverse(self._executed(x)),
            self._robot_state(features),
            self.delta,
        )
        return to_environment(actions, self._gripper)

    def _model_units(self, actions: Tensor, features: Features) -> Tensor:
        """Invert ``_actions``."""
        dataset = to_dataset(actions, self._gripper)
        return self.action_normalizer(relative(dataset, self._robot_state(features), self.delta))

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        features = self.encode(inputs)
        times = flow.times(self.options.denoise_steps, features.state.device)
        if self._one_step:
            log_prob, entropy = self._evaluate(
                features, latent["before"], latent["after"], times[latent["index"]], temperature
            )
        else:
            chain = latent["chain"]
            log_prob = flow.standard_log_prob(chain[:, 0])
            entropy = flow.gaussian_entropy(torch.ones_like(chain[:, 0]))
            for i, time in enumerate(times):
                parts = self._evaluate(
                    features, chain[:, i], chain[:, i + 1], time.expand(len(chain)), temperature
                )
                log_prob, entropy = log_prob + parts[0], entropy + parts[1]
        log_prob, entropy = (self._executed(tensor / self._draws) for tensor in (log_prob, entropy))
        return ActionEval(log_prob, entropy, self.value(features))

    def reference_actions(self, inputs: Inputs) -> Tensor | None:
        """Denoise greedily, encoding images and text again at each step."""
        return self.act(_Recomputed(self, inputs), None, 0.0).actions

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        """Return the conditional flow-matching loss."""
        features = self.encode(inputs)
        target = self._model_units(actions, features)
        target = F.pad(target, (0, self.noise_dim - target.shape[2]))
        time = flow.training_times(noise.uniform(1)[:, 0])
        if self.simulated_delay:
            time = real_time.simulated_times(
                time, noise.uniform(1)[:, 0], self.simulated_delay, self.horizon
            )
        x, velocity = flow.interpolate(target, noise.normal(*target.shape[1:]), time)
        prediction, _ = self._velocity(features.prefix, features.state, x, time)
        count = self.noise_dim if self.padding_learns else self.spec.action_dim
        return flow.matching_loss(prediction[..., :count], velocity[..., :count], time)

    @property
    def _gripper(self) -> int:
        return GRIPPERS[self.options.gripper or "raw"]

    @property
    def _one_step(self) -> bool:
        return self.options.sampler == "flow_sde"

    @property
    def _draws(self) -> int:
        """By what the sums over a chain are divided."""
        return (
            self.options.denoise_steps + 1
            if self.options.chain_log_prob == "mean" and not self._one_step
            else 1
        )

    def _executed(self, chunk: Tensor) -> Tensor:
        return chunk[:, : self.spec.chunk, : self.spec.action_dim]

    def _robot_state(self, features: Features) -> Tensor:
        """Return the state ``[B, S]`` in the robot's units."""
        return self.state_normalizer.inverse(features.state[:, : self.spec.state_dim])

    def _velocity(
        self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.backbone.velocity(
            prefix, state, x, time if time.ndim == 2 else time.expand(len(x))
        )

    def _transition(
        self, x: Tensor, velocity: Tensor, states: Tensor, time: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of a stochastic step; temperature 0 counts as 1."""
        if self.noise_head is not None:
            return flow.ode_step(x, velocity, self.options.denoise_steps), self.noise_head(
                states
            ) * (temperature or 1.0)
        level = self.options.noise_level * (temperature or 1.0)
        mean, std = flow.sde_step(x, velocity, time, self.options.denoise_steps, level)
        return mean, std.expand_as(mean)

    def _evaluate(
        self, features: Features, before: Tensor, after: Tensor, time: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        velocity, states = self._velocity(features.prefix, features.state, before, time)
        mean, std = self._transition(before, velocity, states, time, temperature)
        return flow.gaussian_log_prob(after, mean, std), flow.gaussian_entropy(std)


class _Recomputed(Features):
    """Features whose prefix is computed again at every access."""

    def __init__(self, policy: FlowPolicy, inputs: Inputs) -> None:
        features = policy.encode(inputs)
        self.state = features.state
        self.critic = features.critic
        self._again = lambda: policy.context(inputs)

    @property
    def prefix(self) -> Prefix:  # type: ignore[override]
        return self._again()

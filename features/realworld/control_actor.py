"""Run a policy for a control loop: answer each inference request with an action chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from rlinf_vla.algorithms.feature_policy import ACTOR_OUTPUT, FeaturePolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.core.devices import computes_on_cuda, synchronise
from rlinf_vla.core.protocols import Policy, RealTimeChunking
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Tensors
from rlinf_vla.features.realworld.action_space import ActionSpace, JointSpace
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.inference import Chunk, Committed, Request
from rlinf_vla.rollout.actor import Actor, Settings


class ControlActor(Actor):
    """An actor for one robot that measures the time of prepare, encode and act.

    With CUDA graphs, ``encode`` and ``act`` are one launch, and ``act`` is the time of both.
    Several threads may call it: features are fetched at the same time, and used one after another.
    """

    def __init__(self, policy: Policy, settings: Settings, clock: Clock) -> None:
        super().__init__(policy, settings)
        self._clock = clock
        self._convention = ArmConvention(policy.spec.convention)
        self._chooses_noise = isinstance(policy, FeaturePolicy) and policy.noise_bound is not None
        policy.begin_control()
        self._acts = threading.Lock()
        self._thread = threading.local()
        zero = torch.zeros(1, dtype=torch.int64)
        self.episode = Episodes(zero, zero, zero)
        """The current episode, ``[1]``; it keys the noise together with the observation's tick."""

    def __call__(self, request: Request) -> Chunk:
        began = self._clock.now()
        self._thread.encoded = None
        inputs = self.prepare(self._convention.seen(request.seen.observation(request.instruction)))
        prepared = self._clock.now()
        tick = torch.tensor([request.tick])
        sample = (
            self._act_onto(inputs, tick, request.committed)
            if request.committed
            else self.act(inputs, self.episode, tick)
        )
        actions = self._convention.to_arm(
            sample.actions[0].float().cpu().numpy()
        )  # synchronises with the GPU
        chosen = (
            sample.latent[ACTOR_OUTPUT][0].float().cpu().numpy() if self._chooses_noise else None
        )
        ended = self._clock.now()
        encoded = self._thread.encoded
        sections = {"prepare": prepared - began, "act": ended - (encoded or prepared)}
        if encoded is not None:
            sections["encode"] = encoded - prepared
        return Chunk(request, actions, sections, chosen)

    def _act_onto(self, inputs: Inputs, tick: torch.Tensor, committed: Committed) -> ActionSample:
        actions = self._convention.to_policy(
            torch.from_numpy(np.ascontiguousarray(committed.actions))
        )[None]
        return self.act_onto(inputs, self.episode, tick, actions, committed.frozen)

    def _features(self, inputs: Tensors) -> Any:
        features = super()._features(inputs)
        if not (computes_on_cuda(self.device) and torch.cuda.is_current_stream_capturing()):
            synchronise(self.device)
        self._thread.encoded = self._clock.now()
        return features

    def _computed(self, function: Callable[[Tensors], Tensors], block: Tensors) -> Tensors:
        with self._acts:
            return super()._computed(function, block)


def require_fit(
    policy: Policy, space: ActionSpace, cameras: Collection[str], config: ControlConfig
) -> None:
    """Raises UserError if ``policy`` cannot drive a robot of this action space and cameras."""
    spec = policy.spec
    sizes = " or ".join(map(str, space.sizes))
    if spec.action_dim not in space.sizes or spec.state_dim not in (0, space.state_size):
        raise UserError(
            f"the policy has {spec.action_dim} action and {spec.state_dim} state dimensions; the robot has {sizes}, and {space.state_size} "
            "(docs/conventions.md): choose another model.checkpoint"
        )
    if isinstance(space, JointSpace) and (
        spec.convention.tool or spec.convention.gripper or spec.convention.state
    ):
        raise UserError(
            "the policy's actions move a tool, the robot's move joints: choose another model.checkpoint"
        )
    if blind := spec.images.keys() - cameras:
        raise UserError(
            f"the policy needs image {min(blind)!r}, not one of {sorted(cameras)}: set robot.cameras or model.options.images"
        )
    if (count := config.requests_in_flight) > 1 and policy.elsewhere is None:
        raise UserError(
            f"control.requests_in_flight={count} is for a head whose backbone is elsewhere (rollout.backbone.url): set it to 1"
        )
    if config.real_time_chunking and not isinstance(policy, RealTimeChunking):
        raise UserError(
            f"control.real_time_chunking=true: model={policy.name} is not a flow policy: set it to false, or use model=pi0"
        )

"""Change actions in a simulator as an arm's safety filter does, and count the changes as a cost."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LimitsConfig
from rlinf_vla.core.protocols import VectorEnv, WrappedEnv
from rlinf_vla.core.types import Observation, StepResult

SLACK = 1e-6
"""What counts as no change, in units of a full action: a limited action is not changed again."""


def limited(
    actions: Tensor, tool: Tensor, config: LimitsConfig, unit_m: float
) -> tuple[Tensor, Tensor]:
    """Return permitted actions and how many limits changed each: float32 ``[B, C, D]``, ``[B, C]``.

    ``tool``: position before the first action, float32 ``[B, 3]`` in metres. Each action is taken
    to move its target by ``unit_m`` times the translation. As in ``robots/safety.py``, the target
    is first moved to the wall of the workspace, then the way there is shortened.
    """
    result = actions.clone()
    count = torch.zeros(actions.shape[:2], device=actions.device)
    box = torch.tensor(list(config.workspace), device=actions.device).view(-1, 3)
    for step in range(actions.shape[1]):
        full_move = move = actions[:, step, :3].clamp(-1, 1)  # as simulators do
        if len(box):
            inside = (tool + unit_m * move).clamp(box[0], box[1])
            move, changed = _where_changed(((inside - tool) / unit_m).clamp(-1, 1), move)
            count[:, step] += changed
        if config.translation is not None:
            move, changed = _where_changed(_shortened(move, config.translation), move)
            count[:, step] += changed
        if config.rotation is not None:
            turn = actions[:, step, 3:6].clamp(-1, 1)
            turned, changed = _where_changed(_shortened(turn, config.rotation), turn)
            count[:, step] += changed
            result[:, step, 3:6] = torch.where(changed[:, None], turned, actions[:, step, 3:6])
        result[:, step, :3] = torch.where(
            (move != full_move).any(1, keepdim=True), move, actions[:, step, :3]
        )
        tool = tool + unit_m * move if len(box) else tool
    return result, count


def _shortened(vectors: Tensor, longest: float) -> Tensor:
    length = vectors.norm(dim=1, keepdim=True)
    return vectors * (longest / length.clamp(min=longest))


def _where_changed(after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``after`` where it differs by more than rounding, else ``before``; and where it does,
    bool ``[B]``."""
    changed = ((after - before).abs() > SLACK).any(1)
    return torch.where(changed[:, None], after, before), changed


class LimitedEnv(WrappedEnv):
    """Wrap ``env`` with limits: ``StepResult.cost`` counts those that changed an action."""

    def __init__(self, env: VectorEnv, config: LimitsConfig) -> None:
        """Raises UserError if the actions of ``env`` do not move a tool, or do not rotate it."""
        motion = env.spec.motion
        if motion is None:
            raise UserError(
                "rollout.limits: actions of this environment do not move a tool, so nothing limits them: leave it out"
            )
        if config.rotation is not None and env.spec.action_dim < 7:
            raise UserError(
                f"rollout.limits.rotation: this environment's {env.spec.action_dim} action numbers do not rotate: leave it out"
            )
        if config.workspace and (env.spec.state_dim < 3 or env.spec.tool is None):
            raise UserError(
                "rollout.limits.workspace: this environment's states do not begin with the tool's position: leave it out"
            )
        super().__init__(env)
        self._config = config
        self._unit_m = motion.translation_m

    _seen: Observation
    _cost: Tensor

    def reset_wait(self) -> Observation:
        self._seen = self._env.reset_wait()
        return self._seen

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        permitted, self._cost = limited(
            actions, self._seen.state[:, :3].to(actions.device), self._config, self._unit_m
        )
        self._env.step_async(permitted, skip_ended)

    def step_wait(self) -> StepResult:
        result = self._env.step_wait()
        self._seen = result.observation
        return replace(result, cost=self._cost.to(result.valid.device) * result.valid)

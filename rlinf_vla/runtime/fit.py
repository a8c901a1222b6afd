"""Refuse a policy that its environment would misunderstand, before the first episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import isclose
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.observation_features import FEATURES, camera
from rlinf_vla.core.protocols import EnvSpec, Policy, PolicySpec, ToolUnits, VectorEnv

GRIPPERS = {
    "open_positive": "+1 opens, -1 closes",
    "close_positive": "+1 closes, -1 opens",
    "zero_to_one": "0 closes, 1 opens",
}
ANOTHER = (
    "choose another model.checkpoint (or model.options.card=none, if its card describes it wrongly)"
)


def connect(policy: Policy, groups: Sequence[VectorEnv]) -> None:
    """Prepare ``groups``, which are alike, and ``policy`` for each other.

    Raises UserError if they do not fit.
    """
    check_fit(policy, groups[0].spec)
    for group in groups:
        group.add_jpeg(list(policy.spec.images) if policy.spec.convention.jpeg else [])


def check_fit(policy: Policy, env: EnvSpec) -> None:
    """Make room for the environments' prompts, and raise UserError if the policy does not fit them.

    Sizes must agree, and the known parts of their conventions.
    """
    spec = policy.spec
    if spec.action_dim != env.action_dim:
        raise UserError(
            f"the policy's actions have {spec.action_dim} dimensions, the environment's {env.action_dim}: "
            "choose another env.control_mode or model.checkpoint"
        )
    if spec.state_dim not in (0, env.state_dim):
        raise UserError(
            f"the policy's state has {spec.state_dim} numbers, the environment's {env.state_dim}: choose another model.checkpoint"
        )
    for name, size in spec.images.items():
        if name not in env.images:
            image_names = sorted(env.images) or "none"
            raise UserError(
                f"the policy needs image {name!r}, the environment has {image_names}: set env.cameras or model.options.image"
            )
        if camera(name) is FEATURES["depth"] and not policy.sees_depth:
            raise UserError(
                f"image {name!r} shows distances, which model={policy.name} cannot read: leave it out"
            )
        height, width = env.images[name]
        if spec.bars is None and (height < size[0] or width < size[1]):
            raise UserError(
                f"the policy's image {name!r} is {size[0]}x{size[1]} pixels, the environment renders {height}x{width}: "
                f"set env.image_size={size[0]}"
            )
    check_meaning(spec, env)
    check_suite(spec, env)
    policy.fit_instructions(env.instructions)


def check_meaning(policy: PolicySpec, env: EnvSpec) -> None:
    """Raise UserError if the known parts of both conventions differ.

    A difference in state or images would not be noticed: their sizes are the same.
    """
    ours, theirs = policy.convention, env.convention
    if (
        ours.tool is not None
        and theirs.tool is not None
        and not _same_units(ours.tool, theirs.tool, env.action_dim)
    ):
        raise UserError(
            f"an action of 1 means {_units(ours.tool)} to the policy, {_units(theirs.tool)} to the environment: "
            f"choose another env.control_mode, or {ANOTHER}"
        )
    for part, option in (("state", "env.state"), ("images", "env.flip")):
        policy_value, env_value = getattr(ours, part), getattr(theirs, part)
        if (
            None not in (policy_value, env_value)
            and policy_value != env_value
            and (part == "images" or policy.state_dim)
        ):
            raise UserError(
                f"the policy needs {part} as {policy_value}, the environment gives {env_value}: {_change(policy, option, policy_value)}"
            )
    if None not in (ours.gripper, theirs.gripper) and ours.gripper != theirs.gripper:
        raise UserError(
            f"the policy's gripper action means: {GRIPPERS[str(ours.gripper)]}; the environment's: {GRIPPERS[str(theirs.gripper)]}: "
            f"set model.options.gripper={theirs.gripper}, or {_change(policy, 'env.gripper', None)}"
        )


def check_suite(policy: PolicySpec, env: EnvSpec) -> None:
    """Raise UserError if the policy is of a suite of LIBERO, and the environment of another one.

    As the official evaluations, which look for the suite's name among the statistics.
    """
    others = [
        task
        for task in env.tasks
        if task.startswith("libero_") and not task.startswith(f"{policy.suite}")
    ]
    if policy.suite is not None and others:
        raise UserError(
            f"the policy was trained on {policy.suite} alone, env.suite has {others[0]}: set env.suite={policy.suite}, "
            "or name the dataset in model.options.unnorm_key to play it there"
        )


def _change(policy: PolicySpec, option: str, value: str | None) -> str:
    if "convention" in policy.env:
        return f"with env=libero set env.convention={policy.env['convention']}"
    return f"set {option}={value}" if value is not None else f"change {option}"


def _same_units(ours: ToolUnits, theirs: ToolUnits, action_dim: int) -> bool:
    """Rotations count only where the action has them."""
    pairs = [(ours.translation_m, theirs.translation_m)]
    if action_dim > 4:
        pairs.append((ours.rotation_rad, theirs.rotation_rad))
    return all(isclose(*pair, rel_tol=1e-3) for pair in pairs)


def _units(tool: ToolUnits) -> str:
    return f"{tool.translation_m:g} m and {tool.rotation_rad:g} rad"


def remarks(policy: PolicySpec, env: EnvSpec) -> list[str]:
    """Return lines on the policy for the user: its own, and one per image that it resizes."""
    lines = list(policy.remarks)
    for name, (height, width) in policy.images.items():
        if (seen := env.images[name]) != (height, width):
            lines.append(
                f"image {name}: rendered at {seen[0]}x{seen[1]}, resized once, to the policy's {height}x{width}"
            )
    return lines


def fitted(config: Any, policy: PolicySpec) -> Any:
    """Return the ``env`` node with the policy's values of the keys that it has and leaves empty.

    A list is empty, too: ``cameras: []`` suits only players that see nothing.
    """
    names = {field.name for field in fields(config)}
    return replace(
        config,
        **{
            key: value
            for key, value in policy.env.items()
            if key in names and getattr(config, key) in (None, [])
        },
    )

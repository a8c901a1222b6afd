"""Build policy, environments, rewards, algorithm, trainer and what workers build from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.cluster import CUDA
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import (
    NO_ALGORITHM,
    NO_AUGMENTATION,
    OFF_POLICY,
    ON_POLICY,
    SUPERVISED,
    DeadlineConfig,
    LimitsConfig,
    Recipe,
    RewardConfig,
)
from rlinf_vla.core import plugins
from rlinf_vla.core.devices import accelerator, set_fused_kernels, set_tf32
from rlinf_vla.core.origin import Origin
from rlinf_vla.core.protocols import (
    ChecksOptions,
    EnvSpec,
    HasBackends,
    HasOutline,
    Learner,
    Policy,
    RewardModel,
    VectorEnv,
)
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.faults import GuardedEnv
from rlinf_vla.runtime.fit import check_fit, connect, fitted
from rlinf_vla.runtime.recipes import asset_path, located, teacher_of
from rlinf_vla.runtime.workers.base import Builders
from rlinf_vla.runtime.workers.trainer import TrainerWorker
from rlinf_vla.telemetry.metrics import require_trackers
from rlinf_vla.training.checkpoint import begin_digests, load_checkpoint, load_heads
from rlinf_vla.training.lora import add_lora
from rlinf_vla.training.trainer import Trainer

if TYPE_CHECKING:
    from rlinf_vla.algorithms.base import Algorithm
    from rlinf_vla.rollout.reward_shaping import RewardShaper


def build_algorithm(recipe: Recipe) -> Any:
    """Return the recipe's ``Algorithm``. Raises UserError if its settings are wrong."""
    plugin = plugins.choose("algorithm", recipe.algorithm.name, plugins.algorithms())
    return plugin(recipe.algorithm, recipe.rollout.temperature, recipe.iterations)


def build_policy(recipe: Recipe, lora: bool = True) -> Policy:
    """Return the recipe's policy on its device, with fresh adapters and any exported critic.

    One that does not learn has neither, and is on no device. With ``rollout.backbone.url`` it is
    only the head. Random weights depend only on the
    recipe's seed. Raises UserError if the device is not there.
    """
    model = model_of(recipe)
    if not model.learns:
        return outline(recipe)
    device = _device(recipe)
    if recipe.rollout.backbone.url is not None:
        from rlinf_vla.runtime import hooks

        head = hooks.backbones().open_head(
            recipe, model, asset_path(recipe.model.checkpoint), device
        )
        load_heads(head, asset_path(recipe.model.checkpoint))
        return head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        directory = asset_path(recipe.model.checkpoint)
        policy = model.load(directory, recipe.model.options)
    if lora:
        add_lora(policy, located(recipe.model.lora), recipe.seed)
    base = policy
    if recipe.algorithm.name != NO_ALGORITHM:
        policy = build_algorithm(recipe).wrap(policy, recipe.seed)
    load_heads(policy, directory, base)
    if recipe.cluster.gradient_checkpointing:
        from rlinf_vla.training.gradient_checkpointing import checkpoint_blocks

        checkpoint_blocks(policy)
    policy.origin = Origin(directory)
    return policy.to(device)


def outline(recipe: Recipe) -> Policy:
    """Return the recipe's policy without its weights, which may take minutes to load."""
    model = model_of(recipe)
    name = recipe.model.name
    if not model.learns and recipe.model.checkpoint != NO_MODEL:
        raise UserError(
            f"model.checkpoint={recipe.model.checkpoint}: model={name} reads none, its server does: set model.checkpoint=none"
        )
    with torch.random.fork_rng(devices=[]):
        policy = model.without_weights(description(recipe), recipe.model.options)
    return policy


def description(recipe: Recipe) -> Path:
    """Return the directory of the recipe's checkpoint; one of the Hub without its weights, if the
    model can be built from its other files."""
    is_described = getattr(model_of(recipe), "is_described", lambda directory: False)
    directory = asset_path(recipe.model.checkpoint, weights=False)
    return directory if is_described(directory) else asset_path(recipe.model.checkpoint)


def model_of(recipe: Recipe) -> type[Policy]:
    """Return the plug-in of the recipe's model. Raises UserError if it is not installed."""
    plugin: type[Policy] = plugins.choose("model", recipe.model.name, plugins.models())
    return plugin


def _device(recipe: Recipe) -> str:
    """Return the recipe's device, ready in this process. Raises UserError if it is not there."""
    device = recipe.cluster.torch_device
    if recipe.cluster.on_accelerator:
        accelerator(device)
    set_tf32(recipe.cluster.tf32 and device == CUDA)
    set_fused_kernels(recipe.cluster.fused_kernels)
    return device


def require_device(recipe: Recipe) -> None:
    """Raise UserError if PyTorch does not have the device on which the recipe's model computes."""
    if model_of(recipe).learns:
        _device(recipe)


def require_training(recipe: Recipe) -> None:
    """Raise UserError without an algorithm, a model that learns, or the library of a tracker."""
    if recipe.algorithm.name == NO_ALGORITHM:
        raise UserError(
            f"recipe={recipe.name} trains nothing (algorithm={NO_ALGORITHM}): rlinf-vla eval recipe={recipe.name}"
        )
    require_whole(recipe, "nothing to train")
    if recipe.algorithm.trains_reward and recipe.reward.name is None:
        raise UserError(
            f"algorithm={recipe.algorithm.name} trains the network of a reward: set reward=classifier"
        )
    if recipe.reward.name is not None and not recipe.algorithm.trains_reward:
        reward = plugins.choose("reward", recipe.reward.name, plugins.rewards())
        if isinstance(reward, ChecksOptions):
            reward.check(recipe.reward.options)
    require_trackers(recipe.tracker)


def require_trainable(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raise UserError if the recipe's policy cannot be trained with its augmentation, its teacher,
    its datasets or its algorithm.

    Only if one of these asks something of it a policy is built, without weights.
    """
    augments = getattr(recipe.algorithm, "augmentation", NO_AUGMENTATION) != NO_AUGMENTATION
    recorded = _recorded(recipe)
    if augments or recorded or teacher_of(recipe) is not None or algorithm.asks_policy:
        policy = outline(recipe)
        require_augmentation(recipe, policy)
        algorithm.require(policy)
        if recorded is not None:
            from rlinf_vla.data.dataset_source import open_mixture

            open_mixture(policy, recorded)
        from rlinf_vla.runtime.teacher import require_teacher

        require_teacher(recipe, policy)


def _recorded(recipe: Recipe) -> DemonstrationConfig | None:
    """Return the demonstrations that the recipe's policy imitates, if they are datasets."""
    demonstrations = getattr(recipe.algorithm, "demonstrations", None)
    if recipe.algorithm.trains_reward or not isinstance(demonstrations, DemonstrationConfig):
        return None
    return demonstrations if demonstrations.datasets else None


def require_dataset(recipe: Recipe) -> None:
    """Raise UserError if the dataset of an off-policy algorithm is unreadable or has no rewards."""
    path = getattr(recipe.algorithm, "dataset", None)
    if path is not None:
        from rlinf_vla.data.dataset_source import require_rewards

        require_rewards(path)


def require_augmentation(recipe: Recipe, policy: Policy) -> None:
    """Raise UserError if the recipe augments images in a way that the policy does not support."""
    wanted = getattr(recipe.algorithm, "augmentation", NO_AUGMENTATION)
    if wanted != NO_AUGMENTATION and policy.augmentation_unsupported is not None:
        raise UserError(
            f"algorithm.augmentation={wanted}: {policy.name} {policy.augmentation_unsupported}"
        )


def require_weights(recipe: Recipe, purpose: str) -> None:
    """Raise UserError if the recipe's model does not learn. ``purpose`` follows "there is"."""
    if (name := recipe.model.name) != NO_MODEL and not model_of(recipe).learns:
        raise UserError(
            f"model={name}: its weights are on a server, there is {purpose}: choose the model itself, with its checkpoint"
        )


def require_whole(recipe: Recipe, purpose: str) -> None:
    """Raise UserError if the weights of the recipe's policy, or of its backbone, are on a server.

    ``purpose``: as of ``require_weights``.
    """
    require_weights(recipe, purpose)
    if (url := recipe.rollout.backbone.url) is not None:
        raise UserError(
            f"rollout.backbone.url={url}: the backbone is on a server, there is {purpose}: leave it and rollout.split out"
        )


def build_head(recipe: Recipe) -> Policy:
    """Return the action head of the recipe's policy, without weights (``rollout.split=head``)."""
    from rlinf_vla.rollout.split import require_separable, strip_to_head

    require_separable(model_of(recipe))
    _device(recipe)
    policy = outline(recipe)
    with torch.device("meta"):
        add_lora(policy, located(recipe.model.lora), recipe.seed)
    strip_to_head(policy)
    return policy


def build_reward_model(recipe: Recipe) -> RewardModel:
    """Return the reward's network; random weights depend only on the recipe's seed.

    Raises UserError.
    """
    assert recipe.reward.name is not None  # require_training
    plugin = plugins.choose("reward", recipe.reward.name, plugins.rewards())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return plugin.learner(recipe.reward.options).to(_device(recipe))


def build_trainer(recipe: Recipe, network: Learner) -> Trainer:
    """Return the trainer of the recipe's algorithm, with a reference policy if ``kl_coef`` > 0."""
    algorithm = build_algorithm(recipe)
    trainer = Trainer(network, algorithm, recipe.cluster.rows, algorithm.keeps_reference)
    if teacher_of(recipe) is not None:
        from rlinf_vla.runtime.teacher import build_teacher

        assert isinstance(network, Policy)
        trainer.teacher = build_teacher(recipe, network)
    return trainer


def build_initial(recipe: Recipe) -> Learner:
    """Return the network that the recipe trains, as at the beginning of a run. Raises UserError."""
    network: Learner = (
        build_reward_model(recipe) if recipe.algorithm.trains_reward else build_policy(recipe)
    )
    if recipe.checkpoint is not None:
        load_checkpoint(Path(recipe.checkpoint).expanduser(), network)
    return network


def build_learner(
    recipe: Recipe, checkpoint: Path | None, say: Callable[[str], None]
) -> tuple[Learner, Trainer, dict[str, Any]]:
    """Return the network, its trainer, and the state of ``checkpoint``, from which both resume.

    Raises UserError.
    """
    network = build_initial(recipe)
    trainer = build_trainer(recipe, network)
    begin_digests(network)
    state = load_checkpoint(checkpoint, network, trainer) if checkpoint is not None else {}
    say(
        size_of(
            recipe,
            sum(p.numel() for p in network.parameters()),
            sum(p.numel() for p in trainer.parameters.values()),
        )
    )
    return network, trainer, state


def size_of(recipe: Recipe, weights: int, trained: int) -> str:
    """Return a line on the network that the recipe trains."""
    name = (
        f"reward {recipe.reward.name}"
        if recipe.algorithm.trains_reward
        else f"policy {recipe.model.name}"
    )
    return f"{name}: {weights:,} weights, {trained:,} of them trained"


def needs_environments(recipe: Recipe) -> bool:
    """Return false for supervised training on a dataset, unless its policy is evaluated."""
    config = recipe.algorithm
    evaluates = config.acts and recipe.evaluation.before_and_after
    return config.family != SUPERVISED or not config.demonstrations.datasets or evaluates


def require_fit(recipe: Recipe, policy: Policy) -> None:
    """Raise UserError if the policy does not fit the recipe's environments, as far as that is known
    before a simulator starts."""
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    env_spec = (
        plugin.outline(fitted(recipe.env, policy.spec)) if isinstance(plugin, HasOutline) else None
    )
    if env_spec is not None:
        check_fit(policy, env_spec)


@contextmanager
def open_envs(
    recipe: Recipe, policy: Policy | None, groups: int, number: int | None = None
) -> Iterator[Sequence[VectorEnv]]:
    """Open the recipe's environments in ``groups`` groups and check that the policy fits them.

    Keys of ``env`` that are null get the values that the policy needs. It may be the ``outline``.
    ``number``: open so many of them, simulated on the CPU or the GPU as all would be.
    """
    config = recipe.env if policy is None else fitted(recipe.env, policy.spec)
    if policy is not None:
        require_fit(recipe, policy)
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    if number is not None:
        if isinstance(plugin, HasBackends):
            config = replace(config, backend=plugin.backend(config))
        config = replace(config, num_envs=number)
    envs = plugin.create(config, groups)
    try:
        if policy is not None:
            connect(policy, envs)
        yield [GuardedEnv(env) for env in envs]
    finally:
        for env in envs:
            env.close()


def actor_settings(recipe: Recipe, temperature: float) -> Settings:
    """Return the settings of actors that sample at ``temperature``."""
    rollout = recipe.rollout
    always = getattr(recipe.algorithm, "bootstrap", None) == "always"
    return Settings(
        recipe.seed,
        temperature,
        rollout.batch_size,
        recipe.cluster.cuda_graphs,
        rollout.rounded_weights,
        always,
    )


def new_directory(output: str) -> Path:
    """Return a verb's output directory. Raises UserError if it exists and is not empty."""
    path = Path(output).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"output={path} is not empty: choose another directory, or empty this one")
    return path


def relative(path: Path) -> Path:
    """Return the path relative to the current directory if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def missing_simulator(recipe: Recipe) -> str | None:
    """Return a line on the recipe's simulator if it is not installed, neither here nor for
    ``env.python``; None if it is there or not known to be missing."""
    diagnoses = plugins.choose("env", recipe.env.name, plugins.envs()).diagnose()[:1]
    if not diagnoses or diagnoses[0].ok or getattr(recipe.env, "python", None) is not None:
        return None
    return f"env={recipe.env.name}: {diagnoses[0].detail.removeprefix('optional: ')}: {diagnoses[0].fix}"


def rewarded(recipe: Recipe, groups: Sequence[VectorEnv], chunk: int) -> Sequence[VectorEnv]:
    """Return the environments with the recipe's training reward, and its limits and deadline for a
    policy with chunks of ``chunk`` actions. Raises UserError."""
    if recipe.reward == RewardConfig():
        return timed(recipe, groups, chunk)
    from rlinf_vla.rollout.reward_shaping import RewardedEnv

    reward_shaper = build_reward_shaper(recipe, groups[0].spec)
    scored = [GuardedEnv(RewardedEnv(env, reward_shaper)) for env in _limited(recipe, groups)]
    return _delayed(recipe, scored, chunk)


def timed(recipe: Recipe, groups: Sequence[VectorEnv], chunk: int) -> Sequence[VectorEnv]:
    """Return the environments with the recipe's limits and deadline. Raises UserError."""
    return _delayed(recipe, _limited(recipe, groups), chunk)


def _limited(recipe: Recipe, groups: Sequence[VectorEnv]) -> Sequence[VectorEnv]:
    if recipe.rollout.limits == LimitsConfig():
        return groups
    from rlinf_vla.rollout.safety_limits import LimitedEnv

    return [LimitedEnv(env, recipe.rollout.limits) for env in groups]


def _delayed(recipe: Recipe, groups: Sequence[VectorEnv], chunk: int) -> Sequence[VectorEnv]:
    config = recipe.rollout.deadline
    if config == DeadlineConfig():
        return groups
    from rlinf_vla.rollout.deadline import DeadlineEnv, deadline_of

    deadline = deadline_of(config, chunk, groups[0].spec.control_hz)
    return (
        groups if deadline is None else [DeadlineEnv(env, deadline, recipe.seed) for env in groups]
    )


def build_reward_shaper(recipe: Recipe, env: EnvSpec) -> RewardShaper:
    """Return the recipe's training reward."""
    from rlinf_vla.rollout.reward_shaping import RewardShaper, env_reward

    config = recipe.reward
    reward = env_reward
    if config.name is not None:
        plugin = plugins.choose("reward", config.name, plugins.rewards())
        reward = plugin.create(config.options, env, torch.device(_device(recipe)))
    return RewardShaper(reward, config.weight, config.env_weight, config.terminal)


def reward_workers(recipe: Recipe) -> int:
    """Return the number of reward workers; 0 if the recipe uses the environments' own reward."""
    on_policy = recipe.algorithm.family == ON_POLICY  # otherwise the rollout workers compute it
    return recipe.cluster.reward_workers if on_policy and recipe.reward != RewardConfig() else 0


def recipe_builders(recipe: Recipe, shards: int = 1, rewards_apart: bool = False) -> Builders:
    """Return the builder functions for workers of which each has one of ``shards`` equal parts of
    the environments."""
    return Builders(
        learner=partial(build_initial, recipe),
        head=partial(build_head, recipe),
        environments=partial(_environments, recipe, shards),
        trainer=partial(build_trainer, recipe),
        algorithm=partial(build_algorithm, recipe),
        reward_shaper=partial(build_reward_shaper, recipe),
        rewards_apart=rewards_apart,
        settings=actor_settings(recipe, recipe.rollout.temperature),
        cluster=recipe.cluster,
    )


def trainer_class(recipe: Recipe) -> type[TrainerWorker]:
    """Return the class of the recipe's trainer ranks."""
    if recipe.algorithm.family != OFF_POLICY:
        return TrainerWorker
    from rlinf_vla.runtime.workers.learner import LearnerWorker

    return LearnerWorker


@contextmanager
def _environments(
    recipe: Recipe, shards: int
) -> Iterator[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]:
    if not needs_environments(recipe):
        yield (), ()
        return
    groups_here = recipe.rollout.pipeline_depth
    if getattr(recipe.env, "processes", None) is not None:
        groups_in_all = recipe.cluster.rollout_workers * groups_here
        processes = max(1, recipe.env.processes // groups_in_all) * groups_here
        recipe = replace(recipe, env=replace(recipe.env, processes=processes))
    policy = None if recipe.algorithm.trains_reward else outline(recipe)
    with open_envs(recipe, policy, groups_here, recipe.env.num_envs // shards) as groups:
        if policy is None:
            yield groups, groups
            return
        # supervised training reads no reward, and one that it trains cannot be built yet
        chunk = policy.spec.chunk
        unrewarded = timed(recipe, groups, chunk)
        supervised = recipe.algorithm.family == SUPERVISED
        yield unrewarded, unrewarded if supervised else rewarded(recipe, groups, chunk)

"""A small recipe for every runtime: the linear policy with adapters in counter world, with PPO and GRPO."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig
from rlinf_vla.algorithms.on_policy import OnPolicy
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.config.cluster import ClusterConfig, NodeConfig
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.devices import threads
from rlinf_vla.core.protocols import EnvSpec, Policy, VectorEnv
from rlinf_vla.core.types import Observation, StepResult
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.reward_shaping import RewardedEnv, RewardShaper
from rlinf_vla.rollout.split import strip_to_head
from rlinf_vla.runtime.machines import Cluster
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.runtime.ray.open import launch_workers
from rlinf_vla.runtime.ray.places import Role, roles_of
from rlinf_vla.runtime.workers.base import Builders, WorkerInfo, fetched
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.lora import add_lora
from rlinf_vla.training.trainer import Trainer
from tests.runtime.here import on_policy_flow

NUM_ENVS = 8
SETTINGS = Settings(run_seed=3, temperature=1.0, batch_size=2)
ITERATIONS = 3
PPO_CONFIG = PPOConfig(
    horizon=12,
    epochs=2,
    minibatch_size=10,
    target_kl=None,
    kl_coef=0.05,
    entropy_coef=0.05,
    entropy_coef_end=0.0,
    learning_rate_end=0.2,
)
GRPO_CONFIG = GRPOConfig(episodes=24, group_size=4, groups_per_step=2, target_kl=None, resample=1)
CLUSTER = ClusterConfig(
    "toy",
    heartbeat_s=20.0,
    call_timeout_s=60.0,
    start_timeout_s=300.0,
    max_restarts=1000,
    rollout_threads=1,
    update_threads=1,
)


@dataclass(frozen=True)
class Recipe:
    config: PPOConfig | GRPOConfig
    rollout_workers: int = 1
    reference_workers: int = 0
    depth: int = 1
    streaming: bool = True
    shaped: bool = False
    reward_workers: int = 0
    feature_workers: int = 0
    offload: bool = False
    ranks: int = 1
    sharded: bool = False
    shards_per_worker: int = 1
    slow: bool = False
    """Rollouts take long."""
    one_slow: str | None = None
    """File that does not exist yet: rollouts of the worker that creates it take long."""
    placement: str | None = None
    """On fake GPUs; None: without GPUs."""
    weights: str = "store"
    adapters: bool = False
    """LoRA instead of all weights; workers then take seconds longer for imports."""


def shaping(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """Reads all inputs of a reward."""
    seen = (
        sum(
            image.float().mean(dim=(1, 2, 3))
            for image in (before.images["base"], result.observation.images["base"])
        )
        / 255
    )
    words = torch.tensor([float(len(line)) for line in result.observation.instruction])
    moved = (result.observation.state - before.state)[:, 0]
    return replace(
        result,
        reward=result.reward + 0.1 * (seen + moved + 0.01 * words)[:, None] * actions[..., 0],
    )


def reward_shaper(env: EnvSpec) -> RewardShaper:
    return RewardShaper(shaping, weight=0.5, env_weight=0.25)


def policy(recipe: Recipe) -> Policy:
    found = LinearPolicy(LinearOptions(chunk=2))
    if recipe.adapters:
        add_lora(found, LoraOptions(rank=4), seed=0)
    return found


def head(recipe: Recipe) -> Policy:
    found = policy(recipe)
    strip_to_head(found)
    return found


def algorithm(config: PPOConfig | GRPOConfig) -> OnPolicy:
    return (
        PPO(config, SETTINGS.temperature, ITERATIONS)
        if isinstance(config, PPOConfig)
        else GRPO(config, SETTINGS.temperature, ITERATIONS)
    )


def trainer(built: Policy) -> Trainer:
    return Trainer(built, OptimizerConfig(0.01, 0.01, 0.5), 7, keep_reference=True)


@contextmanager
def environments(
    count: int, recipe: Recipe
) -> Iterator[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]:
    found = groups(count, recipe.depth)
    slow = recipe.slow
    with suppress(FileExistsError, TypeError):
        Path(recipe.one_slow).touch(exist_ok=False)  # type: ignore[arg-type]
        slow = True
    if slow:
        for env in found:
            env.step_async = partial(_slowly, env.step_async)  # type: ignore[method-assign]
    yield found, rewarded(found, recipe)


def _slowly(
    step: Callable[[Tensor, bool], None], actions: Tensor, skip_ended: bool = False
) -> None:
    time.sleep(0.2)
    step(actions, skip_ended)


def rewarded(found: Sequence[VectorEnv], recipe: Recipe) -> Sequence[VectorEnv]:
    return [RewardedEnv(env, reward_shaper(env.spec)) for env in found] if recipe.shaped else found


def builders(recipe: Recipe) -> dict[str, Builders]:
    found = Builders(
        learner=partial(policy, recipe),
        head=partial(head, recipe),
        environments=partial(
            environments, NUM_ENVS // (recipe.rollout_workers * recipe.shards_per_worker), recipe
        ),
        trainer=trainer,
        algorithm=partial(algorithm, recipe.config),
        reward_shaper=reward_shaper,
        rewards_apart=recipe.reward_workers > 0,
        settings=SETTINGS,
        cluster=replace(CLUSTER, trainer_sharding="full" if recipe.sharded else "none"),
    )
    return dict.fromkeys(roles(recipe), found)


def in_process(recipe: Recipe) -> OnPolicyFlow:
    built = policy(recipe)
    envs = rewarded(groups(NUM_ENVS, recipe.depth), recipe)
    return on_policy_flow(
        built,
        envs,
        trainer(built),
        SETTINGS,
        algorithm(recipe.config),
        CLUSTER,
        staleness=recipe.config.staleness,
        iterations=ITERATIONS,
    )


def roles(recipe: Recipe, machines: Cluster | None = None) -> dict[str, Role]:
    counts = {
        "rollout": recipe.rollout_workers,
        "reward": recipe.reward_workers,
        "reference": recipe.reference_workers,
        "trainer": recipe.ranks,
    }
    counts["feature"] = recipe.feature_workers
    config = replace(CLUSTER, placement=recipe.placement or "collocated")
    return {
        name: replace(role, cpus=0.05) for name, role in roles_of(config, counts, machines).items()
    }


@contextmanager
def on_ray(
    recipe: Recipe, say: Callable[[str], None] = lambda text: None, cluster: ClusterConfig = CLUSTER
) -> Iterator[OnPolicyFlow]:
    """In the cluster that this process is connected to."""
    cluster = replace(
        cluster,
        streaming=recipe.streaming,
        offload=recipe.offload,
        shards_per_worker=recipe.shards_per_worker,
        weights=recipe.weights,
    )
    ahead = {"staleness": recipe.config.staleness}
    machines = Cluster("toy", (NodeConfig(gpus=8),)) if recipe.placement else None
    with (
        launch_workers(
            builders(recipe), roles(recipe, machines), cluster, say, machines
        ) as workers,
        closing(OnPolicyFlow(workers, NUM_ENVS, SETTINGS, **ahead, iterations=ITERATIONS)) as flow,
    ):
        yield flow


def one_thread() -> AbstractContextManager[None]:
    """Recipes set the number of threads; Ray's workers start with one for any OMP_NUM_THREADS here."""
    return threads(1)


def iterate(
    flow: OnPolicyFlow, recipe: Recipe, iterations: int = ITERATIONS
) -> list[dict[str, float]]:
    found = []
    subject = algorithm(recipe.config)
    with one_thread():
        for iteration in range(iterations):
            flow.begin(iteration)
            subject.iteration(flow)
            found.append(flow.metrics)
    return found


def trained(flow: OnPolicyFlow) -> dict[str, Tensor]:
    (_, packed, _), *_ = flow.trainers.call("weights", returns=3)
    return {name: value.clone() for name, value in fetched(packed).tensors().items()}


def with_staleness(recipe: Recipe, staleness: int) -> Recipe:
    return replace(
        recipe,
        config=replace(
            recipe.config, staleness=staleness, decoupled=True, **_without_resampling(recipe)
        ),
    )


def _without_resampling(recipe: Recipe) -> dict[str, int]:
    return {"resample": 0} if isinstance(recipe.config, GRPOConfig) else {}


class Rank:
    """A trainer rank of which one dies in an update, while the other waits for it without end, as in a collective of NCCL."""

    def ping(self) -> None:
        """Answer a health check."""

    def where(self) -> dict[str, str]:
        return {"node": "10.0.0.1"}

    def meeting_point(self) -> str:
        return "nowhere"

    def join(self, place: str, ranks: int) -> None:
        """Nobody waits for the other rank."""

    def ready(self) -> WorkerInfo:
        return WorkerInfo(os.getpid(), "127.0.0.1", "node", None)

    def update(self, dying: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL) if os.getpid() == dying else threading.Event().wait()


class Apart(Rank):
    """A trainer rank that does not reach the others, and waits for them without end, as NCCL may."""

    def join(self, place: str, ranks: int) -> None:
        threading.Event().wait()


class Resting:
    """A worker that takes its time to leave the GPU, or dies of it."""

    def __init__(self, folder: Path, place: int) -> None:
        self.left = folder / f"{place}"
        self.dies = place == 1 and not (folder / "died").exists()

    def ping(self) -> None:
        pass

    def ready(self) -> WorkerInfo:
        return WorkerInfo(os.getpid(), "", "", None)

    def rest(self) -> None:
        if self.dies:
            self.left.with_name("died").touch()
            os._exit(1)
        time.sleep(1.0)
        self.left.touch()

"""Start the workers of a flow on Ray and stop them at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from rlinf_vla.runtime.ray.cluster import Role, reserve_places
from rlinf_vla.runtime.ray.flow import RayFlow, Workers
from rlinf_vla.runtime.ray.pool import Pool, Timeouts
from rlinf_vla.runtime.ray.rollout_workers import FeatureWorker, RolloutWorker
from rlinf_vla.runtime.ray.scoring_workers import ReferenceWorker, RewardWorker
from rlinf_vla.runtime.ray.trainer_workers import Trainers, TrainerWorker
from rlinf_vla.runtime.ray.worker import HEALTH, Builders


@contextmanager
def launch_flow(
    builders: Mapping[str, Builders],
    roles: Mapping[str, Role],
    timeouts: Timeouts,
    num_envs: int,
    say: Callable[[str], None],
    spread: bool = False,
    **options: Any,
) -> Iterator[RayFlow]:
    """Start the workers of an on-policy flow and yield the flow. ``options``: see ``RayFlow``."""
    with launch_workers(builders, roles, timeouts, say, spread) as workers:
        flow = RayFlow(workers, num_envs, builders["trainer"].settings, **options)
        try:
            yield flow
        finally:
            flow.close()


@contextmanager
def launch_workers(
    builders: Mapping[str, Builders], roles: Mapping[str, Role], timeouts: Timeouts, say: Callable[[str], None], spread: bool
) -> Iterator[Workers]:
    """Start workers in the connected cluster and stop them at the end. ``builders``: by role."""
    import ray

    remote: Any = ray.remote
    with ExitStack() as stack:
        places = stack.enter_context(reserve_places(roles, timeouts.start, spread))

        groups = {HEALTH: 1}
        # Ray itself restarts these, so that the handles of rollout workers stay valid
        kind = remote(max_restarts=-1, max_task_retries=-1, concurrency_groups=groups)(FeatureWorker)
        features = [kind.options(**place).remote(builders["feature"], number) for number, place in enumerate(places["feature"])]
        for actor in features:
            stack.callback(ray.kill, actor)

        def spawn(kind: type, role: str, place: int) -> Any:
            actor = remote(max_restarts=0, concurrency_groups=groups, **places[role][place])(kind)
            backbone = [features[place % len(features)]] if features and kind is RolloutWorker else []
            return actor.remote(builders[role], place, *backbone)

        def pool(kind: type, role: str) -> Pool:
            found = Pool(role, partial(spawn, kind, role), roles[role].count, timeouts, say)
            stack.callback(found.close)
            return found

        rollouts = pool(RolloutWorker, "rollout")
        rewards, references = (
            pool(kind, role) if roles[role].count else None for kind, role in ((RewardWorker, "reward"), (ReferenceWorker, "reference"))
        )
        trainers = None
        if ranks := roles["trainer"].count:
            trainers = Trainers([spawn(TrainerWorker, "trainer", rank) for rank in range(ranks)], timeouts)
            stack.callback(trainers.close)
        yield Workers(rollouts, rewards, references, features, trainers)

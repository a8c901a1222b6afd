"""Simulate a plan as discrete events: iteration time, bottleneck and timeline.

Machines with the same use are simulated once, so that rollouts differ only as much as those of the
workers of one machine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import gcd
from typing import Any

from rlinf_vla.config.cluster import DISAGGREGATED, IN_PROCESS, NodeConfig
from rlinf_vla.features.planner.events import Resource, Task, run_events
from rlinf_vla.features.planner.plan import (
    Machine,
    Plan,
    Problem,
    place,
    processes,
    rollout_bytes,
)
from rlinf_vla.features.planner.prediction import Prediction, critical_path, spans_between
from rlinf_vla.features.planner.profile import GPU, Profile
from rlinf_vla.features.planner.workload import Round, Workload, rounds
from rlinf_vla.telemetry.timeline import trainer_track

STORE = 1.3e9
"""Bytes per second into Ray's object store, which readers on the same machine map into memory.

Measured with Ray 2.60 and numpy arrays of 100 MB."""


ROUNDS = 20
"""Steps in which measured shares settle."""


def simulate(problem: Problem, plan: Plan) -> Prediction:
    """Predict an iteration of ``plan``. Raises UserError if the cluster is too small for it."""
    simulation = _Simulation(problem, plan)
    iterations = 2 * simulation.lag
    ends = [simulation.iteration(index) for index in range(iterations)]
    listed = simulation.tasks.listed
    resources = simulation.resources()
    times = run_events(listed, resources)
    several = simulation.lag  # with staleness, consecutive iterations may differ
    begin = times.end[ends[-1 - several]]
    end = times.end[ends[-1]]
    total = max(times.end)
    seconds = (end - begin) / several
    price = problem.cluster.price_per_hour
    return Prediction(
        plan,
        seconds,
        problem.workload.steps,
        {
            part: seconds / several
            for part, seconds in critical_path(listed, times, ends[-1], begin).items()
        },
        {
            name: busy / (resources[name].capacity * total)
            for name, busy in times.busy.items()
            if busy
        },
        spans_between(listed, times, end - seconds, end),
        None if price is None else price * seconds / 3600,
    )


def shares_of(
    profiles: Mapping[str, Profile], plan: Plan, workload: Workload, machines: Sequence[Machine]
) -> dict[str, float]:
    """Return device type -> share of a rank on it in the rows; empty: all shares are equal.

    Measured shares settle where all ranks take equally long, as a share is proportional to the
    rows per second, which depend on it where a pass has a fixed cost.
    """
    ranks = Counter[str]()
    for machine in machines:
        ranks[machine.node.device] += machine.copies * len(machine.trainers)
    devices = [device for device, count in ranks.items() if count]
    if not workload.measured or len(devices) == 1:
        return {}
    shares = dict.fromkeys(devices, 1 / plan.trainer_ranks)
    for _ in range(ROUNDS):
        speeds = {
            device: share
            / update_seconds(profiles[device], plan, workload, workload.minibatches, share)
            for device, share in shares.items()
        }
        total = sum(ranks[device] * speed for device, speed in speeds.items())
        shares = {device: speed / total for device, speed in speeds.items()}
    return shares


def update_seconds(
    profile: Profile,
    plan: Plan,
    workload: Workload,
    minibatches: Sequence[tuple[int, int]],
    share: float | None = None,
) -> float:
    """Seconds of one rank, alone on its device, to update on ``minibatches`` over all ranks.

    ``share``: of the rank in the rows; None: all ranks have the same.
    """
    ranks = plan.trainer_ranks
    optimise = profile.cost("optimise").fixed
    rows = sum(count * size for count, size in minibatches)
    seconds = sum(
        count
        * (
            passes(profile, "update", plan, -(-size // ranks) if share is None else size * share)
            + optimise
        )
        for count, size in minibatches
    )
    # the frozen part of the rows that a rank learns from: each epoch draws its groups anew
    groups = gcd(workload.row_groups, ranks)
    mine = (
        rows / groups * (1 - (1 - groups / ranks) ** workload.epochs)
        if share is None
        else rows * (1 - (1 - share) ** workload.epochs)
    )
    first = rows / ranks if share is None else rows * share
    once = (
        passes(profile, "precompute", plan, mine) * workload.fixes
        + passes(profile, "reference", plan, first) * workload.proximal
    )
    return workload.epochs * seconds + once


def passes(profile: Profile, operation: str, plan: Plan, rows: float) -> float:
    """Seconds of one rank to compute ``rows`` rows in micro-batches."""
    cost = profile.cost(operation)
    (full, rest) = divmod(rows, plan.micro_batch_size)
    return full * cost.of(plan.micro_batch_size) + cost.of(rest)


@dataclass(frozen=True)
class _Shard:
    """ready: task after which the shard is available; rows: policy calls in all its copies; parts:
    environments or listed episodes of each."""

    ready: int
    rows: int
    parts: list[range]


class _Simulation:
    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.graph = problem.graph
        self.plan = plan
        self.workload = problem.workload
        self.tasks = Tasks()
        self.machines = place(plan, problem.cluster)
        self.hosts = [
            Host(index, machine.node, problem.profiles[machine.node.device], machine.copies)
            for index, machine in enumerate(self.machines)
        ]
        self.single = plan.runtime == IN_PROCESS
        self.lag = 1 if self.single else self.graph.lag
        """Iterations until new weights are used; in one process nothing overlaps an update."""
        self.trainers = [
            (host, device)
            for host, machine in zip(self.hosts, self.machines, strict=True)
            for device in machine.trainers
        ]
        self.shares = shares_of(problem.profiles, plan, self.workload, self.machines)
        self.workers = self._workers()
        self.thread = -1
        """In process: last task of the only thread."""
        self.free: dict[str, int] = {}
        """Track -> last task of a worker that does one thing at a time."""
        self.published: list[dict[int, int]] = []
        """Per iteration: host -> task after which its workers have the new weights."""

    def resources(self) -> dict[str, Any]:
        return {
            name: resource for host in self.hosts for name, resource in host.resources().items()
        }

    def _workers(self) -> list[Worker]:
        plan = self.plan
        workers = list[Worker]()
        size = self.workload.envs // (plan.rollout_workers * plan.pipeline_depth)
        for host, machine in zip(self.hosts, self.machines, strict=True):
            for numbers, device in zip(machine.numbers, machine.rollout, strict=True):
                name = "" if self.single else f"rollout {numbers[0]} "
                backbone = self.trainers[0] if plan.split == "head" else None
                rewards = self.workload.rewarded and not plan.reward_workers
                workers.append(
                    Worker(
                        host,
                        device,
                        numbers,
                        name,
                        size,
                        processes(plan, self.workload, machine),
                        backbone,
                        rewards,
                    )
                )
        return workers

    def iteration(self, index: int) -> int:
        """Add the tasks of iteration ``index``; return the last of them."""
        shards = [shard for worker in self.workers for shard in self._collect(index, worker)]
        shards.sort(key=lambda shard: shard.parts[0].start)  # the order in which updates take them
        if self.workload.rewarded and self.plan.reward_workers:
            shards = self._stage("reward", shards, self.plan.reward_workers)
        if "reference" in self.graph:
            shards = self._stage("reference", shards, self.plan.reference_workers)
        for arrived, minibatches in self._updates(shards):
            updated = self._update(arrived, minibatches)
        return self._publish(updated)

    def _updates(
        self, shards: Sequence[_Shard]
    ) -> Iterator[tuple[Sequence[_Shard], Sequence[tuple[int, int]]]]:
        """Yield the shards that each update waits for, and its optimiser steps: all of them, or if
        the update streams, one as soon as its groups have arrived."""
        workload = self.workload
        per_step = self.workload.groups_per_step
        if per_step is None or not (self.plan.streams and self.graph.streams_into("update")):
            yield shards, workload.minibatches
            return
        shard_of_group = [
            shard
            for shard in shards
            for _ in range(sum(map(len, shard.parts)) // workload.attempts)
        ]
        for step, size in enumerate(
            size for count, size in workload.minibatches for _ in range(count)
        ):
            yield shard_of_group[step * per_step : (step + 1) * per_step], ((1, size),)

    def _collect(self, index: int, worker: Worker) -> list[_Shard]:
        """Add a worker's rollout, after its previous one and the arrival of the weights."""
        workload, host, tasks = self.workload, worker.host, self.tasks
        before = [self.thread, self.free.get(worker.prefix, -1)]
        if index >= self.lag and not self.single:
            before.append(self.published[index - self.lag][host.index])
        load = host.profile.cost("merge").fixed + host.profile.cost("publish").fixed * (
            not self.single
        )
        ready = tasks.run(
            host,
            "merge",
            f"{worker.prefix}policy",
            worker.device,
            load,
            before,
            name="merge" if self.single else "load",
        )
        workers = self.plan.rollout_workers
        depth = self.plan.pipeline_depth
        shards = list[_Shard]()
        parts = workload.parts(None if self.single else workers)
        for parts_of_round in zip_longest(*(parts[number::workers] for number in worker.numbers)):
            mine = [
                part for part in parts_of_round if part is not None
            ]  # the last ones may be on some machines only
            playing = replace(worker, host=replace(host, copies=len(mine)))
            ready = tasks.wait(
                playing.play(
                    tasks, workload, rounds(workload, mine[0], worker.size, depth), [ready]
                )
            )
            shards.append(_Shard(ready, sum(map(workload.calls_of, mine)), mine))
        self.free[worker.prefix] = ready
        self.thread = ready if self.single else -1
        return shards if self.single else [self._delivered(host, shard) for shard in shards]

    def _delivered(self, host: Host, shard: _Shard) -> _Shard:
        """Add the transfer of a shard to the trainer's first machine.

        The other machines with ranks read it at the same time, over their own links.
        """
        size = shard.rows * host.profile.bytes.call
        head = self.head
        ready = self.tasks.wait(
            [shard.ready], host.latency + size / len(shard.parts) / STORE, "trajectories", "network"
        )
        away = size * (1 - (host.index == head.index) / len(shard.parts))
        ready = self.tasks.add("trajectories", "network", head.link, head.transfer(away), [ready])
        return replace(shard, ready=ready)

    def _stage(self, operation: str, shards: list[_Shard], workers: int) -> list[_Shard]:
        """Add ``operation`` for each shard, by one of ``workers`` placed next to the trainers.

        Without workers, the trainer ranks share the rows of each shard.
        """
        everything = (
            [] if self.plan.streams else [self.tasks.wait([shard.ready for shard in shards])]
        )
        processed = []
        for index, shard in enumerate(shards):
            number = index % min(workers, len(shards)) if workers else 0
            parts = max(1.0, min(len(shard.parts), workers / len(shards)))
            tracks = (
                [(f"{operation} {number}", self.trainers[number % len(self.trainers)])]
                if workers
                else list(self._tracks())
            )
            ends = []
            for track, (host, device) in tracks:
                before = [shard.ready, *everything, self.free.get(track, -1), self.thread]
                seconds = passes(
                    host.profile,
                    operation,
                    self.plan,
                    shard.rows / (parts if workers else self.plan.trainer_ranks),
                )
                ends.append(self.tasks.run(host, operation, track, device, seconds, before))
                self.free[track] = ends[-1]
            ready = self.tasks.wait(ends)
            self.thread = ready if self.single else -1
            processed.append(replace(shard, ready=ready))
        return processed

    def _update(self, shards: Sequence[_Shard], minibatches: Sequence[tuple[int, int]]) -> int:
        tasks = self.tasks
        ready = tasks.wait([self.thread, *(shard.ready for shard in shards)])
        ends = []
        for track, (host, device) in self._tracks():
            begin = self._switched(host, [ready, self.free.get(track, -1)], track)
            share = self.shares.get(host.node.device)
            seconds = update_seconds(host.profile, self.plan, self.workload, minibatches, share)
            end = tasks.run(host, "update", track, device, seconds, [begin])
            if self.workload.sharded:
                end = tasks.wait(
                    [end, tasks.wait([begin], self._gathering(minibatches), "gather", "network")]
                )
            self.free[track] = self._switched(host, [end], track)
            ends.append(self.free[track])
        done = tasks.wait(ends, self._all_reduce(minibatches), "all-reduce", "network")
        self.free |= {track: done for track, _ in self._tracks()}
        self.thread = done if self.single else -1
        return done

    def _switched(self, host: Host, after: Sequence[int], track: str) -> int:
        """Add the swap of idle weights for active ones on a device that roles share in turn."""
        plan = self.plan
        if not (plan.offload and host.node.gpus and plan.placement != DISAGGREGATED):
            return self.tasks.wait(after)
        stored = host.profile.bytes
        size = (
            rollout_bytes(stored, plan, self.workload)
            + stored.weights
            + stored.gradients
            + stored.moments
        )
        return self.tasks.wait(after, 8 * size / (1e9 * host.node.gpu_link_gbps), "switch", track)

    def _gathering(self, minibatches: Sequence[tuple[int, int]]) -> float:
        """Seconds of a sharded rank's all-gathers, beside its computation.

        Each micro-batch gathers all weights for the forward pass, and again for the backward pass.
        """
        together = self.plan.trainer_ranks * self.plan.micro_batch_size
        passes = sum(count * -(-size // together) for count, size in minibatches)
        return 2 * self.workload.epochs * passes * self._ring(self.head.profile.bytes.weights)

    def _ring(self, size: float) -> float:
        """Seconds in which a ring of the trainer ranks gathers or reduces ``size`` bytes.

        Patarasuk and Yuan 2009. 0 with one rank.
        """
        ranks = self.plan.trainer_ranks
        head = self.head
        rate = self._bus
        if self._trainers_apart:
            network = 1e9 * head.node.network_gbps / 8
            rate = min(rate, network) if head.node.gpus else network
        return (ranks - 1) / ranks * (size / rate + head.latency)

    def _all_reduce(self, minibatches: Sequence[tuple[int, int]]) -> float:
        """Seconds in which gradients are summed, once per optimiser step: they are reduced and, if
        every rank needs all of them, gathered."""
        steps = sum(count for count, _ in minibatches)
        return (
            self.workload.epochs
            * steps
            * (1 if self.workload.sharded else 2)
            * self._ring(self.head.profile.bytes.gradients)
        )

    def _publish(self, updated: int) -> int:
        """Add the publication of weights: one put, then a broadcast or one fetch per machine."""
        head, tasks = self.head, self.tasks
        if self.single:
            self.published.append({})
            return updated
        size = head.profile.bytes.trained
        (track, (_, device)) = next(self._tracks())
        gathered = (
            tasks.wait([updated], self._ring(size), "publish", "network")
            if self.workload.sharded
            else updated
        )
        copied = tasks.run(
            head,
            "publish",
            track,
            device,
            head.profile.cost("publish").fixed,
            [gathered, self.free[track]],
        )
        self.free[track] = copied
        stored = tasks.wait([copied], head.latency + size / STORE, "publish", "network")
        if self.workload.broadcast and not self.plan.offload:
            return self._broadcast(size, stored)
        arrived = {}
        for host in self.hosts:
            readers = host.copies - (host.index == head.index)
            begun = tasks.wait([stored], host.latency, "publish", "network")
            arrived[host.index] = tasks.add(
                "publish", "network", head.link, readers * head.transfer(size), [begun]
            )
        self.published.append(arrived)
        return stored

    def _broadcast(self, size: float, stored: int) -> int:
        """Add a broadcast in a ring: bucket after bucket, every link carries the weights once."""
        head, tasks = self.head, self.tasks
        here = tasks.wait([stored], head.latency + size / self._bus, "publish", "network")
        begun = tasks.wait([stored], head.latency, "publish", "network")
        apart = sum(host.copies for host in self.hosts) > 1
        arrived = tasks.wait(
            [here, tasks.add("publish", "network", head.link, head.transfer(size) * apart, [begun])]
        )
        self.published.append({host.index: arrived for host in self.hosts})
        return stored

    @property
    def _bus(self) -> float:
        """Bytes per second between devices of the trainer's first machine."""
        head = self.head
        return (head.profile.bus or 1e9 * head.node.gpu_link_gbps / 8) if head.node.gpus else STORE

    @property
    def head(self) -> Host:
        return self.trainers[0][0]

    @property
    def _trainers_apart(self) -> bool:
        """Whether the trainer ranks are on more than one machine."""
        return self.head.copies > 1 or any(
            host.index != self.head.index for host, _ in self.trainers
        )

    def _tracks(self) -> Iterator[tuple[str, tuple[Host, int]]]:
        """Yield (track name, (host, device)) of each trainer rank."""
        for number, place_ in enumerate(self.trainers):
            yield trainer_track(number, self.plan.trainer_ranks), place_


# --- the tasks of a rollout worker in one iteration; its groups take turns as in rollout/player.py


@dataclass(frozen=True)
class Host:
    """A simulated machine, its resources and costs. It stands for ``copies`` equal machines."""

    index: int
    node: NodeConfig
    profile: Profile
    copies: int = 1

    @property
    def cpu(self) -> str:
        return f"{self.node.name} {self.index}: cores"

    @property
    def link(self) -> str:
        return f"{self.node.name} {self.index}: network"

    def gpu(self, device: int) -> str:
        return f"{self.node.name} {self.index}: GPU {device}"

    def resources(self) -> dict[str, Resource]:
        profile = self.profile
        cpus = float(self.node.cpus)
        resources = {
            self.cpu: Resource(cpus, lambda busy: profile.crowded(busy, cpus)),
            self.link: Resource(),
        }
        return resources | {self.gpu(device): Resource() for device in range(self.node.gpus)}

    def transfer(self, size: float) -> float:
        """Seconds to move ``size`` bytes over this machine's otherwise idle link to others."""
        return 8 * size / (1e9 * self.node.network_gbps)

    @property
    def latency(self) -> float:
        return self.node.latency_ms / 1e3


@dataclass
class Tasks:
    """A growing list of tasks."""

    listed: list[Task] = field(default_factory=list)

    def add(
        self,
        name: str,
        track: str,
        resource: str,
        work: float,
        after: Sequence[int],
        width: float = 1.0,
    ) -> int:
        earlier = tuple(sorted({number for number in after if number >= 0}))
        self.listed.append(Task(name, track, resource, work, width, earlier))
        return len(self.listed) - 1

    def run(
        self,
        host: Host,
        operation: str,
        track: str,
        device: int,
        seconds: float,
        after: Sequence[int],
        name: str = "",
    ) -> int:
        """Add ``seconds`` of ``operation`` on a GPU or on cores, as the profile specifies."""
        cost = host.profile.cost(operation)
        if cost.on == GPU:
            return self.add(name or operation, track, host.gpu(device), seconds, after)
        alone = seconds / host.profile.crowded(cost.cores, host.profile.cores)
        return self.add(name or operation, track, host.cpu, alone, after, width=cost.cores)

    def wait(
        self, after: Sequence[int], seconds: float = 0.0, name: str = "wait", track: str = ""
    ) -> int:
        return self.add(name, track, "", seconds, after)


@dataclass(frozen=True)
class Worker:
    """One rollout worker.

    numbers: among all of the plan, on each machine of ``host``. prefix: of its track names.
    processes: simulator processes per environment group. backbone: (host, device) of a split
    policy's backbone; None: the policy is whole. rewards: it computes the recipe's reward.
    """

    host: Host
    device: int
    numbers: tuple[int, ...]
    prefix: str
    size: int
    processes: int
    backbone: tuple[Host, int] | None = None
    rewards: bool = False

    def play(
        self, tasks: Tasks, workload: Workload, groups: Sequence[list[Round]], after: Sequence[int]
    ) -> list[int]:
        """Add a rollout; return the task after which each group's calls are available."""
        policy = f"{self.prefix}policy"
        thread = tasks.wait(after)
        pending = [
            self._simulator(tasks, "reset", group, range(self.size), [thread])
            for group in range(len(groups))
        ]
        left = [deque(rounds) for rounds in groups]
        resetting = [True] * len(groups)
        ready = [thread] * len(groups)
        active = list(range(len(groups)))
        while active:
            for group in list(active):
                # the group that has its turn waits for its simulator, even if another's is ready
                thread = tasks.wait([thread, pending[group]])
                done = None if resetting[group] else left[group].popleft()
                if done is not None:
                    if self.rewards:
                        reward = done.calls * self.host.profile.cost("reward").of(self.size)
                        thread = tasks.run(
                            self.host, "reward", policy, self.device, reward, [thread]
                        )
                    if done.valued:
                        thread = self._infer(tasks, "value", policy, thread)
                    if not left[group]:
                        ready[group] = thread
                        active.remove(group)
                        continue
                resetting[group] = done is not None and bool(done.resets)
                if done is not None and done.resets:
                    pending[group] = self._simulator(tasks, "reset", group, done.resets, [thread])
                else:
                    calls = left[group][0].calls
                    thread = self._infer(tasks, "act", policy, thread, calls)
                    pending[group] = self._simulator(
                        tasks, "simulate", group, range(self.size), [thread], calls
                    )
                if self.host.profile.inline:
                    thread = pending[group]
        return ready

    def _simulator(
        self,
        tasks: Tasks,
        operation: str,
        group: int,
        environments: Sequence[int],
        after: Sequence[int],
        calls: int = 1,
    ) -> int:
        """Each process steps its environments one after the other; all wait for the slowest."""
        cost = self.host.profile.cost(operation)
        track = f"{self.prefix}simulator {group}"
        count = len(environments)
        if cost.on == GPU:
            return tasks.run(
                self.host, operation, track, self.device, calls * cost.of(count), after
            )
        load = Counter(((slot + 1) * self.processes - 1) // self.size for slot in environments)
        total = len(load) * cost.fixed + count * cost.per_item
        width = total / cost.of(max(load.values())) * cost.cores if total else 1.0
        alone = total / self.host.profile.crowded(cost.cores, self.host.profile.cores)
        return tasks.add(operation, track, self.host.cpu, calls * alone, after, width)

    def _infer(self, tasks: Tasks, operation: str, track: str, thread: int, calls: int = 1) -> int:
        """Add ``calls`` calls (``act`` or ``value``) for all environments of a group."""
        profile = self.host.profile
        rows = self.size
        cost = profile.cost(operation)
        if self.backbone is None:
            return tasks.run(
                self.host, operation, track, self.device, calls * cost.of(rows), [thread]
            )
        there, device = self.backbone
        encode = there.profile.cost("encode").of(rows)
        thread = self._moved(tasks, there, rows * profile.bytes.inputs, track, thread, calls)
        thread = tasks.run(
            there,
            "encode",
            f"{track} backbone",
            device,
            calls * self.host.copies / there.copies * encode,
            [thread],
        )
        thread = self._moved(tasks, there, rows * profile.bytes.features, track, thread, calls)
        head = calls * max(0.0, cost.of(rows) - profile.cost("encode").of(rows))
        return tasks.run(self.host, operation, track, self.device, head, [thread], name="head")

    def _moved(
        self, tasks: Tasks, there: Host, size: float, track: str, thread: int, calls: int
    ) -> int:
        thread = tasks.wait([thread], calls * there.latency, "features", track)
        if there.index == self.host.index:
            return thread
        return tasks.add(
            "features", track, there.link, calls * self.host.copies * there.transfer(size), [thread]
        )

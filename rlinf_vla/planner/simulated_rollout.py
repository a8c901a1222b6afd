"""Tasks of a rollout worker in one iteration; its groups take turns as in ``rollout/player.py``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlinf_vla.config.cluster import NodeConfig
from rlinf_vla.planner.events import Resource, Task
from rlinf_vla.planner.profile import GPU, Profile
from rlinf_vla.planner.workload import Round, Workload


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

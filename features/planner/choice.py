"""Choose the plan with the least simulated iteration time among those that fit the cluster.

Lower bounds on this time let the search skip simulations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlinf_vla.config.cluster import COLLOCATED, DISAGGREGATED, HYBRID, IN_PROCESS, RAY
from rlinf_vla.config.errors import UserError
from rlinf_vla.features.planner.plan import Machine, Plan, Problem, check_memory, place, processes
from rlinf_vla.features.planner.prediction import Prediction
from rlinf_vla.features.planner.profile import CPU, Cost, Profile
from rlinf_vla.features.planner.simulate import shares_of, simulate, update_seconds
from rlinf_vla.features.planner.workload import Workload
from rlinf_vla.runtime.machines import Cluster

DEPTHS = (1, 2, 4)
TIE_TOLERANCE = 0.03
"""Relative difference below which two plans count as equally fast.

The one that comes first is then chosen, because it needs fewer processes."""


@dataclass(frozen=True)
class PlanCandidate:
    """A plan that fits the cluster.

    least: lower bound on the seconds of an iteration. prediction: None if the bound ruled it out.
    """

    plan: Plan
    least: float
    prediction: Prediction | None = None

    @property
    def seconds(self) -> float:
        return self.least if self.prediction is None else self.prediction.seconds


@dataclass(frozen=True)
class Choice:
    """fitting: every plan that fits, in search order; refused: the other plans and the reasons."""

    best: Prediction
    fitting: tuple[PlanCandidate, ...]
    refused: tuple[tuple[Plan, str], ...]

    def explain(self) -> str:
        """Describe what was compared, what was chosen and why the others were not."""
        simulated = sum(candidate.prediction is not None for candidate in self.fitting)
        lines = [
            f"{len(self.fitting)} plans fit, {len(self.refused)} do not; {simulated} were simulated, the others cannot be as fast"
        ]
        lines += [f"chosen: {self.best.plan}", f"  {self.best.bottleneck}"]
        for name, others in self._rivals().items():
            rival = min(others, key=lambda candidate: candidate.seconds)
            at_least = "at least " if rival.prediction is None else ""
            lines.append(
                f"not {name}: {at_least}{rival.seconds:.3g} s, {self._compared(rival.seconds)}: {rival.plan}"
            )
        for reason in dict.fromkeys(reason for _, reason in self.refused):
            plan = next(plan for plan, why in self.refused if why == reason)
            lines.append(f"refused: {reason}: {plan}")
        return "\n".join(lines)

    def _compared(self, seconds: float) -> str:
        ratio = seconds / self.best.seconds
        if ratio >= 2:
            return f"{ratio:.1f} times as long"
        if ratio < 0.995:
            return f"{100 * (1 - ratio):.1f} % less, too little to justify more processes"
        return f"{100 * (ratio - 1):.0f} % more" if ratio >= 1.005 else "no less"

    def _rivals(self) -> dict[str, list[PlanCandidate]]:
        """Group the other plans by the first aspect, of those below, that differs from the best."""
        best = self.best.plan
        rivals = dict[str, list[PlanCandidate]]()
        for candidate in self.fitting:
            plan = candidate.plan
            aspects = {
                "runtime": "in process" if plan.runtime == IN_PROCESS else "on Ray",
                "placement": plan.placement,
                "pipeline_depth": "another pipeline depth",
                "split": "another split of the policy",
            }
            differing = (
                name for key, name in aspects.items() if getattr(plan, key) != getattr(best, key)
            )
            if plan != best:
                rivals.setdefault(next(differing, "other numbers of workers"), []).append(candidate)
        return rivals


class NoRoom(UserError):
    """The cluster has too few devices, or too little memory, for any plan."""


def choose(problem: Problem) -> Choice:
    """Return the plan that is predicted to be fastest. Raises UserError if no plan fits, NoRoom if
    that is for want of devices or memory."""
    workload = problem.workload
    fitting: list[PlanCandidate] = []
    refused: list[tuple[Plan, str]] = []
    for plan in candidates(problem):
        try:
            fitted = _fitted(problem, plan)
            fitting.append(PlanCandidate(fitted, least_seconds(problem, fitted)))
        except UserError as error:
            refused.append((plan, str(error)))
    if not fitting:
        cluster = f"no plan fits cluster={problem.cluster.name}"
        if refused:
            raise NoRoom(f"{cluster}: {refused[0][1]}")
        raise UserError(
            f"{cluster}: env.num_envs={workload.envs} does not divide into groups for rollout.batch_size={workload.batch_size}"
        )
    enough = float("inf")
    for index in sorted(range(len(fitting)), key=lambda index: fitting[index].least):
        if fitting[index].least > enough:
            break
        prediction = simulate(problem, fitting[index].plan)
        fitting[index] = replace(fitting[index], prediction=prediction)
        enough = min(enough, (1 + TIE_TOLERANCE) * prediction.seconds)
    best = next(
        candidate.prediction
        for candidate in fitting
        if candidate.prediction is not None and candidate.prediction.seconds <= enough
    )
    return Choice(best, tuple(fitting), tuple(refused))


def candidates(problem: Problem) -> Iterator[Plan]:
    """Yield the plans to compare, simpler ones first."""
    workload, cluster = problem.workload, problem.cluster
    splits = (
        ("none", "head")
        if all(problem.profiles[node.device].bytes.features for node in cluster.nodes)
        else ("none",)
    )
    for depth in DEPTHS:
        plan = Plan(pipeline_depth=depth, micro_batch_size=problem.micro_batch_size)
        if divides(plan, workload.envs, workload.batch_size):
            yield plan
    for placement, workers, ranks in _sizes(cluster):
        for depth in DEPTHS:
            for split in splits:
                plan = Plan(
                    RAY,
                    placement,
                    workers,
                    0,
                    0,
                    ranks,
                    depth,
                    problem.micro_batch_size,
                    True,
                    split,
                )
                if (
                    not divides(plan, workload.envs, workload.batch_size)
                    or ranks > workload.most_rows
                ):
                    continue
                yield from _with_roles(plan, workload)


def _with_roles(plan: Plan, workload: Workload) -> Iterator[Plan]:
    yield plan
    if workload.rewarded:
        yield replace(plan, reward_workers=1)
    if workload.reference:
        yield replace(plan, reference_workers=plan.trainer_ranks)


def _sizes(cluster: Cluster) -> Iterator[tuple[str, int, int]]:
    """Yield (placement, rollout workers, trainer ranks)."""
    if any(node.gpus for node in cluster.nodes):
        devices = cluster.devices
        for workers in _powers(devices):
            yield COLLOCATED, workers, workers
        for ranks in _powers(devices - 1):
            yield DISAGGREGATED, devices - ranks, ranks
            if _whole(devices - ranks) != devices - ranks:
                yield DISAGGREGATED, _whole(devices - ranks), ranks
            yield HYBRID, devices, ranks
        return
    cores = min(node.cpus for node in cluster.nodes)
    for workers in _powers(cores * cluster.machines):
        for ranks in _powers(min(workers, cores * cluster.machines)):
            yield COLLOCATED, workers, ranks
    if cluster.machines > 1:
        for workers in _powers(cores * (cluster.machines - 1)):
            yield DISAGGREGATED, workers, 1


def _powers(limit: int) -> list[int]:
    """The powers of two up to ``limit``, and ``limit`` itself."""
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return [*powers, limit] if powers and powers[-1] != limit else powers


def _whole(number: int) -> int:
    """The largest power of two up to ``number``: environments divide by it more often."""
    return 1 << (number.bit_length() - 1)


def divides(plan: Plan, envs: int, batch_size: int) -> bool:
    """Whether environments divide into equal groups, and groups into calls of the batch size."""
    size, rest = divmod(envs, plan.rollout_workers * plan.pipeline_depth)
    return rest == 0 and (size % batch_size == 0 or batch_size >= size)


def _fitted(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with as little off-loading and micro-batch reduction as memory requires.

    Both cost time; only shared GPUs off-load, and not with staleness. Raises UserError if
    micro-batches of one call do not fit.
    """
    place(plan, problem.cluster)
    shared = (
        any(node.gpus for node in problem.cluster.nodes)
        and plan.placement != DISAGGREGATED
        and plan.runtime == RAY
    )
    largest = plan.micro_batch_size
    for micro in [largest >> shift for shift in range(largest.bit_length())]:
        for offload in (False, True)[: 1 + (shared and problem.graph.lag == 1)]:
            trial = replace(plan, micro_batch_size=micro, offload=offload)
            try:
                check_memory(problem, trial)
                return trial
            except UserError as error:
                reason = error
    raise reason


def least_seconds(problem: Problem, plan: Plan) -> float:
    """Lower bound on the seconds of one iteration, whatever work overlaps.

    It leaves out rewards, resets, values, transfers and waiting for turns.
    """
    rollout = least_rollout_seconds(problem, plan)
    machines = place(plan, problem.cluster)
    shares = shares_of(problem.profiles, plan, problem.workload, machines)
    update = max(
        _update(problem, plan, machine, shares.get(machine.node.device)) for machine in machines
    )
    streams = plan.streams and problem.graph.streams_into("update")
    return (
        max(rollout, update)
        if streams or (problem.graph.lag > 1 and plan.runtime != IN_PROCESS)
        else rollout + update
    )


def least_rollout_seconds(problem: Problem, plan: Plan) -> float:
    """Lower bound on the seconds of one iteration's rollout, on the slowest machine."""
    return max(_rollout(problem, plan, machine) for machine in place(plan, problem.cluster))


def _rollout(problem: Problem, plan: Plan, machine: Machine) -> float:
    if not machine.rollout:
        return 0.0
    workload = problem.workload
    profile = problem.profiles[machine.node.device]
    depth = plan.pipeline_depth
    size = workload.envs // (plan.rollout_workers * plan.pipeline_depth)
    calls = workload.calls or workload.rows // workload.envs
    count = 1 if profile.cost("simulate").on != CPU else processes(plan, workload, machine)
    act, play = profile.cost("act"), profile.cost("simulate")
    step = _alone(profile, play, play.of(-(-size // count)))
    acting = 0.0 if plan.split == "head" else _alone(profile, act, act.of(size))
    taking_turns = (
        max(depth * acting, acting + step) if not profile.inline else depth * (acting + step)
    )
    work = play.of(size / count) * count * (play.on == CPU) + act.of(size) * (
        act.on == CPU and plan.split == "none"
    )
    cores = (
        len(machine.rollout)
        * depth
        * work
        / profile.crowded(max(act.cores, play.cores), profile.cores)
        / machine.node.cpus
    )
    return calls * max(taking_turns, cores)


def _update(problem: Problem, plan: Plan, machine: Machine, share: float | None) -> float:
    if not machine.trainers:
        return 0.0
    workload = problem.workload
    profile = problem.profiles[machine.node.device]
    cost = profile.cost("update")
    work = update_seconds(profile, plan, workload, workload.minibatches, share)
    alone = _alone(profile, cost, work)
    if cost.on != CPU:
        return alone * max(machine.trainers.count(device) for device in machine.trainers)
    return max(alone, alone * cost.cores * len(machine.trainers) / machine.node.cpus)


def _alone(profile: Profile, cost: Cost, work: float) -> float:
    """Seconds on an otherwise idle machine."""
    if cost.on != CPU:
        return work
    return work / profile.crowded(cost.cores, profile.cores) / cost.cores

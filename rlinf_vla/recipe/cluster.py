"""Recipe node ``cluster``: where things run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from rlinf_vla.flow.planning.cluster import NodeConfig
from rlinf_vla.flow.planning.plan import RUNTIMES
from rlinf_vla.ranges import Count, CountOrZero, Matches, Name, OneOf, Range, Seconds, Size, SizeOrZero
from rlinf_vla.trust import OUTSIDE

SHARDINGS = ("none", "full")
PLANS = ("given", "auto")
HEAD = Matches(r"[^\s/]+:\d{1,5}", "HOST:PORT of the cluster's head, as `ray start --head` prints it")


@dataclass
class RoleConfig:
    """What each worker of a role takes of a cluster (``cluster.runtime=ray``)."""

    cpus: Annotated[float, Range(0, 65536)] = 1.0
    gpus: Annotated[float, Range(0, 65536)] = 0.0
    """Parts of a GPU are possible: workers then share one. 0: the worker computes on the CPU."""
    resources: dict[str, Annotated[float, Range(0, 1e6)]] = field(default_factory=dict)
    """Of the cluster's own names, such as a robot."""
    labels: dict[str, str] = field(default_factory=dict)
    """Of the nodes that may run it, such as market-type: spot."""


@dataclass
class RobotRoleConfig(RoleConfig):
    """Of what plays beside the robot (env=robot, docs/online.md); the learner is where the command is."""

    resources: dict[str, Annotated[float, Range(0, 1e6)]] = field(default_factory=lambda: {"robot": 1.0})


@dataclass
class RolesConfig:
    rollout: RoleConfig = field(default_factory=RoleConfig)
    reference: RoleConfig = field(default_factory=RoleConfig)
    reward: RoleConfig = field(default_factory=RoleConfig)
    feature: RoleConfig = field(default_factory=RoleConfig)
    trainer: RoleConfig = field(default_factory=RoleConfig)
    robot: RobotRoleConfig = field(default_factory=RobotRoleConfig)


@dataclass
class ClusterConfig:
    """Where things run. It changes the speed, never the result."""

    name: Name = MISSING
    nodes: list[NodeConfig] = field(default_factory=list)
    """Machines that `rlinf-vla plan` may use (docs/plan.md); empty: this one."""
    plan: Annotated[str, OneOf(*PLANS)] = "given"
    """given: as the keys below say. auto: they and rollout.pipeline_depth become what is predicted to be fastest (docs/plan.md)."""
    replan_after: CountOrZero = 0
    """Iterations after which a run with a prediction plans again from what it has measured; 0: never."""
    runtime: Annotated[str, OneOf(*RUNTIMES)] = "in_process"
    """in_process: one process and its simulators. ray: workers on a Ray cluster, any of which but the trainer may die."""
    address: Annotated[str, HEAD] | None = field(default=None, metadata=OUTSIDE)
    """HOST:PORT of a Ray cluster's head; null: one of this machine's own, for this run."""
    rollout_workers: Size = 1
    """Each has env.num_envs / rollout_workers environments, in rollout.pipeline_depth groups."""
    reference_workers: SizeOrZero = 0
    """That compute the reference policy's log-probabilities; 0: the trainer does."""
    reward_workers: SizeOrZero = 0
    """That compute the recipe's reward; 0: the rollout workers do."""
    feature_workers: Size = 1
    """That encode for rollout workers where rollout.split=head; beside the trainer."""
    trainer_ranks: Size = 1
    """That share each minibatch's rows."""
    trainer_sharding: Annotated[str, OneOf(*SHARDINGS)] = "none"
    """full: the ranks also share the policy's weights and the optimiser's state out among them (FSDP2)."""
    streaming: bool = True
    """Shards are worked on as they come; false: when all of them are there."""
    offload: bool = False
    """Roles that share a GPU take turns, and leave its memory meanwhile; nothing streams then."""
    spread: bool = False
    """Workers on as many machines as there are; false: on as few as have room."""
    heartbeat_s: Seconds = 30.0
    """A worker that does not answer for so long is replaced."""
    call_timeout_s: Seconds = 3600.0
    """For one piece of work, after which a worker is replaced."""
    start_timeout_s: Seconds = 600.0
    """For a worker to load its policy and start its simulators."""
    max_restarts: CountOrZero = 100
    """Of each role's workers in a run."""
    trainer_restarts: CountOrZero = 3
    """Of the trainer, each time from the last complete checkpoint."""
    roles: RolesConfig = field(default_factory=RolesConfig)
    device: Annotated[str, OneOf("cpu", "cuda")] = "cpu"
    """Of the policy: cpu or cuda."""
    rollout_threads: Annotated[int, Range(1, 4096)] = 1
    """CPU threads of the policy while simulators compete for the cores."""
    update_threads: Annotated[int, Range(1, 4096)] | None = None
    """CPU threads of an update; null: all cores."""
    micro_batch_size: Count = 320
    """Largest number of policy calls in one forward and backward pass."""
    reuse_frozen: bool = True
    """Compute what is frozen in the policy once per update instead of in each epoch; memory grows with the rollout (docs/pi0.md)."""
    cuda_graphs: bool = True
    """Record the policy's calls as CUDA graphs (on a GPU only): none of their thousands of small kernels waits for Python."""
    gradient_checkpointing: bool = False
    """Compute the backbone's activations again in the backward pass instead of keeping them: slower, and far less memory."""

"""Define the recipe node ``cluster``: processes, devices, placement and time limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from rlinf_vla.config.ranges import (
    OUTSIDE,
    Count,
    CountOrZero,
    Label,
    Matches,
    Name,
    NonNegative,
    OneOf,
    Positive,
    Range,
    Seconds,
    Size,
    SizeOrZero,
)

RUNTIMES = IN_PROCESS, RAY = ("in_process", "ray")
SPLITS = ("none", "head")
SHARDINGS = ("none", "full")
EVEN, MEASURED = ("even", "measured")
PLANS = GIVEN, AUTO = ("given", "auto")
PLACEMENTS = COLLOCATED, DISAGGREGATED, HYBRID = ("collocated", "disaggregated", "hybrid")
BROADCAST, STORE = ("broadcast", "store")
DEVICES = CPU, CUDA, NPU, XPU, MPS, FAKE_GPU = ("cpu", "cuda", "npu", "xpu", "mps", "fake_gpu")
CPU_ROWS, GPU_ROWS = 320, 2048
"""Default micro-batches of a CPU; on a GPU only where memory is not counted in advance."""
HEAD = Matches(
    r"[^\s/]+:\d{1,5}", "HOST:PORT of the cluster's head, as `ray start --head` prints it"
)


THIS = "this machine"


def streams(streaming: bool, offload: bool) -> bool:
    """Whether shards are passed on as they arrive: where roles take turns, each ends first."""
    return streaming and not offload


@dataclass
class NodeConfig:
    """One type of machine in a cluster; an entry of recipe node ``cluster.nodes``."""

    name: Name = THIS
    """Name of the type, for messages."""
    count: Size = 1
    """Number of machines of this type."""
    gpus: Annotated[int, Range(0, 1024)] = 0
    """GPUs per machine."""
    gpu: Label | None = None
    """GPU type."""
    gpu_memory_gb: Positive = 80.0
    """Memory per GPU in GB (10⁹ bytes)."""
    cpus: Size = 8
    """CPU cores per machine."""
    memory_gb: Positive = 32.0
    """Main memory per machine in GB."""
    network_gbps: Positive = 10.0
    """Bandwidth between this machine and others in Gbit/s."""
    gpu_link_gbps: Positive = 100.0
    """Bandwidth between GPUs of one machine, and between a GPU and host memory, in Gbit/s."""
    latency_ms: NonNegative = 1.0
    """Latency of one message between machines, or between workers of one machine."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels by which Ray finds these machines: ray start --labels="type=h100"."""
    spot: bool = False
    """Whether the machine may be preempted at any time; no trainer is placed on it."""
    price_per_hour: NonNegative | None = None
    """Price of one machine per hour; null if unknown."""
    profile: Name | None = None
    """Device type of the measured profile to use; null: that of ``gpu``, or cpu without one."""

    @property
    def device(self) -> str:
        """Device type, by which the machine's profile is found."""
        return self.profile or self.gpu or "cpu"

    @property
    def devices(self) -> int:
        """Devices that can run a policy: the GPUs, or all CPU cores as one device."""
        return self.gpus or 1

    @property
    def memory(self) -> float:
        """Memory of one such device in bytes."""
        return 1e9 * (self.gpu_memory_gb if self.gpus else self.memory_gb)


@dataclass
class RoleConfig:
    """What each worker of a role requests from Ray, besides the GPU of ``cluster.placement``."""

    cpus: Annotated[float, Range(0, 65536)] = 1.0
    """CPU cores per worker, as Ray counts them."""
    resources: dict[str, Annotated[float, Range(0, 1e6)]] = field(default_factory=dict)
    """Custom Ray resources per worker, such as robot: 1."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that a node needs to run the worker, such as market-type: spot."""


@dataclass
class RobotRoleConfig(RoleConfig):
    """Resources of the robot process (docs/online.md); the learner is in the command's process."""

    gpus: Annotated[float, Range(0, 65536)] = 0.0
    """GPUs of the robot process; a fraction lets processes share one, 0 computes on the CPU."""
    resources: dict[str, Annotated[float, Range(0, 1e6)]] = field(
        default_factory=lambda: {"robot": 1.0}
    )


@dataclass
class RolesConfig:
    """What the workers of each role request from Ray."""

    rollout: RoleConfig = field(default_factory=RoleConfig)
    reference: RoleConfig = field(default_factory=RoleConfig)
    reward: RoleConfig = field(default_factory=RoleConfig)
    feature: RoleConfig = field(default_factory=RoleConfig)
    trainer: RoleConfig = field(default_factory=RoleConfig)
    robot: RobotRoleConfig = field(default_factory=RobotRoleConfig)


@dataclass
class ClusterConfig:
    """Where the parts of a run execute. These keys change the speed, never the result."""

    name: Name = MISSING
    """Name of the cluster description; ``cluster=NAME`` chooses it."""
    nodes: list[NodeConfig] = field(default_factory=list)
    """Machines that `rlinf-vla plan` can use (docs/plan.md); empty: this machine."""
    plan: Annotated[str, OneOf(*PLANS)] = "given"
    """given: use the keys below. auto: set runtime, placement, workers, trainer_ranks, streaming,
    offload, micro_batch_size, rollout.pipeline_depth and rollout.split to be fastest
    (docs/plan.md)."""
    replan_after: CountOrZero = 0
    """With a predicted plan: plan again from measurements after this many iterations; 0: never."""
    runtime: Annotated[str, OneOf(*RUNTIMES)] = "in_process"
    """in_process: one process and its simulators. ray: replaceable workers on a Ray cluster."""
    address: Annotated[str, HEAD] | None = field(default=None, metadata=OUTSIDE)
    """HOST:PORT of a Ray cluster's head; null: start a cluster on this machine for this run."""
    placement: Annotated[str, OneOf(*PLACEMENTS)] = COLLOCATED
    """GPUs of rollout workers and trainer ranks, one each. collocated: they share GPUs, from the
    first on. disaggregated: each has its own. hybrid: rollouts use all GPUs, the trainer some."""
    rollout_workers: Size = 1
    """Each has env.num_envs / rollout_workers environments in rollout.pipeline_depth groups."""
    shards_per_worker: Size = 1
    """Shards of a rollout per rollout worker, which has that many times fewer environments. A free
    worker takes the next shard, so with 2 or more, fast workers take more than slow ones."""
    most_rollout_workers: Size | None = None
    """Between iterations, add rollout workers up to this number while the cluster has room, for
    instance on nodes that join. They take shards of the others (shards_per_worker), and their loss
    is no fault. null: rollout_workers."""
    reference_workers: SizeOrZero = 0
    """Workers that compute log-probabilities of the reference policy; 0: the trainer does."""
    reward_workers: SizeOrZero = 0
    """Workers that compute the recipe's reward; 0: the rollout workers compute it."""
    feature_workers: Size = 1
    """With rollout.split=head: workers on the trainer's machine that run the policy's backbone."""
    trainer_ranks: Size = 1
    """Trainer processes; they split the rows of each minibatch (data parallel). For off-policy
    algorithms each has a part of the replay buffers, and computes the rows that it stores."""
    trainer_sharding: Annotated[str, OneOf(*SHARDINGS)] = "none"
    """full: also shard the policy's weights and the optimiser state across the ranks (FSDP2)."""
    trainer_split: Annotated[str, OneOf(EVEN, MEASURED)] = EVEN
    """Rows of a minibatch per trainer rank. even: as many on each. measured: in proportion to the
    measured speeds of the ranks, for GPUs of different types; on-policy, without trainer_sharding.
    Weights then agree with those of even to rounding (docs/training_ranks.md)."""
    weights: Annotated[str, OneOf(AUTO, BROADCAST, STORE)] = AUTO
    """How trained weights reach rollout workers. broadcast: by NCCL between CUDA devices, else by
    gloo, while rollouts go on; a worker then has a second copy of them. store: through Ray's object
    store. auto: broadcast on CUDA, but not with ``offload``; else store (docs/cluster.md)."""
    streaming: bool = True
    """Process each shard of a rollout as it arrives; false: wait until all have arrived."""
    offload: bool = False
    """On-policy roles that share a GPU take turns and free its memory; this disables streaming."""
    spread: bool = False
    """Place workers on as many machines as possible; false: on as few as have room."""
    heartbeat_s: Seconds = 30.0
    """Replace a worker that does not answer for this long."""
    call_timeout_s: Seconds = 3600.0
    """Replace a worker when one call takes longer than this."""
    start_timeout_s: Seconds = 600.0
    """Time limit to place a worker, for it to load its policy and start its simulators, and for the
    trainer ranks to meet."""
    max_restarts: CountOrZero = 100
    """Lost workers that are replaced per role and run; one more ends the run."""
    trainer_restarts: CountOrZero = 3
    """Restarts of a lost trainer per run, each from the last complete checkpoint."""
    roles: RolesConfig = field(default_factory=RolesConfig)
    device: Annotated[str, OneOf(*DEVICES)] = CPU
    """Device of the policy, by PyTorch's name: cpu, cuda (also of ROCm), npu (Ascend), xpu (Intel)
    or mps; docs/gpu.md tells what runs on CUDA alone. fake_gpu: workers get places on GPUs that do
    not exist and compute on the CPU, to try a plan for ``nodes`` on a machine without them."""
    rollout_threads: Annotated[int, Range(1, 4096)] = 1
    """CPU threads of the policy during rollouts, when simulators compete for the cores."""
    update_threads: Annotated[int, Range(1, 4096)] | None = None
    """CPU threads during updates; null: all cores."""
    micro_batch_size: Count | None = CPU_ROWS
    """Maximum number of policy calls per forward and backward pass. null, on a GPU: as many as its
    memory has room for, chosen by `train` before the run (docs/gpu.md)."""
    reuse_frozen: bool | None = True
    """Compute the policy's frozen part once per update, not once per epoch; main memory grows with
    the rollout (docs/pi0.md). null: if there is room, which `train` counts before the run."""
    cuda_graphs: bool = True
    """Record policy calls as CUDA graphs (CUDA only), so that no small kernel waits for Python."""
    fused_kernels: bool = True
    """On CUDA, compute norms, rotations and gated MLPs by liger-kernel, where it is installed."""
    tf32: bool = True
    """Multiply float32 matrices in TF32 (CUDA only): many times faster, with 11 significant bits.
    It concerns a float32 network, and what is float32 in a bfloat16 one; false: exactly."""
    gradient_checkpointing: bool = False
    """Recompute the backbone's activations in the backward pass: slower, far less memory."""

    @property
    def rows(self) -> int:
        """``micro_batch_size``, or its limit where it is null and not chosen yet."""
        return self.micro_batch_size or (GPU_ROWS if self.on_accelerator else CPU_ROWS)

    @property
    def shards(self) -> int:
        """Equal parts of the environments, of which a rollout worker runs one at a time."""
        return self.rollout_workers * self.shards_per_worker

    @property
    def on_gpus(self) -> bool:
        """Whether workers get GPUs, real or fake."""
        return self.device != CPU

    @property
    def torch_device(self) -> str:
        """The device of tensors: cpu for fake GPUs."""
        return CPU if self.device == FAKE_GPU else self.device

    @property
    def on_accelerator(self) -> bool:
        """Whether tensors are on an accelerator, which has memory of its own."""
        return self.torch_device != CPU

    @property
    def broadcast_device(self) -> str:
        """The device of weights that are broadcast: NCCL's, or main memory, as gloo sends."""
        return CUDA if self.device == CUDA else CPU

    @property
    def ray_resource(self) -> str:
        """The name by which Ray counts the devices: "NPU", or "GPU" for those of all others."""
        return "NPU" if self.device == NPU else "GPU"

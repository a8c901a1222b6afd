"""Run a policy for rollouts: fixed batch shapes, no gradients, and CUDA graphs on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.core.devices import CPU, device_of, moved
from rlinf_vla.core.protocols import Policy, RealTimeChunking
from rlinf_vla.core.types import MAX_TASKS, ActionSample, Episodes, Inputs, Observation, Tensors
from rlinf_vla.rollout.noise import CounterNoise

WARMUP = 3


@dataclass(frozen=True)
class Settings:
    """How a policy acts.

    temperature: sampling temperature; 0 is greedy.
    batch_size: environments per policy call, so that every placement makes calls of one shape.
    rounded: act with, and transfer, trainable weights in the dtype of the network's other weights.
    values_ends: the critic values what is seen after a termination, too.
    """

    run_seed: int
    temperature: float
    batch_size: int
    cuda_graphs: bool = True
    rounded: bool = False
    values_ends: bool = False


def rows_chosen(where: Tensor, new: Observation, old: Observation) -> Observation:
    """Return the rows of ``new`` where ``where`` (bool ``[B]``, on the CPU), else of ``old``."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(where.to(a.device).view(-1, *[1] * (a.dim() - 1)), a, b)

    kinds = ((new.images, old.images), (new.jpeg, old.jpeg))
    images, jpeg = (
        {name: pick(value, before[name]) for name, value in kind.items()} for kind, before in kinds
    )
    instruction = [
        a if chosen else b
        for chosen, a, b in zip(where.tolist(), new.instruction, old.instruction, strict=True)
    ]
    return Observation(images, pick(new.state, old.state), instruction, jpeg)


def rows_of(obs: Observation, index: Tensor) -> Observation:
    """Return the environments ``index``, int64, of an observation."""
    images, jpeg = (
        {name: image[index] for name, image in kind.items()} for kind in (obs.images, obs.jpeg)
    )
    return Observation(
        images, obs.state[index], [obs.instruction[row] for row in index.tolist()], jpeg
    )


class Actor:
    """Sample actions and values from a policy in blocks of ``batch_size`` rows.

    Of a split policy the head is enough: features are fetched block by block, in the same shapes.
    Weights may change between calls, but only in place: a CUDA graph reads fixed addresses.
    """

    def __init__(
        self, policy: Policy, settings: Settings, encode: Callable[[Inputs], Tensors] | None = None
    ) -> None:
        """``encode``: returns packed features of prepared inputs; None: from where the policy's
        backbone runs."""
        self.policy = policy
        self.settings = settings
        self.device = device_of(policy)
        self._encode = encode or (policy.elsewhere.encode if policy.elsewhere is not None else None)
        self.requests = self.sent = self.received = 0
        """Of a split policy: blocks encoded so far, and bytes of tensors sent and received."""
        self._act: Callable[[Tensors], Tensors] = self._act_block
        self._value: Callable[[Tensors], Tensors] = self._value_block
        if settings.cuda_graphs and self.device.type in RECORDERS:
            self.record(RECORDERS[self.device.type])

    def record(self, recorder: Recorder) -> None:
        """Make the policy calls from now on through a ``recorder`` of each, such as CudaGraphed."""
        self._act = recorder(self._act_block)
        self._value = recorder(self._value_block)

    def forget(self) -> None:
        """Make policy calls directly again, and free the memory of their recordings."""
        self.record(lambda function: function)

    def prepare(self, obs: Observation) -> Inputs:
        """Return the policy's inputs, on its device; those of a backbone elsewhere on the CPU."""
        if self.policy.elsewhere is not None:
            return self.policy.elsewhere.prepare(obs.to(CPU))
        return self.policy.prepare(obs.to(self.device))

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        """Sample actions; ``step`` int64 ``[B]``: control steps executed in the episodes so far.

        The sample is on the CPU.
        """
        counters = {
            f"{COUNTER}task": noise_task(episodes),
            f"{COUNTER}seed": episodes.seed,
            f"{COUNTER}step": step,
        }
        outputs = moved(self._in_blocks(self._act, moved(inputs | counters, self.device)), CPU)
        latent = {
            name.removeprefix(_LATENT): value
            for name, value in outputs.items()
            if name.startswith(_LATENT)
        }
        return ActionSample(outputs["actions"], latent, outputs["log_prob"], outputs["value"])

    @torch.no_grad()
    def act_onto(
        self, inputs: Inputs, episodes: Episodes, step: Tensor, committed: Tensor, frozen: int
    ) -> ActionSample:
        """Continue ``committed`` actions, see ``RealTimeChunking``; the sample is on the device.

        No inference mode, as guidance may need gradients.
        """
        assert isinstance(self.policy, RealTimeChunking)
        settings = self.settings
        tensors = moved(
            {
                "task": noise_task(episodes),
                "seed": episodes.seed,
                "step": step,
                "actions": committed,
            },
            self.device,
        )
        noise = CounterNoise(settings.run_seed, tensors["task"], tensors["seed"], tensors["step"])
        return self.policy.act_with_prefix(
            self._features(self._fetched(inputs)),
            noise,
            settings.temperature,
            tensors["actions"],
            frozen,
        )

    def value(self, obs: Observation, wanted: Tensor) -> Tensor:
        """Return the critic's estimate where ``wanted``, else 0: float32 ``[B]``, on the CPU.

        ``wanted``: bool ``[B]``, of at least one row.
        """
        rows = whole_blocks(wanted, self.settings.batch_size)
        values = torch.zeros(len(wanted))
        values[rows] = self.values(self.prepare(rows_of(obs, rows)))
        return torch.where(wanted, values, 0)

    def values(self, inputs: Inputs) -> Tensor:
        """Return the critic's estimate of all rows, float32 ``[B]``, on the CPU."""
        return moved(self._in_blocks(self._value, moved(inputs, self.device)), CPU)["value"]

    @torch.inference_mode()
    def _in_blocks(self, function: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
        size = len(next(iter(tensors.values())))
        rows = self.settings.batch_size
        # Copy each block: on some CPUs the last bit of a matrix product depends on the alignment of
        # its operands, and fresh allocations are aligned to 64 bytes.
        blocks = (
            {name: value[start : start + rows].clone() for name, value in tensors.items()}
            for start in range(0, size, rows)
        )
        parts = [self._computed(function, self._fetched(block)) for block in blocks]
        return (
            parts[0]
            if len(parts) == 1
            else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        )

    def _computed(self, function: Callable[[Tensors], Tensors], block: Tensors) -> Tensors:
        return function(block)

    def _fetched(self, block: Tensors) -> Tensors:
        """Replace a block's inputs by packed features if the backbone runs elsewhere."""
        if self._encode is None:
            return block
        counters = {name: value for name, value in block.items() if name.startswith(COUNTER)}
        inputs = {name: value for name, value in block.items() if name not in counters}
        features = self._encode(moved(inputs, CPU))
        self.requests = self.requests + 1
        self.sent = self.sent + nbytes(inputs)
        self.received = self.received + nbytes(features)
        return {
            name: value.clone() for name, value in moved(features, self.device).items()
        } | counters

    def _features(self, inputs: Tensors) -> Any:
        return self.policy.encode(inputs) if self._encode is None else self.policy.unpack(inputs)

    def _act_block(self, tensors: Tensors) -> Tensors:
        counters = (tensors[f"{COUNTER}task"], tensors[f"{COUNTER}seed"], tensors[f"{COUNTER}step"])
        inputs = {name: value for name, value in tensors.items() if not name.startswith(COUNTER)}
        noise = CounterNoise(self.settings.run_seed, *counters)
        sample = self.policy.act(self._features(inputs), noise, self.settings.temperature)
        outputs = {"actions": sample.actions, "log_prob": sample.log_prob, "value": sample.value}
        return outputs | {f"{_LATENT}{name}": value for name, value in sample.latent.items()}

    def _value_block(self, tensors: Tensors) -> Tensors:
        return {"value": self.policy.value(self._features(tensors))}


def whole_blocks(wanted: Tensor, size: int) -> Tensor:
    """Return the rows, int64, of blocks of ``size`` rows in which any is ``wanted``, bool ``[B]``.

    Blocks are computed whole: the size of a matrix product and a row's place in it can change its
    last bits, so gathered rows would get other values than among all. A block holds the same
    environments in every plan, so all plans leave out the same ones.
    """
    return torch.cat([block.any().expand(len(block)) for block in wanted.split(size)]).nonzero()[
        :, 0
    ]


def nbytes(tensors: Tensors) -> int:
    """Return the total size in bytes."""
    return sum(value.nbytes for value in tensors.values())


def noise_task(episodes: Episodes) -> Tensor:
    """Return a noise key per task and attempt, int64 ``[B]``, used with seed and step."""
    return episodes.task_id + episodes.attempt * MAX_TASKS


COUNTER, _LATENT = "counter.", "latent."


class CudaGraphed:
    """Record a function of GPU tensors as one CUDA graph per set of shapes, and replay it.

    One launch replaces thousands of small ones. The function must not synchronise with the GPU or
    copy between devices. It may read changing values only from its argument or from fixed storage.
    """

    def __init__(self, function: Callable[[Tensors], Tensors]) -> None:
        self.function = function
        self._recordings: dict[
            tuple[object, ...], tuple[torch.cuda.CUDAGraph, Tensors, Tensors]
        ] = {}

    def __call__(self, tensors: Tensors) -> Tensors:
        key = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        if key not in self._recordings:
            self._recordings[key] = self._record(
                {name: value.clone() for name, value in tensors.items()}
            )
        graph, arguments, results = self._recordings[key]
        for name, value in tensors.items():
            arguments[name].copy_(value)
        graph.replay()
        return {name: value.clone() for name, value in results.items()}

    def _record(self, arguments: Tensors) -> tuple[torch.cuda.CUDAGraph, Tensors, Tensors]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            aside
        ):  # libraries select kernels and allocate workspace during the warm-up
            for _ in range(WARMUP):
                self.function(arguments)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # weights may arrive meanwhile, in a thread that allocates memory for them
        with torch.cuda.graph(graph, pool=_POOL.of(graph), capture_error_mode="thread_local"):
            results = self.function(arguments)
        return graph, arguments, results


class GraphPool:
    """Memory that the graphs of this process share: they run one after the other.

    What a graph returns stays its own, and is copied after each replay. PyTorch frees the memory
    with its last graph, and then refuses its handle, so the next graph gets a new one.
    """

    def __init__(self, new_handle: Callable[[], Any] = torch.cuda.graph_pool_handle) -> None:
        self._new_handle = new_handle
        self._handle: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def of(self, graph: Any) -> Any:
        """Return the handle for a ``graph`` that is about to be recorded."""
        if not self._graphs:
            self._handle = self._new_handle()
        self._graphs.add(graph)
        return self._handle


_POOL = GraphPool()


Recorder = Callable[[Callable[[Tensors], Tensors]], Callable[[Tensors], Tensors]]
RECORDERS: dict[str, Recorder] = {"cuda": CudaGraphed}
"""Type of device -> what records the policy's calls there."""

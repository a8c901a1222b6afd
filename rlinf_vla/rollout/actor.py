"""The policy as rollouts call it: blocks of one shape, without gradients; on a GPU, each shape is recorded once as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.protocols import Policy
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.types import MAX_TASKS, ActionSample, Episodes, Inputs, Tensors

WARMUP = 3


@dataclass(frozen=True)
class Settings:
    """temperature: 0 is greedy. batch_size: environments per policy call, so that every plan makes calls of one shape. rounded: what trains
    acts, and travels, in the dtype of the network's other weights."""

    run_seed: int
    temperature: float
    batch_size: int
    cuda_graphs: bool = True
    rounded: bool = False


class Actor:
    """What a rollout wants of a policy. Its weights may change between calls, but only in place: a graph reads them where they lie."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        device = next(policy.parameters()).device
        graphs = device.type == "cuda" and settings.cuda_graphs
        self._act: Callable[[Tensors], Tensors] = Recorded(self._act_block) if graphs else self._act_block
        self._value: Callable[[Tensors], Tensors] = Recorded(self._value_block) if graphs else self._value_block

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        """``step`` int64 ``[B]``: control steps executed in the episodes so far."""
        device = next(iter(inputs.values())).device
        counters = {"task": noise_task(episodes), "seed": episodes.seed, "step": step}
        found = self._in_blocks(self._act, inputs | {f"{COUNTER}{name}": value.to(device) for name, value in counters.items()})
        latent = {name.removeprefix(_LATENT): value for name, value in found.items() if name.startswith(_LATENT)}
        return ActionSample(found["actions"], latent, found["log_prob"], found["value"])

    def value(self, inputs: Inputs) -> Tensor:
        """The critic's estimate, float32 ``[B]``."""
        return self._in_blocks(self._value, inputs)["value"]

    @torch.inference_mode()
    def _in_blocks(self, function: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
        size, rows = len(next(iter(tensors.values()))), self.settings.batch_size
        # copies: on some CPUs the last bit of a product depends on where its operands begin, and an allocation begins at 64 bytes
        blocks = ({name: value[start : start + rows].clone() for name, value in tensors.items()} for start in range(0, size, rows))
        parts = [function(block) for block in blocks]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _features(self, inputs: Tensors) -> Any:
        return self.policy.encode(inputs)

    def _act_block(self, tensors: Tensors) -> Tensors:
        counters = (tensors[f"{COUNTER}task"], tensors[f"{COUNTER}seed"], tensors[f"{COUNTER}step"])
        inputs = {name: value for name, value in tensors.items() if not name.startswith(COUNTER)}
        noise = CounterNoise(self.settings.run_seed, *counters) if self.settings.temperature > 0 else None
        sample = self.policy.act(self._features(inputs), noise, self.settings.temperature)
        found = {"actions": sample.actions, "log_prob": sample.log_prob, "value": sample.value}
        return found | {f"{_LATENT}{name}": value for name, value in sample.latent.items()}

    def _value_block(self, tensors: Tensors) -> Tensors:
        return {"value": self.policy.value(self._features(tensors))}


def noise_task(episodes: Episodes) -> Tensor:
    """What keys the noise beside seed and step: int64 ``[B]``, different for every task and every attempt at an episode."""
    return episodes.task_id + episodes.attempt * MAX_TASKS


COUNTER, _LATENT = "counter.", "latent."


class Recorded:
    """A function of GPU tensors, recorded per shapes as a CUDA graph and replayed: one launch instead of thousands of small ones.

    It must neither wait for the GPU nor copy between devices, and must read all that changes from its argument or from storage that
    stays where it is.
    """

    def __init__(self, function: Callable[[Tensors], Tensors]) -> None:
        self._function = function
        self._recordings: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Tensors, Tensors]] = {}

    def __call__(self, tensors: Tensors) -> Tensors:
        key = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        if key not in self._recordings:
            self._recordings[key] = self._record({name: value.clone() for name, value in tensors.items()})
        graph, arguments, results = self._recordings[key]
        for name, value in tensors.items():
            arguments[name].copy_(value)
        graph.replay()
        return {name: value.clone() for name, value in results.items()}

    def _record(self, arguments: Tensors) -> tuple[torch.cuda.CUDAGraph, Tensors, Tensors]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries choose their kernels and take their memory now
            for _ in range(WARMUP):
                self._function(arguments)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self._function(arguments)
        return graph, arguments, results

"""Broadcast weights from the trainer to rollout workers in a process group of their own.

The group is separate from that of the trainer ranks: gloo on the CPU, NCCL on GPUs. Rank 0 is the
trainer's first rank, the source; the others are rollout workers. A group never changes: when a
worker is lost or joins, the next *generation* of the group is formed, under another prefix of the
source's TCPStore. Whatever fails in a group fails within its timeout on every member.

Both ends hold a version in a :class:`WeightsBuffer` beside the weights in use: the trainer goes on
learning while it sends, and a worker goes on acting while it receives. The trainer's is in main
memory, and its GPU holds one bucket at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from rlinf_vla.core.types import Tensors
from rlinf_vla.training.ranks import BUCKET

dist: Any = torch.distributed
"""Its annotations lack the stores and gloo's options."""
TIMEOUT_S = 5.0
"""Seconds to form a group, and for each bucket. A broadcast that fails costs about this once."""

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name -> dtype and shape of each tensor, in the order in which they are sent."""


def layout_of(tensors: Tensors) -> Layout:
    return {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}


class WeightsBuffer:
    """Memory for the tensors of a layout: one flat tensor per dtype, sent in buckets."""

    def __init__(self, layout: Layout, device: str, bucket: int = BUCKET) -> None:
        """``bucket``: maximum size of a bucket in bytes."""
        self.tensors: Tensors = {}
        """Views of the flat tensors, by name."""
        self.buckets: list[Tensor] = []
        for dtype in dict.fromkeys(dtype for dtype, _ in layout.values()):
            shapes = {
                name: torch.Size(shape)
                for name, (tensor_dtype, shape) in layout.items()
                if tensor_dtype == dtype
            }
            flat = torch.empty(
                sum(shape.numel() for shape in shapes.values()), dtype=dtype, device=device
            )
            pieces = flat.split([shape.numel() for shape in shapes.values()])
            self.tensors |= {
                name: piece.view(shape)
                for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
            }
            self.buckets += [
                part for part in flat.split(max(1, bucket // dtype.itemsize)) if len(part)
            ]

    def lend(self) -> None:
        """Keep the memory until what the present stream does with it from now on has ended.

        Without this, it would be free for the stream in which it was allocated as soon as nothing
        refers to it.
        """
        for bucket in self.buckets:
            if bucket.is_cuda:
                bucket.record_stream(torch.cuda.current_stream())

    def fill(self, tensors: Tensors) -> None:
        for name, value in tensors.items():
            self.tensors[name].copy_(value)


@dataclass(frozen=True)
class Order:
    """What all members of a group need to know about one broadcast."""

    address: tuple[str, int]
    """Host and port of the source's TCPStore."""
    generation: int
    size: int
    """Members of the group, the source included."""
    version: int
    timeout_s: float = TIMEOUT_S

    def limit_s(self, layout: Layout) -> float:
        """Seconds after which the broadcast has failed, even if the backend does not say so."""
        return self.timeout_s * (2 + len(WeightsBuffer(layout, "meta").buckets))


class Membership:
    """This process's place in the newest generation of the group that it was asked to join."""

    def __init__(self, device: str, host: str) -> None:
        """``device``: of the tensors; it selects gloo or NCCL. ``host``: this machine's address.

        A process that has other groups of NCCL must form them before.
        """
        self._device = device
        self._host = host
        if device != "cpu":
            # A group formed from now on has no watchdog, which would end the process when an
            # operation is late. Instead, wait() raises.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        self._generation: int | None = None
        self._group: Any = None
        self._stream: Any = None

    def broadcast(self, order: Order, rank: int, buffer: WeightsBuffer) -> None:
        """Send the buffer (rank 0) or receive into it; form the group first if it is a new one.

        Raises RuntimeError if a member is lost or late. The group is unusable then.
        """
        try:
            if order.generation != self._generation:
                self.leave()
                self._group = self._form(order, rank)
                self._generation = order.generation
            with self.stream():
                for bucket in buffer.buckets:
                    self._group.broadcast(bucket.to(self._device), 0).wait()
        except RuntimeError:
            self.leave()
            raise

    @contextmanager
    def stream(self) -> Iterator[None]:
        """On a GPU: do not queue behind the policy's work, and end when what was started has ended.

        What is received must be allocated in it, too. Memory that another stream has freed may
        still be read or written there.
        """
        if self._device == "cpu":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def leave(self) -> None:
        """End the operations of the present group, if there is one."""
        if self._group is not None:
            self._group.abort()
        self._group = self._generation = None

    def _form(self, order: Order, rank: int) -> Any:
        patience = timedelta(seconds=order.timeout_s)
        client = dist.TCPStore(
            *order.address, is_master=False, wait_for_workers=False, timeout=patience
        )
        store = dist.PrefixStore(f"weights/{order.generation}", client)
        store.set(f"here/{rank}", "")
        store.wait(
            [f"here/{member}" for member in range(order.size)], patience
        )  # NCCL would wait for ever for a lost member
        if self._device == "cpu":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            options._timeout = patience
            return dist.ProcessGroupGloo(store, rank, order.size, options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        return dist.ProcessGroupNCCL(store, rank, order.size, options)


@dataclass(frozen=True)
class Held:
    """What the trainer says about weights to publish."""

    nbytes: int = 0
    """Of all trained weights."""
    layout: Layout = field(default_factory=dict)
    """What is ready to be broadcast; nothing if that was not asked for."""
    address: tuple[str, int] = ("", 0)
    """Where to form a group."""


class Outbox:
    """The source's end: one version of the weights, copied so that they may change meanwhile."""

    def __init__(self, device: str, host: str) -> None:
        self._host = host
        self._membership = Membership(device, host)
        self._store: Any = None
        self._held: tuple[int, WeightsBuffer] | None = None

    def address(self) -> tuple[str, int]:
        """Return the host and port where groups are formed; the first call opens it."""
        if self._store is None:
            self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return self._host, self._store.port

    def hold(self, version: int, tensors: Tensors) -> Layout:
        """Copy a version, in place of the one held before; return its layout."""
        layout = layout_of(tensors)
        buffer = WeightsBuffer(layout, "cpu")
        buffer.fill(tensors)
        self._held = version, buffer
        return layout

    def send(self, order: Order) -> bool:
        """Broadcast the version of ``order``, which is then held no more; return if it worked."""
        (version, buffer) = self._held or (None, None)
        self._held = None
        if buffer is None or version != order.version:
            return False
        try:
            self._membership.broadcast(order, 0, buffer)
        except RuntimeError:
            return False
        return True


class Busy:
    """Seconds that one thread has worked so far, which other threads may ask for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = 0.0
        self._since: float | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        self._since = began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._ended = self._ended + time.perf_counter() - began
                self._since = None

    def seconds(self, now: float) -> float:
        """Return the seconds until ``now``, of ``time.perf_counter``."""
        with self._lock:
            return self._ended + (0.0 if self._since is None else max(0.0, now - self._since))


@dataclass(frozen=True)
class Received:
    """How a worker's part of a broadcast went. overlapped: seconds that the worker worked in."""

    arrived: bool
    seconds: float
    overlapped: float


class Inbox:
    """A worker's end: versions that have arrived and are not in use yet."""

    def __init__(self, device: str, host: str) -> None:
        self._device = device
        self._membership = Membership(device, host)
        self._changed = threading.Condition()
        self._arrived: dict[int, WeightsBuffer] = {}
        self._receiving: int | None = None
        self._deadline = 0.0
        """Until when to wait for what is being received; of ``time.monotonic``."""
        self._settled = -1
        """Newest version whose broadcast has ended, for better or worse."""
        self.busy = Busy()
        """Work that a broadcast may overlap."""

    def receive(self, rank: int, order: Order, layout: Layout, oldest: int) -> Received:
        """Receive a version beside the one in use. ``oldest``: earlier ones are needed no more."""
        started = time.perf_counter()
        busy = self.busy.seconds(started)
        with self._changed:
            self._receiving = order.version
            self._deadline = time.monotonic() + order.limit_s(layout)
            self._arrived = {
                version: buffer for version, buffer in self._arrived.items() if version >= oldest
            }
            self._changed.notify_all()
        buffer = None
        try:
            with self._membership.stream():
                incoming = WeightsBuffer(layout, self._device)
                self._membership.broadcast(order, rank, incoming)
            buffer = incoming
        except RuntimeError:  # also out of memory
            pass
        finally:
            with self._changed:
                self._receiving = None
                self._settled = order.version
                if buffer is not None:
                    self._arrived[order.version] = buffer
                self._changed.notify_all()
        ended = time.perf_counter()
        return Received(
            buffer is not None,
            ended - started,
            min(ended - started, self.busy.seconds(ended) - busy),
        )

    def take(self, version: int, patience_s: float = TIMEOUT_S) -> Tensors | None:
        """Remove and return a version; wait if it is arriving. None: it did not or will not arrive.

        ``patience_s``: time for the order to receive it to arrive after the first work with it.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._settled >= version or self._receiving == version, patience_s
            )
            self._changed.wait_for(
                lambda: self._receiving != version, max(0.0, self._deadline - time.monotonic())
            )
            buffer = self._arrived.pop(version, None)
        if buffer is None:
            return None
        buffer.lend()
        return buffer.tensors

"""Save and load atomic checkpoints; ``checkpoint_files.py`` has their layout.

Tensors of any size are written and read as safetensors, one at a time. The library's ``save_file``
needs all tensors at once, and ``load_file`` reads all: of a 7B network that is trained whole,
weights, masters and moments are 105 GB. Format: github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import STEP_PREFIX, digest, replacing_directory, step_name
from rlinf_vla.core.origin import Origin
from rlinf_vla.core.protocols import Learner, Policy
from rlinf_vla.core.types import Tensors
from rlinf_vla.training.checkpoint_files import (
    ADAPTER,
    COMPLETE,
    HEADS,
    OPTIMIZER,
    STATE,
    complete_checkpoints,
    verify,
)
from rlinf_vla.training.lora import (
    adapter_name,
    adapter_state,
    copy_all,
    is_lora,
    load_adapter,
    read_tensors,
    save_adapter,
    stored_adapter,
    write_tensors,
)
from rlinf_vla.training.ranks import Spread, gather_full, rank
from rlinf_vla.training.trainer import Trainer

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_parts(spread: Spread, parts: Iterator[tuple[str, Tensor]], path: Path) -> None:
    """Write ``parts``, which are those of ``spread``."""
    header = {}
    end = 0
    for name, (dtype, shape) in spread.described().items():
        begin = end
        end += shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, whole in parts:
            numbers = whole.detach().cpu().contiguous().reshape(-1)
            file.write(numbers.view(torch.uint8).numpy().data)
    path.chmod(0o644)


class Stored(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for."""

    def __init__(self, file: safe_open) -> None:
        self._file = file
        self._names = list(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def opened(path: Path) -> Iterator[Stored]:
    with safe_open(path, "pt") as file:
        yield Stored(file)


EARLIER, MODEL = "version_{}.safetensors", "model"
logger = logging.getLogger(__name__)


def save_checkpoint(
    directory: Path,
    policy: Learner,
    trainer: Trainer,
    state: dict[str, Any],
    keep: int,
    earlier: Mapping[int, Tensors] | None = None,
) -> Path:
    """Write ``directory/step_<state["iteration"]>``; keep only it and ``keep - 1`` before it.

    Of a trainer with moving averages these are the weights, and its state has the others.
    ``state``: JSON, to which the digests of the model's files are added. ``earlier``: trainable
    weights of older versions that still have rollouts to collect (``algorithm.staleness``). All
    trainer ranks must call it, and rank 0 writes; the checkpoint does not depend on the number of
    ranks.
    """
    final = directory / step_name(state["iteration"])
    backbone = (
        policy.backbone
        if isinstance(policy, Policy) and any(map(is_lora, trainer.parameters))
        else None
    )
    weights = trainer.spread_weights()
    adapters, heads = _renamed(weights, True), _renamed(weights, False)
    factors = (
        gather_full(Spread({**adapter_state(backbone), **adapters.tensors}, adapters.wholes))
        if backbone is not None
        else {}
    )
    spreads = {HEADS: heads, OPTIMIZER: trainer.spread_state()}
    parts = {name: spread.parts() for name, spread in spreads.items()}
    try:
        if rank() == 0:
            _write(final, policy, factors, spreads, parts, state, earlier or {})
    finally:  # no rank may wait for another's, also if the disk of rank 0 is full
        for _ in chain(*parts.values()):
            pass
    if rank() != 0:
        return final
    logger.info("wrote %s, %d trained tensors", final, len(factors) + len(heads.tensors))
    checkpoints = complete_checkpoints(directory)
    after = checkpoints.index(final) + 1
    for old in (
        checkpoints[: max(0, after - keep)] + checkpoints[after:]
    ):  # later ones are of what a run left that resumed further back
        shutil.rmtree(old, ignore_errors=True)
        logger.debug("removed %s: checkpoints.keep=%d", old, keep)
    return final


def _renamed(weights: Spread, of_adapters: bool) -> Spread:
    """Return the adapters under the names that peft reads, or the other weights."""

    def part(tensors: Mapping[str, Tensor]) -> Tensors:
        return {
            adapter_name(name.removeprefix("backbone.")) if of_adapters else name: tensor
            for name, tensor in tensors.items()
            if is_lora(name) == of_adapters
        }

    return Spread(part(weights.tensors), part(weights.wholes))


def _write(
    final: Path,
    policy: Learner,
    factors: Tensors,
    spreads: Mapping[str, Spread],
    parts: Mapping[str, Iterator[tuple[str, Tensor]]],
    state: dict[str, Any],
    earlier: Mapping[int, Tensors],
) -> None:
    """Write the directory ``final``; see ``save_checkpoint``."""
    # of processes that were killed while they wrote
    for partial in final.parent.glob(f".{STEP_PREFIX}*"):
        shutil.rmtree(partial, ignore_errors=True)
    with replacing_directory(final) as aside:
        if factors:
            assert isinstance(policy, Policy)
            save_adapter(policy.backbone, factors, aside / ADAPTER)
        for name, spread in spreads.items():
            write_parts(spread, parts[name], aside / name)
        for version, tensors in earlier.items():
            write_tensors(tensors, aside / EARLIER.format(version))
        origin = _origin(policy)
        model = {} if origin is None else {MODEL: origin.digests()}
        (aside / STATE).write_text(json.dumps(state | model, indent=1) + "\n")
        digests = {
            str(path.relative_to(aside)): digest(path)
            for path in sorted(aside.rglob("*"))
            if path.is_file()
        }
        (aside / COMPLETE).write_text(json.dumps(digests, indent=1) + "\n")


def load_checkpoint(
    checkpoint: Path, policy: Learner, trainer: Trainer | None = None
) -> dict[str, Any]:
    """Load weights into ``policy`` and optimiser state into ``trainer``; return the ``state``.

    ``policy`` must be built with the same model.* settings. Raises UserError if the checkpoint is
    damaged or belongs to another model.
    """
    verify(checkpoint)
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    adapted = (checkpoint / ADAPTER).exists()
    if isinstance(policy, Policy) and policy.elsewhere is not None:
        _load_head(checkpoint, policy, adapted)
        return state
    if MODEL in state and isinstance(policy, Policy) and policy.origin is not None and rank() == 0:
        policy.origin.require(state[MODEL], checkpoint)
    if adapted != any(is_lora(name) and p.requires_grad for name, p in policy.named_parameters()):
        how = "with" if adapted else "without"
        raise UserError(
            f"{checkpoint} was trained {how} LoRA, unlike model.lora.rank: use the recipe of its run"
        )
    with torch.no_grad():
        if adapted and isinstance(policy, Policy):
            load_adapter(policy.backbone, checkpoint / ADAPTER)
        own = {
            name: p
            for name, p in policy.named_parameters()
            if p.requires_grad and not is_lora(name)
        }
        with opened(checkpoint / HEADS) as heads:
            copy_all(heads, own, checkpoint)
    if trainer is not None:
        if not (checkpoint / OPTIMIZER).exists():
            raise UserError(
                f"{checkpoint} was shared without its optimiser state: start a new run from it, with checkpoint={checkpoint}"
            )
        try:
            with opened(checkpoint / OPTIMIZER) as tensors:
                trainer.load_state(tensors)
        except (KeyError, RuntimeError):
            message = "has the optimiser state of another algorithm or version: start again with resume=never"
            raise UserError(f"{checkpoint} {message}") from None
    logger.info(
        "loaded %s %s optimiser state", checkpoint, "without" if trainer is None else "with"
    )
    return state


def begin_digests(policy: Learner) -> None:
    """Begin to compute what ``save_checkpoint`` adds to the state; every trainer rank calls it."""
    if rank() == 0 and (origin := _origin(policy)) is not None:
        origin.begin()


def _origin(policy: Learner) -> Origin | None:
    """Return the model's files; None if a checkpoint has all weights, or if they are not known."""
    if not isinstance(policy, Policy) or all(p.requires_grad for p in policy.parameters()):
        return None
    return policy.origin


def _load_head(checkpoint: Path, policy: Policy, adapted: bool) -> None:
    """Load the head's part; the digest of the backbone shows whether the rest is what it needs."""
    assert policy.elsewhere is not None
    if adapted and not hasattr(policy.backbone, "peft_config"):
        raise UserError(
            f"{checkpoint} was trained with LoRA, unlike model.lora.rank: use the recipe of its run"
        )
    adapter = stored_adapter(policy.backbone, checkpoint / ADAPTER) if adapted else {}
    head = policy.elsewhere.trained(adapter | load_file(checkpoint / HEADS))
    with torch.no_grad():
        copy_all(
            head, {name: p for name, p in policy.named_parameters() if p.requires_grad}, checkpoint
        )


def load_earlier(checkpoint: Path) -> dict[int, Tensors]:
    """Return the ``earlier`` weights given to ``save_checkpoint``, by version."""
    return {
        int(path.stem.rpartition("_")[2]): load_file(path)
        for path in checkpoint.glob(EARLIER.format("*"))
    }


def save_heads(policy: Policy, directory: Path) -> None:
    """Save what is outside the backbone and in no official layout: the critic, learnt noise."""
    write_tensors(_heads(policy), directory / HEADS)


def load_heads(policy: Policy, directory: Path, base: Policy | None = None) -> None:
    """Load the heads in ``directory``, if any, of ``policy`` or of the ``base`` that it wraps.

    Raises UserError if they belong to another model.
    """
    if not (directory / HEADS).exists():
        return
    with torch.no_grad():
        stored = read_tensors(
            directory / HEADS, "copy it again, or delete it to begin with fresh heads"
        )
        if base is not None and stored.keys() == _heads(base).keys():
            policy = base
        copy_all(stored, _heads(policy), directory / HEADS)


def _heads(policy: Policy) -> dict[str, Tensor]:
    return {
        name: p.detach()
        for name, p in policy.named_parameters()
        if not name.startswith("backbone.")
    }

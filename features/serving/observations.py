"""Turn messages into requests: observations, noise keys, and how to act on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.serve import ServeConfig
from rlinf_vla.core.images import padded, picture_within
from rlinf_vla.core.protocols import Convention, PolicySpec
from rlinf_vla.core.types import MAX_ATTEMPTS, MAX_TASKS, Episodes, Observation
from rlinf_vla.features.serving.array_messages import MessageError
from rlinf_vla.features.serving.observation_keys import DROID, LEROBOT, LEROBOT_IMAGE, LIBERO

LONGEST = 1000
"""Characters of an instruction."""
SEEDS = 1 << 32
MOST_STEPS = 1 << 31


@dataclass(frozen=True)
class Keys:
    """Where a dialect's observation holds what a policy sees.

    image: key of an image, with ``{}`` for its name. images: keys of images with other names.
    state: keys that are joined. pads: whether images of another size are resized, with black bars;
    else they are refused if they are smaller than those of a policy without bars. convention: what
    is known of them.
    """

    image: str
    state: tuple[str, ...]
    prompt: str
    images: Mapping[str, str] = field(default_factory=dict)
    pads: bool = False
    convention: Convention = Convention()  # noqa: RUF009  (frozen)


NATIVE = Keys("images.{}", ("state",), "instruction")
PRESETS = {
    "native": NATIVE,
    "libero": Keys(
        "observation/{}",
        tuple(LIBERO.state),
        LIBERO.prompt,
        LIBERO.images,
        pads=True,
        convention=Convention(gripper="close_positive", state="axis_angle", images="rot180"),
    ),
    "droid": Keys("observation/{}", tuple(DROID.state), DROID.prompt, DROID.images, pads=True),
}
SGLANG = Keys(LEROBOT_IMAGE, tuple(LEROBOT.state), LEROBOT.prompt)
VLA_EVAL = Keys("images.{}", ("states",), "task_description", {"base": "images.agentview"})


def chosen(config: ServeConfig, spec: PolicySpec) -> Keys:
    """Return the keys of the recipe. Raises UserError if the policy cannot read what they hold."""
    keys = PRESETS[config.observation]
    where = f"serve.observation={config.observation}"
    if unknown := sorted(config.images.keys() - spec.images.keys()):
        raise UserError(
            f"serve.images names {unknown[0]}, the policy's images are {', '.join(spec.images)}: use these names"
        )
    images = {**keys.images, **config.images}
    if keys.images and (absent := [name for name in spec.images if name not in images]):
        raise UserError(
            f"the policy needs image {absent[0]!r}, which {where} does not name: give +serve.images.{absent[0]}=KEY"
        )
    for part in ("gripper", "images", *(["state"] if spec.state_dim else [])):
        ours, theirs = getattr(spec.convention, part), getattr(keys.convention, part)
        if None not in (ours, theirs) and ours != theirs:
            raise UserError(
                f"the policy has {part} as {ours}, {where} means {theirs}: choose another model.checkpoint or observation"
            )
    return replace(keys, images=images, state=tuple(config.state) or keys.state)


@dataclass(frozen=True)
class Request:
    """Rows for the policy: an observation of ``B`` rows on the CPU, and their noise keys.

    alone: never join it with other requests, because the size of a batch changes the last bits of
    a product of matrices. committed: actions ``[B, N, D]`` that the chunk continues, of which
    ``frozen`` are executed before it arrives (``RealTimeChunking``). single: whether the reply has
    no batch dimension. encode: whether it asks for features instead of actions.
    """

    observation: Observation
    episodes: Episodes
    step: Tensor
    temperature: float
    run_seed: int
    alone: bool = False
    committed: Tensor | None = None
    frozen: int = 0
    single: bool = True
    encode: bool = False

    @property
    def rows(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Defaults:
    """What a request uses that does not say otherwise."""

    temperature: float
    run_seed: int
    most_rows: int


def flat(message: Any, prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested maps under dotted names. Raises MessageError for no map."""
    if not isinstance(message, dict):
        raise MessageError(f"the message is {_kind(message)}, a map is expected")
    entries: dict[str, Any] = {}
    for name, value in message.items():
        entries |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return entries


def name_in(message: Mapping[str, Any], key: str) -> str | None:
    """Return the text under ``key``, None without it. Raises MessageError for anything else."""
    value = message.get(key)
    if not isinstance(value, str | None):
        raise MessageError(f"{key} is {_kind(value)}: text is expected")
    return value


def read_request(
    found: dict[str, Any], keys: Keys, spec: PolicySpec, defaults: Defaults, seed: int, step: int
) -> Request:
    """Return the request that a ``flat`` message holds; other entries of it are ignored.

    ``seed`` and ``step``: noise keys, in place of the message's ``episode`` and ``step``. Raises
    MessageError.
    """
    images = {}
    single = True
    for name, size in spec.images.items():
        key = keys.images.get(name, keys.image.format(name))
        images[name], single = _image(found, key, size, keys.pads, spec.bars)
    if not images:
        first = _numbers(found, keys.state[0]) if keys.state[0] in found else np.empty(0)
        single = first.ndim < 2
    rows = {len(image) for image in images.values()} or {1 if single else len(first)}
    if len(rows) > 1 or not 1 <= (count := rows.pop()) <= defaults.most_rows:
        raise MessageError(
            f"a request has the same number of rows in all its images, at least 1 and at most {defaults.most_rows}"
        )
    observation = Observation(
        images,
        _state(found, keys.state, spec.state_dim, count),
        _instructions(found.get(keys.prompt), count),
    )
    episodes, steps, keyed = _noise_keys(found, count, seed, step)
    request = Request(
        observation,
        episodes,
        steps,
        _number(found, "temperature", defaults.temperature, 0, 100),
        int(_number(found, "run_seed", defaults.run_seed, 0, SEEDS - 1, whole=True)),
        alone=keyed or not single,
        single=single,
    )
    return _committed(found, request, spec)


def _image(
    entries: dict[str, Any], key: str, size: tuple[int, int], pads: bool, bars: float | None
) -> tuple[Tensor, bool]:
    image = entries.get(key)
    if (
        not isinstance(image, np.ndarray)
        or image.dtype != np.uint8
        or image.ndim not in (3, 4)
        or image.shape[-1] != 3
    ):
        raise MessageError(
            f"{key} is {_kind(image)}: an image uint8 [H, W, 3] is expected, or a batch of them"
        )
    single = image.ndim == 3
    rows = torch.from_numpy(np.array(image[None] if single else image))
    shape = (rows.shape[1], rows.shape[2])
    if not len(rows) or 0 in shape:
        raise MessageError(f"{key} is empty")
    if shape != size and (pads or bars is not None):
        if max(shape) / min(shape) > 100 or min(picture_within(shape, size, 0.5)[0]) < 1:
            raise MessageError(f"{key} is {shape[0]}x{shape[1]}: too narrow")
        return rows if bars is not None else padded(
            rows, size
        ), single  # such a policy makes its own bars
    if shape[0] < size[0] or shape[1] < size[1]:
        raise MessageError(
            f"{key} is {shape[0]}x{shape[1]} pixels: the policy needs {size[0]}x{size[1]} or more"
        )
    return rows, single


def _state(entries: dict[str, Any], keys: Sequence[str], size: int, count: int) -> Tensor:
    if not size:
        return torch.zeros(count, 0)
    parts = []
    for key in keys:
        part = _numbers(entries, key)
        if part.ndim > 2 or ((part.ndim == 2 or count > 1) and part.shape[:1] != (count,)):
            raise MessageError(
                f"{key} is {_kind(entries.get(key))}: {count} row(s) of numbers are expected"
            )
        parts.append(part.reshape(count, -1) if part.size else part.reshape(count, 0))
    state = np.concatenate(parts, axis=1)
    if state.shape[1] != size or not np.isfinite(state).all():
        raise MessageError(
            f"{' and '.join(keys)} have {state.shape[1]} numbers in a row: the policy needs {size}, all finite"
        )
    return torch.from_numpy(state)


def _instructions(value: Any, count: int) -> list[str]:
    texts = [value] * count if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) != count or not all(map(_is_instruction, texts)):
        raise MessageError(
            f"the instruction is {_kind(value)}: text of at most {LONGEST} characters is expected, one for each row"
        )
    return list(texts)


def _is_instruction(text: Any) -> bool:
    return (
        isinstance(text, str)
        and len(text) <= LONGEST
        and not any("\ud800" <= character <= "\udfff" for character in text)
    )  # JSON may hold those


def _noise_keys(
    entries: dict[str, Any], count: int, seed: int, step: int
) -> tuple[Episodes, Tensor, bool]:
    """Return episodes, steps, and whether the message gives them."""
    keyed = "episode.seed" in entries
    if not keyed:
        zeros = torch.zeros(count, dtype=torch.int64)
        return (
            Episodes(zeros, zeros + seed % SEEDS, torch.arange(count) % MAX_ATTEMPTS),
            zeros + step % MOST_STEPS,
            False,
        )
    limits = {
        "episode.task": MAX_TASKS,
        "episode.seed": SEEDS,
        "episode.attempt": MAX_ATTEMPTS,
        "step": MOST_STEPS,
    }
    task, seeds, attempt, steps = (
        _whole_numbers(entries.get(key, 0), key, count, limit) for key, limit in limits.items()
    )
    return Episodes(task, seeds, attempt), steps, True


def _whole_numbers(value: Any, key: str, count: int, limit: int) -> Tensor:
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of different lengths
        numbers = np.empty(0)
    if (
        numbers.dtype.kind not in "iu"
        or numbers.size not in (1, count)
        or numbers.min() < 0
        or numbers.max() >= limit
    ):
        raise MessageError(
            f"{key} is {_kind(value)}: whole numbers from 0 to {limit - 1} are expected, one for each row"
        )
    return torch.from_numpy(np.broadcast_to(numbers.astype(np.int64).reshape(-1), (count,)).copy())


def _number(
    entries: dict[str, Any], key: str, default: float, low: float, high: float, whole: bool = False
) -> float:
    value = entries.get(key, default)
    value = value.item() if isinstance(value, np.generic) else value
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else int | float)
        or not low <= value <= high
    ):
        raise MessageError(
            f"{key} is {_kind(value)}: a {'whole ' if whole else ''}number from {low:g} to {high:.0f} is expected"
        )
    return value


def _committed(entries: dict[str, Any], request: Request, spec: PolicySpec) -> Request:
    actions = entries.get("committed")
    if actions is None:
        return request
    shape = (request.rows, spec.chunk, spec.action_dim)
    array = _numbers(entries, "committed")
    if (
        array.ndim != 3
        or (len(array), array.shape[2]) != shape[::2]
        or array.shape[1] > shape[1]
        or not np.isfinite(array).all()
    ):
        raise MessageError(
            f"committed is {_kind(actions)}: finite numbers [{shape[0]}, at most {shape[1]}, {shape[2]}] are expected"
        )
    frozen = int(_number(entries, "frozen", 0, 0, array.shape[1], whole=True))
    return replace(request, committed=torch.from_numpy(array.copy()), frozen=frozen, alone=True)


def _numbers(entries: dict[str, Any], key: str) -> NDArray[np.float32]:
    value = entries.get(key)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "iuf":
        raise MessageError(f"{key} is {_kind(value)}: numbers are expected")
    with np.errstate(over="ignore"):  # to infinity, which is refused
        return array.astype(np.float32)


def _kind(value: Any) -> str:
    """Describe a value of a message in a few words."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if value is None:
        return "missing"
    return (
        repr(value)[:40]
        if isinstance(value, bool | int | float | np.generic)
        else type(value).__name__
    )

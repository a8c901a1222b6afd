"""Add, merge, save and load LoRA adapters, with peft and in peft's directory layout.

A directory may be anyone's: it is checked before anything is built. ``adapter_config.json`` of
plain LoRA alone is accepted, with module names instead of patterns.

peft is imported on first use, so that reading a recipe does not take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError, printable
from rlinf_vla.config.ranges import Range
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.devices import CPU, is_accelerator
from rlinf_vla.core.io import parse_json
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Tensors, fault
from rlinf_vla.training.ranks import copy_whole, is_sharded

if TYPE_CHECKING:
    from peft import LoraConfig

_KEPT: WeakKeyDictionary[Policy, dict[Any, tuple[Tensor, int]]] = WeakKeyDictionary()
"""Policy -> layer -> its weight before merging, and PyTorch's count of its changes then."""
_PREFIX = "base_model.model."
_ADAPTER = ".default."
_BASE = ".base_layer.weight"
CONFIG = "adapter_config.json"
FACTORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MOST_BYTES = 2**20
MOST_NAMES = 2048
RANK = Range(1, 4096)
ALPHA = Range(0, 1e6, above=True)
MODULE_NAME = re.compile(r"[\w.-]{1,200}")
OWN_PATTERN = re.compile(r"\((?:[\w|]|\\[.-]){1,60000}\)\(\\\.\.\*\)\?")
"""``exclude_modules`` as ``add_lora`` writes it: names of modules, and what is below them."""
NO_EFFECT = (
    *(
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
    ),
    *("fan_in_fan_out", "loftq_config", "megatron_core", "qalora_group_size"),
)
"""Keys without effect on a loaded adapter; others that are not read must be switched off."""
INITS = (True, False, "gaussian")
"""Others change the weights of the base, or need files."""
OFF: tuple[Any, ...] = (None, False, 0, "", "none", {}, [])
FIX = "copy it again"


def add_lora(policy: Policy, options: LoraOptions, seed: int) -> None:
    """Freeze the backbone except its ``full_modules``, and add adapters to it.

    The adapters are those of ``options.adapter``, or new ones: factors A drawn by ``seed``, B
    zero, so that the policy is unchanged. They are float32, because small steps would be lost
    otherwise (``lora_layers.py``). Rank 0 trains all weights. Modules that are frozen or switched
    off stay so. Raises UserError if a setting would have no effect.
    """
    policy.merge_adapters = options.merge
    switched_off = {
        name: getattr(policy, f"{name}_modules")
        for name in ("vision", "language")
        if not getattr(options, name)
    }
    for name, roots in switched_off.items():
        if not roots:
            raise UserError(
                f"model.lora.{name}=false: {policy.name} does not declare these modules; use model.lora.targets"
            )
    if options.adapter is not None:
        directory = Path(options.adapter)
        config = read_config(directory)
        weightless = next(policy.backbone.parameters()).is_meta  # memory is counted without weights
        if not weightless:
            check_ranks(config, directory)
        _inject(policy, config, seed)
        for name, roots in switched_off.items():
            if any(
                is_lora(part) and _inside(part, roots)
                for part, _ in policy.backbone.named_parameters()
            ):
                raise UserError(
                    f"model.lora.{name}=false: {directory} has adapters in the {name} modules; set model.lora.{name}=true"
                )
        if not weightless:
            load_adapter(policy.backbone, directory)
            policy.spec = replace(
                policy.spec, remarks=(*policy.spec.remarks, *_other_base(policy, config))
            )
        return
    modules = dict(policy.backbone.named_modules())
    switched = [root for roots in switched_off.values() for root in roots if root in modules]
    if options.rank <= 0:
        for root in switched:
            modules[root].requires_grad_(False)
        return
    from peft import LoraConfig

    closed = [*switched, *(name for name in policy.full_modules if name in modules)]
    closed += [
        name
        for name, module in modules.items()
        if name and _is_frozen(module) and not _inside(name.rpartition(".")[0], closed)
    ]
    targets = options.targets or list(policy.lora_targets)
    matching_names = {
        target: [name for name in modules if f".{name}".endswith(f".{target}")]
        for target in targets
    }
    _check_targets(policy, options, matching_names, closed, switched)
    excluded = [
        root
        for root in closed
        if any(_inside(name, [root]) for matches in matching_names.values() for name in matches)
    ]
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha or options.rank,
        target_modules=targets,
        init_lora_weights="gaussian" if options.init == "gaussian" else True,
        exclude_modules=rf"({'|'.join(map(re.escape, excluded))})(\..*)?" if excluded else None,
    )
    _inject(policy, config, seed)


def _other_base(policy: Policy, config: LoraConfig) -> list[str]:
    """Return a line if an adapter names another model as its base than the policy's directory."""
    base = config.base_model_name_or_path or ""
    directory = str(getattr(policy, "directory", ""))
    name = Path(base).name
    if not name or name.lower() in directory.lower():
        return []
    return [
        printable(
            f"adapter: trained on {base}, applied to {directory}, whose weights must be the same"
        )[:300]
    ]


def _inside(name: str, roots: Sequence[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _is_frozen(module: nn.Module) -> bool:
    learns = [parameter.requires_grad for parameter in module.parameters()]
    return bool(learns) and not any(learns)


def _check_targets(
    policy: Policy,
    options: LoraOptions,
    matching_names: Mapping[str, list[str]],
    closed: list[str],
    switched: list[str],
) -> None:
    open_ = {
        target: [name for name in names if not _inside(name, closed)]
        for target, names in matching_names.items()
    }
    for target in options.targets:
        if not matching_names[target]:
            raise UserError(
                f"model.lora.targets: no backbone module's name ends in {target!r}; the default is {list(policy.lora_targets)}"
            )
        if not open_[target] and not any(
            _inside(name, switched) for name in matching_names[target]
        ):
            raise UserError(
                f"model.lora.targets: {target!r} is only in modules that are frozen or full: remove it"
            )
    if not any(open_.values()):
        raise UserError(
            "model.lora.targets, vision and language leave no module to adapt: switch one on, or name others"
        )


def _inject(policy: Policy, config: LoraConfig, seed: int) -> None:
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    from rlinf_vla.training import lora_layers

    backbone = policy.backbone
    full = [module for name, module in backbone.named_modules() if name in policy.full_modules]
    backbone.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, backbone)
    cast_adapter_dtype(backbone, "default")
    lora_layers.multiply_in_input_dtype(backbone)
    for module in full:
        module.requires_grad_(True)


def merge_lora(backbone: nn.Module) -> None:
    """Merge the adapters into the adapted weights and restore the original module names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(backbone.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(backbone.get_submodule(parent), last, module.get_base_layer())


@contextmanager
def merged_lora(policy: Policy) -> Iterator[None]:
    """Merge the adapters within the context, so that acting costs no more than without adapters.

    Does nothing if ``model.lora.merge`` is false.

    A merged weight is the float32 sum, rounded once to the weight's dtype. In bfloat16 a change
    below half a spacing of one weight is lost, but the policy is no less exact than unmerged, where
    the results of layers are rounded instead: on the packaged tiny policies, with factors B of 1e-4
    to 0.03, log-probabilities differ from the float32 network's by 0.9 to 2.5 u on average in
    either case, and merged from unmerged by 0.6 to 3.6 u (``algorithms/parity.py`` has u and its
    bounds). Updates compute unmerged; ``algorithm.recompute_log_prob`` makes their first ratio
    exactly 1.

    The weights before are kept in main memory, so that a GPU needs no room for them, and restored
    bit-identical. Those of a GPU stay there, pinned, as long as the policy does: what is not
    trained need not be copied again for each version of the adapters. Raises UserError if the
    policy is sharded, RuntimeError if the adapters are already merged, as they would count twice.
    """
    if any(map(is_sharded, policy.parameters())):
        raise UserError(
            "cluster.trainer_sharding=full: no rank holds the whole policy to act with; use rollout workers, or set it to none"
        )
    if not policy.merge_adapters or not any(
        is_lora(name) for name, _ in policy.backbone.named_parameters()
    ):
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [
        module for module in policy.backbone.modules() if isinstance(module, BaseTunerLayer)
    ]
    if any(layer.merged for layer in layers):
        raise RuntimeError("the adapters are merged already: merged_lora cannot be nested")
    weights = {layer: layer.get_base_layer().weight for layer in layers}
    saved = _unmerged(policy, weights)
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        with torch.no_grad():
            for layer, weight in saved.items():
                weights[layer].copy_(weight, non_blocking=weight.is_pinned())
                layer.merged_adapters.clear()
        _KEPT[policy] = {
            layer: (saved[layer], weight._version)
            for layer, weight in weights.items()
            if is_accelerator(weight.device)
        }


def _unmerged(policy: Policy, weights: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Return copies of ``weights``, by layer, in main memory: new ones of those that have changed
    since they were kept."""
    kept = _KEPT.get(policy, {})
    saved = {}
    for layer, weight in weights.items():
        copy, version = kept.get(layer, (None, -1))
        if copy is None or version != weight._version:
            pinned = is_accelerator(weight.device)
            copy = torch.empty_like(weight, device=CPU, pin_memory=pinned, requires_grad=False)
            copy.copy_(weight.detach())
        saved[layer] = copy
    return saved


@contextmanager
def acting(policy: Policy, rounded: bool) -> Iterator[None]:
    """Prepare the policy for rollouts within the context: merge adapters, and if ``rounded``, round
    trainable weights to the network's dtype."""
    with _rounded(policy) if rounded else nullcontext(), merged_lora(policy):
        yield


@contextmanager
def _rounded(policy: Policy) -> Iterator[None]:
    exact = {
        parameter: parameter.detach().clone()
        for parameter in policy.parameters()
        if parameter.requires_grad
    }
    dtype = network_dtype(policy)
    try:
        with torch.no_grad():
            for parameter, value in exact.items():
                parameter.copy_(value.to(dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in exact.items():
                parameter.copy_(value)


def rounded_weights(policy: Policy, weights: Tensors) -> Tensors:
    """Return ``weights`` in the network's dtype, as rollouts use them with ``rounded_weights``."""
    dtype = network_dtype(policy)
    return {name: value.to(dtype) for name, value in weights.items()}


def network_dtype(policy: Policy) -> torch.dtype:
    """Return the dtype of most of the backbone's weights."""
    counts: dict[torch.dtype, int] = {}
    for parameter in policy.backbone.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype])


def is_lora(name: str) -> bool:
    return ".lora_" in name


def adapter_state(backbone: nn.Module) -> Tensors:
    """Return the LoRA factors under the names that peft reads."""
    return {
        adapter_name(name): value for name, value in backbone.state_dict().items() if is_lora(name)
    }


def adapter_name(name: str) -> str:
    """Return the name that peft reads of a LoRA factor with this name in the backbone."""
    return _PREFIX + name.replace(_ADAPTER, ".")


def save_adapter(backbone: nn.Module, factors: Tensors, directory: Path) -> None:
    """Write a PEFT directory; ``factors``: the whole tensors of ``adapter_state(backbone)``."""
    config: LoraConfig = copy(backbone.peft_config["default"])  # type: ignore[index,assignment]
    for name, value in vars(config).items():
        if isinstance(
            value, set
        ):  # the order of a set, which peft writes, differs between processes
            setattr(config, name, sorted(value))
    directory.mkdir(parents=True)
    config.save_pretrained(str(directory))
    write_tensors(factors, directory / FACTORS)


@torch.no_grad()
def load_adapter(backbone: nn.Module, directory: Path) -> None:
    """Load a PEFT directory's adapter, perhaps with an adapted output layer, into ``backbone``.

    Raises UserError if rank and alpha, hence the scale of the factors, differ from the training's.
    """
    stored = _read_adapter(backbone, directory)
    repeated = {
        _PREFIX + name: value
        for name, value in backbone.state_dict().items()
        if name.endswith(_BASE)
    }
    own = adapter_state(backbone) | {
        name: value for name, value in repeated.items() if name in stored
    }
    copy_all(stored, own, directory)
    refuse_merged(backbone, directory)


def stored_adapter(backbone: nn.Module, directory: Path) -> Tensors:
    """Return what ``load_adapter`` would load, by names of the policy.

    Raises UserError as it does; ``backbone`` may lack modules.
    """
    stored = _read_adapter(backbone, directory)
    return {
        "backbone." + re.sub(r"(\.lora_\w+)\.", rf"\1{_ADAPTER}", name.removeprefix(_PREFIX)): value
        for name, value in stored.items()
    }


def _read_adapter(backbone: nn.Module, directory: Path) -> Tensors:
    own_config: LoraConfig = backbone.peft_config["default"]  # type: ignore[index,assignment]
    stored_config = read_config(directory)
    if (stored_config.lora_alpha, stored_config.r) != (own_config.lora_alpha, own_config.r):
        raise UserError(
            f"{directory} was trained with model.lora.rank={stored_config.r} and alpha={stored_config.lora_alpha}, the recipe sets "
            f"{own_config.r} and {own_config.lora_alpha}: use its run's recipe"
        )
    return read_tensors(directory / FACTORS)


def copy_all(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], source: Path) -> None:
    """Copy every tensor of ``stored`` into the one of the same name in ``own``.

    Raises UserError, with nothing copied, unless names and shapes are equal.
    """
    differ = sorted(stored.keys() ^ own.keys()) or [
        name for name in sorted(own) if own[name].shape != stored[name].shape
    ]
    if differ:
        raise UserError(
            f"{source} does not fit this model: {differ[0]} is missing or has another shape; use the model.* of its run"
        )
    for name, value in own.items():
        copy_whole(value, stored[name])


def read_config(directory: Path) -> LoraConfig:
    """Return a PEFT directory's configuration. Raises UserError if it is not one of plain LoRA."""
    from peft import LoraConfig

    document = _document(directory)
    config = LoraConfig(**_checked(document, directory))
    base = document.get("base_model_name_or_path")
    config.base_model_name_or_path = base[:200] if isinstance(base, str) else None
    return config


def _document(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.exists():
        raise UserError(
            f"model.lora.adapter={directory} is not a PEFT directory: {CONFIG} is missing"
        )
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        document = parse_json(path.read_text())
        if not isinstance(document, dict):
            raise ValueError("an object is expected")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): copy the adapter again") from None
    return document


def _checked(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the arguments of ``LoraConfig``. Raises UserError."""
    checks: dict[str, Callable[[Any], bool]] = {
        "r": lambda value: type(value) is int and RANK.allows(value),
        "lora_alpha": ALPHA.allows,
        "target_modules": lambda value: _names(value) and bool(value),
        "exclude_modules": lambda value: (
            value is None
            or _names(value)
            or (isinstance(value, str) and bool(OWN_PATTERN.fullmatch(value)))
        ),
        "use_rslora": lambda value: isinstance(value, bool),
        "init_lora_weights": lambda value: True,
        "rank_pattern": lambda value: _numbers(value, RANK),
        "alpha_pattern": lambda value: _numbers(value, ALPHA),
    }
    other = [
        name
        for name in document.keys() - checks.keys() - set(NO_EFFECT)
        if document[name] not in OFF
    ]
    other += [
        name
        for name, kinds in (("peft_type", ("LORA",)), ("init_lora_weights", INITS))
        if document.get(name, kinds[0]) not in kinds
    ]
    if other:
        named = printable(min(other))[:60]
        raise UserError(
            f"model.lora.adapter={directory}: only plain LoRA is supported, not its {named}; merge this adapter with the tool that made it"
        )
    arguments = {
        name: document.get(name)
        for name in checks
        if name in document or name in ("r", "target_modules")
    }
    for name, value in arguments.items():
        if not checks[name](value):
            requirement = {
                "r": f"a whole {str(RANK).removeprefix('a ')}",
                "lora_alpha": str(ALPHA),
            }.get(name, "names of modules in a list")
            value_text = (
                printable(str(value)[:60])
                if isinstance(value, str | int | float)
                else f"a {type(value).__name__}"
            )
            raise UserError(
                f"{directory / CONFIG}: {name} is {value_text}, {requirement} is supported: merge it with the tool that made it"
            )
    return arguments


def _names(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MOST_NAMES
        and all(isinstance(name, str) and MODULE_NAME.fullmatch(name) is not None for name in value)
    )


def _numbers(value: Any, allowed: Range) -> bool:
    return (
        isinstance(value, dict)
        and _names(list(value))
        and all(allowed.allows(number) for number in value.values())
    )


def check_ranks(config: LoraConfig, directory: Path) -> None:
    """Raise UserError unless the stored factors have the ranks of ``config``, which is quick."""
    path = directory / FACTORS
    if not path.exists() and (directory / PICKLE).exists():
        convert = f"save_file(torch.load('{PICKLE}', weights_only=True), '{FACTORS}')"
        raise UserError(
            f"{directory} has no {FACTORS}, only {PICKLE}, a pickle, which could run code and is not read: convert it there with "
            f'`python -c "import torch; from safetensors.torch import save_file; {convert}"`'
        )
    with _reading(path, FIX), safe_open(path, "pt") as file:
        ranks = {file.get_slice(name).get_shape()[0] for name in file.keys() if ".lora_A." in name}  # noqa: SIM118
    special = set((config.rank_pattern or {}).values())
    config_ranks = {config.r, *special}
    if ranks not in (config_ranks, special):  # the pattern may name all modules
        raise UserError(
            f"{path} has factors of rank {sorted(ranks)}, {CONFIG} says {sorted(config_ranks)}: {FIX}"
        )


@contextmanager
def _reading(path: Path, fix: str) -> Iterator[None]:
    """Turn an error of reading ``path`` into a UserError that ends in ``fix``."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({error}), the file is missing or damaged: {fix}"
        ) from None


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.to(CPU).contiguous() for name, value in tensors.items()}, path)
    path.chmod(0o644)  # safetensors creates files that only their owner can read


def read_tensors(path: Path, fix: str = FIX) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError if it is damaged or a number is
    not finite."""
    with _reading(path, fix):
        tensors = load_file(path)
    for name, value in tensors.items():
        if value.is_floating_point() and (problem := fault(value)) is not None:
            raise UserError(f"{path}: {name} {problem}")
    return tensors


LAYERS = 16
CLOSE = 0.2
CLEAR = 0.1


@torch.no_grad()
def refuse_merged(backbone: nn.Module, directory: Path) -> None:
    """Raise UserError if the adapter in ``backbone`` is merged into its weights already.

    Of weights W that contain a product P of factors, the projection <W, P> / <P, P> is near 1; of
    other weights it is near 0, with a standard deviation of about |W| / |P| / sqrt(size of W). The
    adapter is taken as merged if the mean over up to LAYERS layers is certain (CLEAR), and it and
    three quarters of the layers are near 1 (CLOSE).
    """
    from peft.tuners.lora import Linear

    layers: list[Any] = [module for module in backbone.modules() if isinstance(module, Linear)]
    estimates: list[tuple[float, float]] = []
    for layer in layers[:: max(len(layers) // LAYERS, 1)]:
        weight = layer.get_base_layer().weight
        a = layer.lora_A["default"].weight
        b = layer.lora_B["default"].weight
        if any(map(is_sharded, (weight, a, b))):
            return
        a = a.float()
        b = b.float() * layer.scaling["default"]
        weight = weight.float()
        size = float(((b.T @ b) * (a @ a.T)).sum())
        if size > 0:
            share = float((b.T @ weight @ a.T).trace()) / size
            estimates.append((share, float(weight.norm()) / (size * weight.numel()) ** 0.5))
    if not estimates:
        return
    weights = [1 / max(noise, 1e-6) ** 2 for _, noise in estimates]
    mean = sum(
        share * share_weight for (share, _), share_weight in zip(estimates, weights, strict=True)
    ) / sum(weights)
    near = sum(abs(share - 1) < CLOSE + 3 * noise for share, noise in estimates)
    if abs(mean - 1) < CLOSE and sum(weights) ** -0.5 < CLEAR and near >= 0.75 * len(estimates):
        raise UserError(
            f"{directory}: the weights of model.checkpoint contain this adapter already, it would be applied twice: "
            "leave the adapter out, or choose the checkpoint that it was trained on"
        )

"""Choose a recipe's micro-batches, and print its devices' memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.features.planner.accounting import Uncounted
from rlinf_vla.features.planner.budget import (
    budget,
    device_memory,
    fewer_processes,
    main_memory,
    setting_of,
)
from rlinf_vla.features.planner.memory import MemoryModel, is_counted
from rlinf_vla.features.planner.micro_batches import choose, least
from rlinf_vla.features.planner.plan import SLACK
from rlinf_vla.runtime import recipes

GPUS = tuple(1e9 * gigabytes for gigabytes in (24, 40, 80))
"""Memory that is compared where a GPU is wanted but neither described nor there."""


def preview_of(
    config: DictConfig, refuse: Callable[[Preview], None] = lambda preview: None
) -> Preview:
    """Return the preview of a recipe, and set ``cluster.reuse_frozen`` in ``config`` if it is null.

    ``refuse``: called before memory is counted. Raises UserError as ``Preview`` and ``refuse`` do.
    """
    chooses = config.cluster.reuse_frozen is None
    if chooses:
        config.cluster.reuse_frozen = True
    preview = Preview(recipes.read(config))
    refuse(preview)
    if chooses and not preview.has_main_memory():
        config.cluster.reuse_frozen = False
        preview = Preview(recipes.read(config))
    return preview


class Preview:
    """The counted memory of a recipe. ``missing``: what this machine lacks to run it."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises UserError if the policy cannot be built without its checkpoint."""
        self.recipe = recipe
        self.missing = list[str]()
        self.model = MemoryModel(recipe) if is_counted(recipe) else None
        if self.model is not None and self.model.missing is not None:
            self.missing.append(self.model.missing)
        self.processes: int | None = None
        """``env.processes``, if ``rows`` chose fewer than there are cores: those that fit."""
        self._memory: float | None = None
        try:
            self._memory = device_memory(recipe)
        except UserError as error:
            self.missing.append(str(error))

    def has_main_memory(self) -> bool:
        """Return false if main memory is known to be too small for the recipe."""
        if self.model is None or self._memory is None:
            return True
        setting = replace(setting_of(self.recipe), micro_batch_size=0)
        needed = budget(self.model, setting, self._memory, exact=False).host_peak
        return needed <= SLACK * main_memory(self.recipe)

    def require_nothing(self) -> None:
        """Raise UserError, in one line, if anything is ``missing``."""
        if self.missing:
            raise UserError("; ".join(self.missing))

    def rows(self) -> int:
        """Return ``cluster.micro_batch_size``, or what fits the device if it is null.

        Of an unknown GPU: what fits the smallest of GPUS that has room, else 1. If a known device
        has no room under the recipe's other keys, that is ``missing``, with the fix.
        """
        cluster = self.recipe.cluster
        model = self.model
        if cluster.micro_batch_size is not None or not cluster.on_accelerator or model is None:
            return cluster.rows
        if self._memory is not None:
            try:
                return choose(model, self._memory, setting_of(self.recipe)).micro_batch_size
            except UserError as error:
                if isinstance(error, Uncounted) and model.replay is not None:
                    return cluster.rows
                for model.recipe in fewer_processes(self.recipe):
                    with suppress(UserError):
                        setting = choose(model, self._memory, setting_of(self.recipe))
                        self.processes = model.recipe.env.processes
                        return setting.micro_batch_size
                model.recipe = self.recipe
                self.missing.append(str(error))
                return 1
        for memory in GPUS:
            with suppress(UserError):
                return choose(model, memory, setting_of(self.recipe), exact=False).micro_batch_size
        return 1

    def show(self, recipe: Recipe) -> None:
        """Print the memory of a device under ``recipe``, which may differ in ``cluster`` and
        ``rollout``. If the loss is refused, which is ``missing``, or if an algorithm plug-in's
        cannot be counted, the update is left out."""
        if self.model is None:
            print(
                f"memory: not counted (algorithm={recipe.algorithm.name}: a reward model is small beside a policy)"
            )
            return
        self.model.recipe = recipe
        setting = setting_of(recipe)
        sizes = () if self._memory else GPUS
        try:
            count = budget(self.model, setting, self._memory or GPUS[-1])
        except UserError as error:
            if isinstance(error, Uncounted):
                print(error)
            else:
                self.missing.append(str(error))
            count = budget(
                self.model, replace(setting, micro_batch_size=0), self._memory or GPUS[-1]
            )
            sizes = ()
        if self._memory is None:
            count = replace(
                count,
                memory=next(
                    (memory for memory in GPUS if replace(count, memory=memory).fits), GPUS[-1]
                ),
            )
            print(f"there is no GPU here: one of {count.memory / 1e9:.0f} GB is assumed")
        count.show()
        if self.processes is not None:
            print(f"env.processes={self.processes}: more that draw on this GPU would not fit")
        if self._memory is not None:
            try:
                count.check_host(main_memory(recipe))
            except UserError as error:
                self.missing.append(str(error))
        if recipe.cluster.on_accelerator and self.model.takes_bfloat16:
            print(
                "the network is in float32: model.options.dtype=bfloat16 takes half its memory, and is faster"
            )
        for memory in sizes:
            print(f"GPU of {memory / 1e9:.0f} GB: {self._fit(self.model, memory)}")

    def _fit(self, model: MemoryModel, memory: float) -> str:
        """Return which settings fit a GPU with ``memory`` bytes: the recipe's, else others."""
        own = setting_of(self.recipe)
        if self.recipe.cluster.micro_batch_size is not None:
            memory_budget = budget(model, own, memory, exact=False)
            if memory_budget.fits:
                return f"fits, peak {memory_budget.peak / 1e9:.1f} GB"
        for start, base in (("fits, set", own), ("fits only with", None)):
            try:
                setting = choose(model, memory, base, exact=False)
            except UserError:
                continue
            return f"{start} {setting.overrides()}: peak {budget(model, setting, memory, exact=False).peak / 1e9:.1f} GB"
        return f"does not fit, {least(model, memory, exact=False).peak / 1e9:.1f} GB at least"

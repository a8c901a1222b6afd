"""What a sweep plays: policies, suites, and their episodes in blocks that are saved one by one.

The split depends on the recipe alone, not on which worker plays a block or when. Any lost block can
therefore be played again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import NO_ALGORITHM, NO_PROBE, START, Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import HasSuites, Suite
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.evaluation.statistics import Episode, column_of, paired_episodes
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.recipes import HUB, asset_path

EXPERT, RANDOM = "expert", "random"
SCRIPTED = (EXPERT, RANDOM)
"""Sources of actions that need no policy."""

Place = tuple[str, str, str, str, int]
"""(policy, probe or NO_PROBE, suite, task, seed) of an episode."""


@dataclass(frozen=True)
class EvalPolicy:
    """A policy under evaluation, with its name in tables.

    ``source``: START, one of SCRIPTED, or a model's location. ``mode``: sampled or greedy; None if
    SCRIPTED. ``probe``: what changes its observations, one of PROBES; None: nothing does.
    """

    name: str
    source: str
    mode: str | None
    probe: str | None = None

    @property
    def column(self) -> str:
        """Its name in tables, where it is beside the same policy with other probes."""
        return column_of(self.name, self.probe or NO_PROBE)


@dataclass(frozen=True)
class Block:
    """Episodes of one task and policy. ``task`` is the index within the suite."""

    policy: int
    suite: int
    task: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the block's file."""
        return self.name_of(self.seeds[0])

    def name_of(self, seed: int) -> str:
        """Name of an episode's video."""
        return f"{self.policy:02d}_{self.suite:03d}_{self.task:03d}_{seed:07d}"


@dataclass(frozen=True)
class Job:
    """Work on one block. ``filmed``: its outcomes are known; it is played again for its videos."""

    block: Block
    filmed: bool = False


@dataclass(frozen=True)
class Sweep:
    """All that a recipe evaluates."""

    recipe: Recipe
    policies: list[EvalPolicy]
    suites: list[Suite]
    blocks: list[Block]

    @staticmethod
    def of(recipe: Recipe) -> Sweep:
        """Start a simulator only if its plug-in cannot list its suites; fetch no weights of START.

        Raises UserError if a policy needs a model and there is none, or a directory is missing.
        """
        policies = _policies(recipe)
        suites = _suites(recipe)
        settings = recipe.sweep
        if settings.stop_when_decided and len(policies) != 2:
            raise UserError(
                f"sweep.stop_when_decided compares two policies, this sweep has {len(policies)} "
                f"({'; '.join(policy.column for policy in policies)}): name two in sweep.policies and one of evaluation.modes"
            )
        blocks = split_into_blocks(
            len(policies), [len(suite.tasks) for suite in suites], recipe.episodes, settings.block
        )
        return Sweep(recipe, policies, suites, blocks)

    def until_decided(
        self, suite: int, play: Callable[[Sequence[Block]], Sequence[Episode]]
    ) -> list[Block]:
        """Return the blocks of a suite that are played; ``play``: plays blocks, returns episodes.

        With ``stop_when_decided`` the same seeds of all policies and tasks at once, until decided.
        """
        stops = self.recipe.sweep.stop_when_decided
        rounds = dict[tuple[int, ...], list[Block]]()
        for block in self.blocks:
            if block.suite == suite:
                rounds.setdefault(block.seeds if stops else (), []).append(block)
        blocks, episodes = list[Block](), list[Episode]()
        for part in rounds.values():
            blocks += part
            episodes += play(part)
            if stops and self._decided(episodes):
                break
        return blocks

    def _decided(self, episodes: Sequence[Episode]) -> bool:
        """Whether these episodes show one of the two policies to be better."""
        columns = [policy.column for policy in self.policies]
        episodes_by_policy = [
            [
                episode
                for episode in episodes
                if column_of(episode["policy"], episode["probe"]) == column
            ]
            for column in columns
        ]
        return bool((pair := paired_episodes(*episodes_by_policy)) and pair["anytime"]["better"])

    def places(self, block: Block) -> list[Place]:
        suite = self.suites[block.suite]
        policy = self.policies[block.policy]
        return [
            (policy.name, policy.probe or NO_PROBE, suite.name, suite.tasks[block.task], seed)
            for seed in block.seeds
        ]


def directory_of(recipe: Recipe, source: str) -> Path:
    """Return the directory that a policy is loaded from. Raises UserError: see ``asset_path``."""
    return asset_path(recipe.model.checkpoint if source == START else source)


def fixed(policies: Sequence[str]) -> list[str]:
    """Return ``policies`` with each run's newest checkpoint in place of its directory.

    A run in training may write newer ones during the sweep. Raises UserError if a run has none.
    """
    runs = [(Path(policy).expanduser() / run_directory.RECIPE).exists() for policy in policies]
    return [
        str(run_directory.checkpoint_at(policy, "sweep.policies")) if run else policy
        for policy, run in zip(policies, runs, strict=True)
    ]


def _suites(recipe: Recipe) -> list[Suite]:
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    if isinstance(plugin, HasSuites):
        return plugin.suites(recipe.env)
    with builders.open_envs(recipe, None, recipe.rollout.pipeline_depth) as groups:
        return [Suite(recipe.env.name, groups[0].spec.tasks, recipe.env)]


def _policies(recipe: Recipe) -> list[EvalPolicy]:
    """Return the policies of ``sweep.policies``, preceded by one that another key names.

    That is ``checkpoint``; or the model, if there is no algorithm and all listed policies are
    scripted, because the model would otherwise have no effect.
    """
    model = recipe.model
    listed = list(recipe.sweep.policies)
    if recipe.checkpoint is not None:
        if Path(recipe.checkpoint).resolve() not in [
            Path(policy).expanduser().resolve() for policy in listed
        ]:
            listed.insert(0, recipe.checkpoint)
    elif (
        recipe.algorithm.name == NO_ALGORITHM
        and model.name != NO_MODEL
        and set(listed) <= set(SCRIPTED)
    ):
        listed.insert(0, START)
    policies = eval_policies(listed, recipe.evaluation.modes, recipe.evaluation.probes)
    if model.name == NO_MODEL and model.checkpoint != NO_MODEL:
        raise UserError(
            f"model.checkpoint={model.checkpoint} needs a model, and recipe={recipe.name} has none: set model=NAME, too"
        )
    for policy in listed:
        if policy in SCRIPTED:
            continue
        if model.name == NO_MODEL:
            raise UserError(
                f"sweep.policies names {policy}, but recipe={recipe.name} has no model: set model=NAME model.checkpoint=DIR"
            )
        if policy != START:
            builders.require_weights(recipe, f"no use for {policy} in sweep.policies")
        if policy == START and (
            not builders.model_of(recipe).learns or builders.description(recipe).is_dir()
        ):
            continue
        if policy.startswith(HUB) or (policy != START and directory_of(recipe, policy).is_dir()):
            continue
        if policy == START:
            raise UserError(f"model.checkpoint={model.checkpoint}: no such directory")
        raise UserError(
            f"sweep.policies names {policy}: no such directory (or {START}, {' or '.join(SCRIPTED)})"
        )
    return policies


def eval_policies(
    policies: Sequence[str], modes: Sequence[str], probes: Sequence[str] = ()
) -> list[EvalPolicy]:
    """Return every policy in every mode under distinct names, without and with each probe.

    SCRIPTED policies observe nothing that a probe changes, so they are not probed.

    Raises UserError if a policy is listed twice.
    """
    locations = [
        policy if policy in (START, *SCRIPTED) else Path(policy).expanduser().resolve()
        for policy in policies
    ]
    if twice := sorted(
        policy
        for policy, location in zip(policies, locations, strict=True)
        if locations.count(location) > 1
    ):
        raise UserError(f"sweep.policies names {twice[0]} twice")
    result = []
    for policy, name in zip(policies, _names(policies), strict=True):
        if policy in SCRIPTED:
            result.append(EvalPolicy(name, policy, None))
        else:
            names = {mode: name if len(modes) == 1 else f"{name} {mode}" for mode in modes}
            result += [
                EvalPolicy(names[mode], policy, mode, probe)
                for mode in modes
                for probe in (None, *probes)
            ]
    return result


def _names(policies: Sequence[str]) -> list[str]:
    """Return distinct names: of each directory, the fewest last path components that suffice."""
    parts = [
        (policy,) if policy in (START, *SCRIPTED) else _telling(Path(policy)) for policy in policies
    ]
    for count in range(1, max(map(len, parts), default=0) + 2):
        if len(set(names := ["/".join(part[-count:]) for part in parts])) == len(parts):
            break
    return names


def _telling(path: Path) -> tuple[str, ...]:
    return tuple(
        name for name in path.expanduser().absolute().parts[1:] if name != "checkpoints"
    ) or (str(path),)


def split_into_blocks(policies: int, tasks: Sequence[int], episodes: int, size: int) -> list[Block]:
    """Return blocks of at most ``size`` episodes, ``episodes`` per task and policy.

    ``tasks``: number of tasks of each suite. Blocks of a suite are contiguous, because its
    simulators start slowly. Raises UserError if ``episodes`` exceeds the evaluation seeds.
    """
    if episodes > len(EVALUATION_SEEDS):
        raise UserError(
            f"episodes={episodes}: {len(EVALUATION_SEEDS)} seeds are reserved for evaluation"
        )
    seeds = EVALUATION_SEEDS[:episodes]
    return [
        Block(policy, suite, task, tuple(seeds[first : first + size]))
        for suite, count in enumerate(tasks)
        for policy in range(policies)
        for task in range(count)
        for first in range(0, episodes, size)
    ]

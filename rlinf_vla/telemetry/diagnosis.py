"""Say what is conspicuous in a training run: each a number, a verdict and the keys to change.

It reads a run's files alone, and imports no PyTorch. A rule judges the second half of a run, and at
least ``LEAST`` iterations of it, mostly by the median: one iteration is noise. docs/diagnose.md
lists the rules; the reason of each limit is beside it, here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rlinf_vla.config.recipe import flat
from rlinf_vla.telemetry.run_files import Run

LEAST = 3
"""Iterations of which a rule needs numbers."""
OF_A_CRITIC = 10
"""The same of the critic, which begins without knowing anything."""
EPISODES = 100
"""Episodes without a reward after which it is worth a verdict: with 95 % confidence, fewer than 3 %
of them would have one (rule of three)."""
GROUPS = 20
"""Groups of which a share is worth a verdict: one is 5 %."""
SOLVED = 0.9
"""Success from which little is left to learn: groups end alike, returns hardly vary, and a policy
may be sure of its actions."""
HOPEFUL = 0.5
"""Success that excuses actions at their bounds: full speed is often the best action (Seyde et al.
2021, arXiv 2111.02552)."""
HOPELESS = 0.05
"""Success below which a gripper that never closes is worth a verdict: a task may need none."""

SAME = 1e-6
"""Difference of returns that the rounding of float32 rewards makes."""

SUCCESS = "rollout/success_once"
LOWEST, HIGHEST = "rollout/return_min", "rollout/return_max"
NORM = "actor/grad_norm"
ENTROPY = "actor/entropy_each"


@dataclass(frozen=True)
class Advice:
    """A key of the run's recipe, the value to try, and the present one."""

    key: str
    value: str
    now: Any

    def __str__(self) -> str:
        now = "null" if self.now is None else str(self.now).lower()
        return f"{self.key}={self.value} (now {now})"


@dataclass(frozen=True)
class Found:
    """A number, the same as text, and whether it is conspicuous.

    ``over``: the newest values of the rule's first metric that it is of. ``advice``: KEY=VALUE, or
    nothing; keys that the run lacks are left out.
    """

    conspicuous: bool
    value: float
    number: str
    over: int
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What a rule says of iterations ``first`` to ``last``: a number, also as text, and if it is
    conspicuous what that means and the keys to change."""

    name: str
    conspicuous: bool
    value: float
    number: str
    first: int
    last: int
    meaning: str
    keys: tuple[Advice, ...]


class Record:
    """The numbers of a run by iteration, and the values of its recipe."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.recipe = flat(run.recipe)
        rows: dict[int, dict[str, Any]] = {}
        for line in run.metrics:  # an evaluation has a line of its own
            rows.setdefault(line["step"], {}).update(line)
        learnt = [row for row in rows.values() if any(name.startswith(LEARNT) for name in row)]
        self.rows = sorted(learnt, key=lambda row: row["step"])

    def series(self, name: str) -> list[float]:
        """Return the finite values of a metric, oldest first."""
        return [float(row[name]) for row in self.rows if row.get(name) is not None]

    def recent(self, name: str, least: int = LEAST) -> list[float]:
        """Return the values of the second half of the run, at least ``LEAST``; [] if the run has
        fewer than ``least``."""
        values = self.series(name)
        return values[-max(LEAST, math.ceil(len(values) / 2)) :] if len(values) >= least else []

    def success(self) -> float:
        """Return the recent mean success of rollouts; 0 if it is not known."""
        return fmean(self.recent(SUCCESS, 1) or [0.0])

    def steps(self, name: str, count: int) -> tuple[int, int]:
        """Return the first and the last iteration of the newest ``count`` values of a metric."""
        rows = [row for row in self.rows if row.get(name) is not None][-count:]
        return rows[0]["step"], rows[-1]["step"]

    def unrewarded(self) -> bool:
        """Whether all returns of many episodes are the same number, and not above 0."""
        lowest, highest = self.series(LOWEST), self.series(HIGHEST)
        if not lowest or not highest or sum(self.series("rollout/episodes")) < EPISODES:
            return False
        return max(highest) <= 0 and max(highest) - min(lowest) <= SAME

    def value(self, key: str, otherwise: float = math.nan) -> float:
        """Return a number of the recipe, ``otherwise`` if the key holds none."""
        found = self.recipe.get(key)
        number = isinstance(found, int | float) and not isinstance(found, bool)
        return float(found) if number and math.isfinite(found) else otherwise  # type: ignore[arg-type]

    def scaled(self, key: str, factor: float) -> str:
        """Return the advice to multiply a key's value, and nothing if it is not above 0."""
        value = self.value(key)
        whole = isinstance(self.recipe.get(key), int)
        return f"{key}={value * factor:{'.0f' if whole else '.3g'}}" if value > 0 else ""

    def warmer(self) -> str:
        """Return the advice to sample more freely."""
        return f"rollout.temperature={max(1.0, 1.5 * self.value('rollout.temperature', 1.0)):.3g}"

    def once(self, key: str, value: str) -> str:
        """Return the advice to set a key, and nothing if it is set."""
        return "" if self.recipe.get(key) else f"{key}={value}"

    def demonstrations(self) -> str:
        """Return the advice to learn from demonstrations, too."""
        by_key = "algorithm.demonstrations" in self.recipe  # off-policy: the number of episodes
        given = self.recipe.get("algorithm.dataset") or self.recipe.get("algorithm.noise_bound")
        if by_key:
            return "" if given else self.once("algorithm.demonstrations", "20")
        return self.once("algorithm.sft_coef", "0.1")


LEARNT = ("actor/", "rollout/", "sft/")
"""Metrics of an iteration, by the beginning of their names."""


def _all_equal_groups(record: Record) -> Found | None:
    shares = record.recent("grpo/frac_informative")
    if not shares:
        return None
    value = median(shares)
    success = record.success()
    drops = record.recipe.get("algorithm.uninformative") == "dropped"
    ahead = record.value("algorithm.staleness", 0.0) > 0
    size, episodes = (record.value(f"algorithm.{key}", 1.0) for key in ("group_size", "episodes"))
    advice = (
        "algorithm.success_range=null" if record.recipe.get("algorithm.success_range") else "",
        record.once("algorithm.resample", "2") if drops and not ahead else "",
        "" if episodes % (2 * size) else record.scaled("algorithm.group_size", 2),
        record.scaled("algorithm.episodes", 2),
        record.warmer(),
    )
    number = f"{value:.0%} of the groups are informative, {success:.0%} of the episodes succeed"
    enough = sum(record.recent("grpo/groups")) >= GROUPS and not record.unrewarded()
    alike = value < INFORMATIVE and success < SOLVED
    return Found(enough and alike, value, number, len(shares), advice)


INFORMATIVE = 0.2
"""Share of informative groups (DAPO, arXiv 2503.14476, section 3.2: the others have no gradient).
Below it, four of five episodes teach nothing. Groups of eight are below it if fewer than 1 in 36
episodes succeeds, or fails."""


def _dead_critic(record: Record) -> Found | None:
    explained = record.recent("critic/explained_variance", OF_A_CRITIC)
    if not explained:
        return None
    value = median(explained)
    advice = (
        record.once("algorithm.value_warmup", "2"),
        record.scaled("algorithm.value_learning_rate", 10 if value > -EXPLAINED else 0.1),
        record.once("algorithm.value_coef", "0.5"),
    )
    dead = value < EXPLAINED and record.success() < SOLVED and not record.unrewarded()
    return Found(dead, value, f"explained variance {value:.3f}", len(explained), advice)


EXPLAINED = 0.05
"""Explained variance: a constant explains 0. Below it, subtracting the critic's value leaves 95 %
of the variance of the returns in the advantages. Healthy runs here have 0.1 from the second
iteration on."""


def _ratio(record: Record) -> Found | None:
    shares = record.recent("actor/clip_fraction")
    if not shares:
        return None
    value = median(shares)
    number = f"{value:.0%} of the ratios are clipped"
    return Found(value > CLIPPED_RATIOS, value, number, len(shares), _smaller(record))


CLIPPED_RATIOS = 0.5
"""Share of clipped probability ratios. Usual is 0.1 to 0.2, and runs that learn reach 0.45 on the
toy task here. Above one half, most of the data has no gradient any more."""


def _kl(record: Record) -> Found | None:
    divergences = record.recent("actor/approx_kl")
    if not divergences:
        return None
    value = median(divergences)
    limit = max(KL, record.value("algorithm.target_kl", 0.0))
    number = f"approximate KL {value:.3g}"
    return Found(value > limit, value, number, len(divergences), _smaller(record))


KL = 0.1
"""Mean KL of an iteration's steps in nats, or ``target_kl`` if that is larger. A KL of k is a log
ratio that varies by sqrt(2 k): at 0.1 by 0.45, more than twice the usual clip range of 0.2. PPO
usually has 0.003 to 0.03, healthy runs here up to 0.03."""


def _smaller(record: Record) -> tuple[str, ...]:
    """Return advice for smaller updates."""
    epochs = record.value("algorithm.epochs", 1.0)
    return (
        record.scaled("algorithm.learning_rate", 0.3),
        f"algorithm.epochs={epochs // 2:.0f}" if epochs > 1 else "",
        record.once("algorithm.target_kl", "0.05"),
    )


def _entropy(record: Record) -> Found | None:
    entropies = record.recent(ENTROPY)
    if not entropies:
        return None
    every = record.series(ENTROPY)
    begin = max(every[:LEAST])
    end = median(entropies)
    collapsed = end < ENTROPY_LEFT * begin if min(every) >= 0 else end < NARROW < begin - 1
    coefficient = record.value("algorithm.entropy_coef", 0.0)
    advice = (
        record.scaled("algorithm.learning_rate", 0.3),
        f"algorithm.entropy_coef={10 * coefficient or 0.01:.3g}",
        record.warmer(),
    )
    number = f"entropy {end:.3g} nats per number of an action, {begin:.3g} at first"
    return Found(collapsed and record.success() < SOLVED, end, number, len(entropies), advice)


ENTROPY_LEFT = 0.1
"""Share of the first entropy that is left, for entropies that are never negative (of tokens).
Healthy runs here keep 90 % in ten iterations; with a tenth, most attempts are alike."""
NARROW = -2.5
"""Entropy per number of a density: a normal distribution with a deviation of 0.02, 1 % of the range
of an action. A collapse is a fall by at least 1 nat to below it; some policies begin there."""


def _gripper(record: Record) -> Found | None:
    shares = record.recent("rollout/gripper_closed")
    if not shares:
        return None
    value = max(shares)
    now = record.recipe.get("model.options.gripper")
    other = "close_positive" if now == "open_positive" else "open_positive"
    advice = (
        f"model.options.gripper={other}",
        record.warmer(),
        record.demonstrations(),
    )
    never = value <= CLOSING and record.success() < HOPELESS
    number = f"at most {value:.2%} of an iteration's commands close the gripper"
    return Found(never, value, number, len(shares), advice)


CLOSING = 0.001
"""Share of control steps whose command closes the gripper: fewer than 1 in 1000 is less than one
step in some episodes. It is a verdict only where hardly any episode succeeds."""


def _gap(record: Record) -> Found | None:
    rollouts = record.recent(SUCCESS)[-GAP_OVER:]
    after = record.run.evaluations.get("after", {})
    mode = next((mode for mode in MODES if mode in after), "")
    try:
        block = after[mode]
        low, high = (float(bound) / 100 for bound in block["pc_success_ci95"])
        rate = float(block["pc_success"]) / 100
        enough = int(block["n_episodes"]) >= GAP_EPISODES
    except (KeyError, TypeError, ValueError):  # there is none, or its file is damaged
        return None
    if not rollouts or not enough:
        return None
    played = fmean(rollouts)
    # greedy actions are often better than the sampled ones of rollouts: only worse ones are odd
    beyond = max(played - high, low - played if mode == "sampled" else 0.0)
    advice = (
        "evaluation.temperature=null" if record.recipe.get("evaluation.temperature") else "",
        record.scaled("episodes", 2),
        "" if mode == "sampled" else "evaluation.modes=[sampled,greedy]",
        record.scaled("algorithm.horizon", 2),
    )
    number = f"success {played:.0%} in rollouts, {rate:.0%} in the evaluation ({mode})"
    return Found(beyond > GAP, played - rate, number, len(rollouts), advice)


GAP = 0.15
"""Distance of the rollouts' success from the 95 % interval of the evaluation. In the recorded runs
(results/learning) it is at most 0.04: rollouts of PPO count short episodes more often."""
GAP_OVER = 5
"""Newest iterations whose success is compared."""
GAP_EPISODES = 20
"""Episodes that an evaluation needs."""
MODES = ("sampled", "greedy")
"""Evaluations to compare with: rollouts are sampled, too."""


def _bounds(record: Record) -> Found | None:
    shares = record.recent("rollout/actions_at_bounds")
    if not shares:
        return None
    value = median(shares)
    advice = (
        record.scaled("algorithm.learning_rate", 0.3),
        record.scaled("model.options.std", 0.5),
        record.scaled("rollout.temperature", 0.7),
        record.demonstrations(),
    )
    number = f"{value:.0%} of the numbers of actions are at a bound"
    conspicuous = value > AT_BOUNDS and record.success() < HOPEFUL
    return Found(conspicuous, value, number, len(shares), advice)


AT_BOUNDS = 0.6
"""Share of numbers of actions at a bound, the gripper's aside. Normally distributed actions have it
if their deviation is twice the bound; five bins, drawn uniformly, have 0.4."""


def _gradients(record: Record) -> Found | None:
    norms = record.recent(NORM)
    shares = record.recent("actor/clipped_steps")
    limit = record.value("algorithm.max_grad_norm")
    if not norms or not shares or not limit > 0:
        return None
    value = median(norms) / limit
    advice = (
        f"algorithm.max_grad_norm={median(norms):.2g}",
        record.scaled("algorithm.value_coef", 0.1),
        record.scaled("reward.weight", 0.1),
    )
    number = (
        f"{median(shares):.0%} of the gradients are clipped; norms are {value:.2g} times the limit"
    )
    return Found(value > SHRUNK, value, number, len(norms), advice)


SHRUNK = 50.0
"""Norm of a gradient as a multiple of ``max_grad_norm``. Clipping alone is no fault: Adam divides
by the gradients' size, and healthy runs here clip at four to ten times. From 50 on, every minibatch
weighs the same, however much it teaches, and the largest loss, mostly the critic's, sets the step.
"""


def _reward(record: Record) -> Found | None:
    lowest, highest = record.series(LOWEST), record.series(HIGHEST)
    if len(highest) < LEAST or not lowest:
        return None
    value = max(highest)
    dense = "dense" if record.recipe.get("env.name") == "isaaclab" else "progress"
    advice = (
        record.once("reward.weight", "1"),
        f"env.reward={dense}" if record.recipe.get("env.reward") == "sparse" else "",
        record.once("reward.env_weight", "1") if record.recipe.get("reward.name") else "",
        record.scaled("env.episode_limit", 2),
        record.warmer(),
        record.demonstrations(),
    )
    number = f"returns from {min(lowest):.3g} to {value:.3g}"
    return Found(record.unrewarded(), value, number, len(highest), advice)


def _outliers(record: Record) -> Found | None:
    shares = record.recent("rollout/state_outliers")
    if not shares:
        return None
    value = median(shares)
    bounds = "min_max" if record.recipe.get("model.options.bounds") == "q99" else "q99"
    advice = tuple(f"model.options.{key}={OTHER}" for key in ("unnorm_key", "asset_id"))
    advice += (f"model.options.bounds={bounds}", f"model.checkpoint={OTHER}")
    number = f"{value:.0%} of the numbers of states are beyond the statistics"
    return Found(value > OUTLIERS, value, number, len(shares), advice)


OUTLIERS = 0.1
"""Share of the numbers of normalised states that lie beyond the range of the statistics, or four
standard deviations. Of the training data 2 % are beyond the 1 and 99 % quantiles; one number of
eight that is always beyond is 12 %."""
OTHER = "ANOTHER"
"""What advice says of a value that only the user knows."""


@dataclass(frozen=True)
class Rule:
    """A verdict's name, when it is given, the metrics that it reads, and what it means."""

    name: str
    limit: str
    metrics: tuple[str, ...]
    meaning: str
    find: Callable[[Record], Found | None]


RULES = (
    Rule(
        "reward never seen",
        f"every return of {EPISODES} episodes or more is the same number, and not above 0",
        (HIGHEST, LOWEST),
        "No episode was worth more than any other, so there was nothing to learn.",
        _reward,
    ),
    Rule(
        "all-equal groups",
        f"informative groups below {INFORMATIVE:.0%}, of {GROUPS} or more",
        ("grpo/frac_informative",),
        "Nearly all attempts at an episode end alike, and such groups have no gradient.",
        _all_equal_groups,
    ),
    Rule(
        "dead critic",
        f"explained variance below {EXPLAINED}",
        ("critic/explained_variance",),
        "The critic predicts returns no better than a constant, so advantages are as noisy as they.",
        _dead_critic,
    ),
    Rule(
        "KL out of range",
        f"approximate KL above {KL}, or above target_kl if that is larger",
        ("actor/approx_kl",),
        "Updates move the policy too far from the one that collected the data.",
        _kl,
    ),
    Rule(
        "ratio out of range",
        f"clip fraction above {CLIPPED_RATIOS:.0%}",
        ("actor/clip_fraction",),
        "Probability ratios leave the clip range, beyond which they have no gradient.",
        _ratio,
    ),
    Rule(
        "entropy collapse",
        f"entropy below {ENTROPY_LEFT:.0%} of the first; of densities {NARROW} nats per number",
        (ENTROPY,),
        "The policy hardly varies its actions any more, before it succeeds.",
        _entropy,
    ),
    Rule(
        "gripper never closes",
        f"closing commands at most {CLOSING:.1%}, success below {HOPELESS:.0%}",
        ("rollout/gripper_closed",),
        "No command closes the gripper: its sign may be wrong, or the policy never tries.",
        _gripper,
    ),
    Rule(
        "actions at their bounds",
        f"numbers at a bound above {AT_BOUNDS:.0%}, success below {HOPEFUL:.0%}",
        ("rollout/actions_at_bounds",),
        "Actions beyond the bounds are all executed alike, so differences between them teach nothing.",
        _bounds,
    ),
    Rule(
        "clipped gradients",
        f"norms above {SHRUNK:.0f} times max_grad_norm",
        (NORM, "actor/clipped_steps"),
        "Clipping sets the size of every step, and the largest of the losses its direction.",
        _gradients,
    ),
    Rule(
        "normalisation outliers",
        f"numbers beyond the statistics above {OUTLIERS:.0%}",
        ("rollout/state_outliers",),
        "The policy's statistics are not those of these states: of another robot, unit or dataset.",
        _outliers,
    ),
    Rule(
        "rollouts and evaluation differ",
        f"rollouts more than {GAP:.0%} from the evaluation's 95 % interval",
        (SUCCESS,),
        "The policy is evaluated under other conditions than those in which it was trained.",
        _gap,
    ),
)
"""In the order in which verdicts are given: causes before what may follow from them."""


def verdicts(run: Run) -> list[Verdict]:
    """Return a verdict of each rule that has the numbers for one; [] of a run that just began."""
    record = Record(run)
    return [_verdict(rule, found, record) for rule in RULES if (found := rule.find(record))]


def _verdict(rule: Rule, found: Found, record: Record) -> Verdict:
    keys = [line.partition("=") for line in found.advice if line]
    known = [Advice(key, to, record.recipe[key]) for key, _, to in keys if key in record.recipe]
    first, last = record.steps(rule.metrics[0], found.over)
    return Verdict(
        rule.name,
        found.conspicuous,
        found.value,
        found.number,
        first,
        last,
        rule.meaning,
        tuple(known) if found.conspicuous else (),
    )

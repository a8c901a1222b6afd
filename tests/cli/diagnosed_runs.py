"""Runs in counter world that were broken on purpose, and healthy ones. ``python -m tests.cli.diagnosed_runs`` trains
all and prints the tables of docs/results/diagnose.md."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from rlinf_vla.telemetry.diagnosis import Verdict, verdicts
from rlinf_vla.telemetry.run_files import read_run
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

ROOT = Path(__file__).parents[2]
COMMON = (
    "iterations=12",
    "env.tool_m=0.1",
    "checkpoints.every=100",
    "reward=success",
    "evaluation.filmed=0",
    "evaluation.modes=[sampled]",
    "episodes=60",
)
QUICK = (*COMMON, "evaluation.before_and_after=false", "algorithm.learning_rate=0.002")
GROUPS = "algorithm.episodes=32"
TENS = "algorithm.episodes=10"
GOOD = (
    "env.num_envs=16",
    "algorithm.minibatch_size=64",
    "model.lora.rank=0",
    "rollout.batch_size=16",
)
EVALUATED = (
    *GOOD,
    "evaluation.before_and_after=true",
    "algorithm.epochs=4",
    "algorithm.learning_rate=0.003",
)
COMPACT = (
    "model=compact",
    "model.checkpoint=asset://compact",
    "model.options.random_weights=true",
    "model.options.images=[]",
    "model.lora.rank=0",
    "env.state_dim=8",
    "iterations=5",
)


class Made(NamedTuple):
    """``recipe``: counting_RECIPE. ``keys``: what is changed. ``verdict``: what must be said of it, "" if nothing."""

    recipe: str
    keys: tuple[str, ...]
    verdict: str = ""
    slow: bool = True


BROKEN = {
    "no reward": Made("ppo", (*GOOD, "reward.weight=0"), "reward never seen", slow=False),
    "no reward, in groups": Made("grpo", (GROUPS, "reward.weight=0"), "reward never seen"),
    "no reward, off-policy": Made("sac", (TENS, "reward.weight=0"), "reward never seen"),
    "too short episodes": Made(
        "grpo", (GROUPS, "env.episode_limit=1"), "all-equal groups", slow=False
    ),
    "attempts without noise": Made(
        "grpo", (GROUPS, "rollout.temperature=1e-6"), "all-equal groups"
    ),
    "an impossible range": Made(
        "grpo", (GROUPS, "algorithm.success_range=[0.99,1]"), "all-equal groups"
    ),
    "a critic that stands still": Made(
        "ppo", ("algorithm.value_learning_rate=1e-9",), "dead critic", slow=False
    ),
    "a critic that overshoots": Made("ppo", ("algorithm.value_learning_rate=1",), "dead critic"),
    "a critic without a loss": Made("ppo", ("algorithm.value_coef=0",), "dead critic"),
    "large steps": Made("ppo", ("algorithm.learning_rate=0.05",), "KL out of range", slow=False),
    "large steps, in groups": Made(
        "grpo", ("algorithm.learning_rate=0.05", "algorithm.epochs=8"), "KL out of range"
    ),
    "a narrow clip range": Made(
        "ppo",
        ("algorithm.clip_low=0.001", "algorithm.clip_high=0.001"),
        "ratio out of range",
        slow=False,
    ),
    "steps of no use": Made("ppo", ("algorithm.learning_rate=1",), "entropy collapse", slow=False),
    "rewarded for failing": Made(
        "ppo",
        (
            "reward.weight=0",
            "reward.env_weight=-1",
            "algorithm.learning_rate=0.3",
            "algorithm.epochs=6",
            "iterations=12",
        ),
        "entropy collapse",
    ),
    "an open gripper": Made(
        "ppo",
        ("model.checkpoint={opens}", "reward.env_weight=1"),
        "gripper never closes",
        slow=False,
    ),
    "an open gripper, in groups": Made(
        "grpo", ("model.checkpoint={opens}", "reward.env_weight=1"), "gripper never closes"
    ),
    "two bins": Made(
        "ppo",
        ("env.episode_limit=2", "model.checkpoint={bins}", "algorithm.learning_rate=1e-9"),
        "actions at their bounds",
        slow=False,
    ),
    "a reward of 100,000": Made("ppo", ("reward.weight=100000",), "clipped gradients", slow=False),
    "states of another robot": Made("ppo", COMPACT, "normalisation outliers", slow=False),
    "another temperature in evaluations": Made(
        "ppo",
        (*EVALUATED, "evaluation.temperature=100"),
        "rollouts and evaluation differ",
        slow=False,
    ),
}
HEALTHY = {
    **{f"PPO, seed {i + 10}": Made("ppo", (*GOOD, f"seed={i + 10}"), slow=i > 0) for i in range(6)},
    **{
        f"PPO that solves it, seed {i + 10}": Made(
            "ppo", (*EVALUATED, f"seed={i + 10}"), slow=i > 0
        )
        for i in range(4)
    },
    **{
        f"GRPO, seed {i + 10}": Made("grpo", (GROUPS, f"seed={i + 10}"), slow=i > 0)
        for i in range(5)
    },
    **{f"SAC, seed {i + 10}": Made("sac", (TENS, f"seed={i + 10}"), slow=i > 0) for i in range(3)},
    **{f"imitation, seed {i + 10}": Made("sft", (f"seed={i + 10}",), slow=i > 0) for i in range(2)},
}


def write_policies(folder: Path) -> dict[str, Path]:
    """Policies that are broken before their first iteration: one rests with an open gripper, one has two bins."""
    opens = LinearPolicy(LinearOptions(chunk=2))
    with torch.no_grad():
        bias = opens.backbone["logits"].bias.view(2, 4, -1)  # type: ignore[operator]
        bias[:, 3, -1] += 20
        bias[:, 0, 2] += 20  # it stays where it is, and so never succeeds
    for name, policy in (("opens", opens), ("bins", LinearPolicy(LinearOptions(chunk=2, bins=2)))):
        policy.save(folder / name)
    return {name: folder / name for name in ("opens", "bins")}


def keys(made: Made, policies: dict[str, Path]) -> list[str]:
    """The overrides of ``made``, of which later ones count."""
    quick = [key for key in QUICK if made.recipe != "sft" or not key.startswith("reward")]
    return [*quick, *(key.format(**policies) for key in made.keys)]


def conspicuous(run_dir: Path) -> list[Verdict]:
    return [verdict for verdict in verdicts(read_run(run_dir)) if verdict.conspicuous]


def main() -> None:
    from rlinf_vla.cli import main as cli
    from rlinf_vla.telemetry import report
    from tests.cli.conftest import write_recipes
    from tests.cli.counting_plugins import announce

    report.write_report = lambda run_dir: run_dir  # which would take most of the time
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        announce(folder / "package")
        sys.path[:0] = [str(folder / "package"), str(ROOT)]
        write_recipes(folder)
        policies = write_policies(folder)
        for title, runs in (("broken", BROKEN), ("healthy", HEALTHY)):
            print(f"\n| {title} | algorithm | keys | verdicts |\n|---|---|---|---|")
            right = 0
            for number, (run, made) in enumerate(runs.items()):
                run_dir = folder / title / str(number)
                arguments = ["train", "--config-dir", name, f"recipe=counting_{made.recipe}"]
                with contextlib.redirect_stdout(io.StringIO()):
                    code = cli.run([*arguments, f"run_dir={run_dir}", *keys(made, policies)])
                assert code == 0, run
                found = {verdict.name: verdict.number for verdict in conspicuous(run_dir)}
                right += made.verdict in found if made.verdict else not found
                said = "; ".join(f"**{name}**: {number}" for name, number in found.items())
                print(
                    f"| {run} | {made.recipe} | {' '.join(made.keys)} | {said or 'none'} |",
                    flush=True,
                )
            print(f"\n{right} of {len(runs)} as expected")


if __name__ == "__main__":
    main()

"""Error messages of a wrong command line suggest the key, recipe or choice that was meant."""

from __future__ import annotations

import pytest

from rlinf_vla.config.suggestions import abbreviates, suggest_keys
from rlinf_vla.runtime import recipes
from tests.cli.conftest import CommandLine

PPO = ("recipe=maniskill_ppo", "cluster=laptop")
KNOWN = recipes.keys()


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("lr", ["algorithm.learning_rate"]),
        ("algorithm.lr", ["algorithm.learning_rate"]),
        ("learning_rate", ["algorithm.learning_rate"]),
        ("model.learning_rate", ["algorithm.learning_rate"]),
        ("bs", ["rollout.batch_size", "algorithm.batch_size"]),
        ("algorithm.bs", ["algorithm.batch_size"]),
        ("n_envs", ["env.num_envs"]),
        ("wd", ["algorithm.weight_decay"]),
        ("temp", ["serve.temperature", "rollout.temperature", "evaluation.temperature"]),
        ("clip", ["algorithm.clip_low", "algorithm.clip_high"]),
        ("lora_rank", ["model.lora.rank"]),
        ("checkpoint_every", ["checkpoints.every"]),
        ("algorithm.gama", ["algorithm.gamma"]),
        ("algoritm.gamma", ["algorithm.gamma"]),
        ("xyzzy", []),
        ("algorithm.xyzzy", []),
    ],
)
def test_the_closest_match_is_suggested(key: str, right: list[str]) -> None:
    assert suggest_keys(key, KNOWN) == right


def test_a_suggestion_can_be_set() -> None:
    """It is no node, because ``algorithm=0.1`` would be another mistake."""
    inside = {
        ".".join(parts[:count])
        for parts in (key.split(".") for key in KNOWN)
        for count in range(1, len(parts))
    }
    wrong = {f"{key}x": inside.intersection(suggest_keys(f"{key}x", KNOWN)) for key in KNOWN}
    assert {key: nodes for key, nodes in wrong.items() if nodes} == {}


def test_an_abbreviation() -> None:
    assert (
        abbreviates("lr", "learning_rate")
        and abbreviates("learn_rate", "learning_rate")
        and abbreviates("batchsize", "batch_size")
    )
    assert (
        not abbreviates("l", "learning_rate")
        and not abbreviates("lx", "learning_rate")
        and not abbreviates("lrs", "learning_rate")
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["maniskill_ppo"], ["maniskill_ppo is not KEY=VALUE: write recipe=maniskill_ppo"]),
        (["maniskil_grpo", "seed=1"], ["write recipe=maniskill_grpo"]),
        ([*PPO, "nonsense"], ["nonsense is not KEY=VALUE: write recipe=NAME"]),
        (
            [*PPO, "run_dir=Läufe"],
            [
                """run_dir: Hydra cannot read Läufe: quote text, for the shell and for Hydra: "run_dir='Läufe'\""""
            ],
        ),
        ([*PPO, "run_dir=run (2)"], ["\"run_dir='run (2)'\""]),
        ([*PPO, "run_dir=lr=1"], ["\"run_dir='lr=1'\""]),
        ([*PPO, "run_dir=a\nb"], ["Hydra cannot read a b"]),
        ([*PPO, "run_dir=it's"], ["\"run_dir='it\\'s'\""]),
        ([*PPO, "sweep.policies=[start,Läufe]"], ["\"sweep.policies=['TEXT']\""]),
        ([*PPO, "lr=1e-4"], ["lr is not a key; did you mean algorithm.learning_rate?"]),
        (
            [*PPO, "env=gymnasium"],
            ["env=gymnasium does not fit recipe=maniskill_ppo, which sets task"],
        ),
        (
            [*PPO, "cluster.roles.rollout.resources={a: 1}"],
            ["add it with +cluster.roles.rollout.resources.a=VALUE"],
        ),
        (
            [*PPO, "algorithm.name=grpo"],
            ["algorithm.name=grpo does not go with", "choose with algorithm=grpo"],
        ),
        ([*PPO, "algorithm.name=3.7"], ["algorithm.name=3.7 is no name"]),
        (
            [*PPO, "algorithm.name=pppo"],
            ["algorithm.name=pppo is not known; did you mean ppo?: choose with algorithm=NAME"],
        ),
        ([*PPO, "model.name=pi0"], ["model.name=pi0 does not go with", "model=pi0"]),
        ([*PPO, "model.options=5"], ["choose with model=openvla"]),
        ([*PPO, "model.options=null"], ["choose with model=openvla"]),
        ([*PPO, "reward.name=success"], ["choose with reward=success"]),
        ([*PPO, "reward.name=-1"], ["reward.name=-1 is no name"]),
        ([*PPO, "cluster.address=-inf"], ["cluster.address=-inf cannot be used: use HOST:PORT"]),
        ([*PPO, "model.lora.targets=5"], ["model.lora.targets"]),
        (
            ["recipe=maniskill_grpo", "cluster=laptop", "algorithm.success_range=5"],
            ["algorithm.success_range"],
        ),
        (
            ["recipe=maniskill_grpo", "cluster=laptop", "algorithm.success_range=[0.9,0.1]"],
            ["is no interval: use a list of two numbers"],
        ),
        (
            ["recipe=maniskill_sac", "cluster=laptop", "algorithm.initial_alpha=-inf"],
            ["algorithm.initial_alpha=-inf is out of range"],
        ),
        (
            [*PPO, "algorithm.adam_beta2=1000"],
            ["algorithm.adam_beta2=1000.0 is out of range: use a number of at least 0 and below 1"],
        ),
        (
            ["recipe=maniskill_sac", "cluster=laptop", f"algorithm.hidden={10**30}"],
            ["algorithm.hidden=1000", "is out of range"],
        ),
    ],
)
def test_an_error_message_contains_the_fix(
    rlinf_vla: CommandLine, arguments: list[str], words: list[str]
) -> None:
    complaint = rlinf_vla("train", *arguments).complaint
    assert all(word in complaint for word in words), complaint


@pytest.mark.parametrize(
    "words", [["env.task=PushCube"], ["env.task=PutOnPlate", "env.tasks=[PutOnPlate]"]]
)
def test_a_task_beside_the_tasks_of_a_sweep(rlinf_vla: CommandLine, words: list[str]) -> None:
    complaint = rlinf_vla("eval", "recipe=maniskill_eval", *words).complaint
    task = words[0].partition("=")[2]
    assert f"{words[0]} has no effect" in complaint and f"write env.tasks=[{task}]" in complaint


def test_a_missing_gpu(rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    complaint = rlinf_vla("train", *PPO, "cluster.device=cuda").complaint
    assert "cluster.device=cuda" in complaint and "cluster=1gpu" in complaint

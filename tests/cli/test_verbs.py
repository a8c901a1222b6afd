"""Every verb from its command line to its files, on counter world: seconds instead of minutes."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.core.types import ActionEval, StepResult
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.runtime.workers.trainer import OnPolicyUpdater
from rlinf_vla.testing.toy_env import CounterWorld
from rlinf_vla.testing.toy_policy import LinearPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.cli.runs import assert_same_bits, assert_same_files, checkpoint, metrics

QUICK = ("evaluation.before_and_after=false",)


def test_training_writes_all_files_into_its_run_directory(train: Any, counting: Counting) -> None:
    run_dir = train("run", report=True)
    for name in ("recipe.yaml", "environment.json", "timeline.json", "report.html", "tensorboard"):
        assert (run_dir / name).exists(), name
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "step_000001",
        "step_000002",
    ]
    assert [line["step"] for line in metrics(run_dir)] == [1, 2]
    for name in ("before", "after"):
        document = json.loads((run_dir / "evaluation" / f"{name}.json").read_text())
        for mode in ("sampled", "greedy"):
            assert document[mode]["n_episodes"] == 5 and [
                e["seed"] for e in document[mode]["episodes"]
            ] == [0, 0, 1, 1, 2]  # two tasks
    assert (
        json.loads((run_dir / "evaluation" / "comparison.json").read_text())["sampled"]["n_pairs"]
        == 5
    )
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2
    assert counting.plugin.created and all(env.closed for env in counting.plugin.created)


def test_missing_files_of_a_run_killed_at_its_end_are_written(train: Any) -> None:
    comparison = train("run", "iterations=1") / "evaluation" / "comparison.json"
    told = comparison.read_text()
    comparison.unlink()
    train("run", "iterations=1", "resume=auto")
    assert comparison.read_text() == told
    late = train("late", *QUICK, "iterations=1")
    train("late", "iterations=1", "resume=auto", "evaluation.before_and_after=true")
    assert [path.name for path in (late / "evaluation").iterdir()] == ["after.json"], (
        "the evaluation before training is lost"
    )


def test_the_plan_does_not_change_the_result(train: Any) -> None:
    """Groups and micro-batches: the first bit for bit, the second to rounding."""
    one = train("one", *QUICK, "rollout.pipeline_depth=1")
    for depth in (2, 4):
        other = train(f"depth{depth}", *QUICK, f"rollout.pipeline_depth={depth}")
        assert_same_files(other, one, 2)
        assert metrics(other) == metrics(one)
    cut = checkpoint(train("cut", *QUICK, "cluster.micro_batch_size=3"), 2)
    for name, value in checkpoint(one, 2).items():
        torch.testing.assert_close(cut[name], value, rtol=0, atol=2e-3, msg=name)


def test_a_resumed_run_equals_the_uninterrupted_one(train: Any) -> None:
    whole = train("whole", *QUICK, "iterations=4")
    parts = train("parts", *QUICK, "iterations=2")
    train("parts", *QUICK, "iterations=4", "resume=auto", "rollout.pipeline_depth=4")
    assert_same_files(parts, whole, 4)
    assert metrics(parts) == metrics(whole)


@pytest.mark.parametrize("name", ["evaluation/after.json", "metrics.jsonl"])
def test_a_damaged_file_of_a_run_is_one_line(
    train: Any, rlinf_vla: CommandLine, counting: Counting, name: str
) -> None:
    path = train("run", *QUICK) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("rubbish\n")
    arguments = counting.arguments("train", "counting_ppo", "run_dir=run", "resume=auto")
    assert (
        f"run/{name}" in (complaint := rlinf_vla(*arguments).complaint)
        and "is damaged" in complaint
    )


@pytest.mark.parametrize("recipe", ["counting_grpo", "counting_sac"])
def test_other_algorithms_train_and_resume(
    train: Any, rlinf_vla: CommandLine, counting: Counting, recipe: str
) -> None:
    straight = train("straight", "iterations=4", recipe=recipe)
    parts = train("parts", *QUICK, recipe=recipe)
    train("parts", *QUICK, "iterations=4", "resume=auto", recipe=recipe)
    assert_same_files(parts, straight, 4)
    assert metrics(parts) == metrics(straight) and len(metrics(straight)) == 4
    found = rlinf_vla(
        *counting.arguments("eval", recipe, f"checkpoint={straight}/checkpoints/step_000004")
    )
    assert found.code == 0, found.err
    again, after = (
        json.loads((straight / "evaluation" / f"{name}.json").read_text())
        for name in ("step_000004", "after")
    )
    assert again["sampled"] == after["sampled"], "the same episodes, the same outcome"


def test_a_users_reward_is_used_for_training_but_not_evaluation(train: Any) -> None:
    own = train("own", "iterations=1")
    other = train("other", "iterations=1", "reward=success", "reward.weight=5")
    rewarded = [metrics(run_dir)[0] for run_dir in (own, other)]
    assert rewarded[0]["rollout/success_once"] == rewarded[1]["rollout/success_once"] > 0
    steps = rewarded[1]["rollout/steps"]
    assert rewarded[1]["rollout/reward_mean"] == pytest.approx(
        5 * round(rewarded[1]["rollout/reward_mean"] * steps / 5) / steps
    )
    returns = [
        json.loads((run_dir / "evaluation" / "before.json").read_text())["sampled"]["episodes"]
        for run_dir in (own, other)
    ]
    assert returns[0] == returns[1] and any(episode["return"] % 1 for episode in returns[0])


def test_a_finished_run_is_not_changed(train: Any) -> None:
    run_dir = train("run", *QUICK)
    before = checkpoint(run_dir, 2)
    train("run", *QUICK, "resume=auto")
    assert_same_bits(checkpoint(run_dir, 2), before)
    train("run", *QUICK, code=2)
    train("run", *QUICK, "resume=auto", "algorithm.gamma=0.5", code=2)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_resumes(
    train: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signum: int,
    code: int,
) -> None:
    """The signal arrives during the second rollout."""
    whole = train("whole", *QUICK, "iterations=3", "checkpoints.every=3")
    steps = [0]
    step_wait = CounterWorld.step_wait

    def interrupting(self: CounterWorld) -> StepResult:
        steps[0] += 1
        if steps[0] == 18:
            os.kill(os.getpid(), signum)
        return step_wait(self)

    with monkeypatch.context() as patch:
        patch.setattr(CounterWorld, "step_wait", interrupting)
        run_dir = train("run", *QUICK, "iterations=3", "checkpoints.every=3", code=code)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000001"], (
        "the finished work is not lost"
    )
    train("run", *QUICK, "iterations=3", "checkpoints.every=3", "resume=auto")
    assert_same_files(run_dir, whole, 3)


def test_a_second_interrupt_discards_the_unfinished_iteration(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice during the second update: the run resumes from the last checkpoint to the same bits."""
    whole = train("whole", *QUICK, "iterations=3")
    updates = [0]
    update = OnPolicyUpdater.update

    def interrupting(self: OnPolicyUpdater, *arguments: Any) -> Any:
        found = update(self, *arguments)
        updates[0] += 1
        for _ in range(2 * (updates[0] == 2)):
            os.kill(os.getpid(), signal.SIGINT)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(OnPolicyUpdater, "update", interrupting)
        run_dir = train("run", *QUICK, "iterations=3", "checkpoints.every=1", code=130)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000001"]
    train("run", *QUICK, "iterations=3", "resume=auto")
    assert_same_files(run_dir, whole, 3)


def test_demonstrations_do_not_make_a_signal_wait(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [0]
    step_wait = CounterWorld.step_wait

    def interrupting(self: CounterWorld) -> StepResult:
        steps[0] += 1
        if steps[0] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_wait(self)

    monkeypatch.setattr(CounterWorld, "step_wait", interrupting)
    run_dir = train("run", *QUICK, recipe="counting_sft", code=143)
    assert steps[0] < 10 and [path.name for path in (run_dir / "checkpoints").iterdir()] == [
        "step_000000"
    ]


def test_a_run_that_died_before_its_first_checkpoint_starts_again(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = (*QUICK, "iterations=3", "checkpoints.every=3")
    whole = train("whole", *late)
    steps = [0]
    step_wait = CounterWorld.step_wait

    def dying(self: CounterWorld) -> StepResult:
        steps[0] += 1
        if steps[0] == 18:
            raise RuntimeError("the world has ended")
        return step_wait(self)

    with monkeypatch.context() as patch:
        patch.setattr(CounterWorld, "step_wait", dying)
        run_dir = train("run", *late, code=1)
    assert [line["step"] for line in metrics(run_dir)] == [1] and not (
        run_dir / "checkpoints"
    ).exists()
    train("run", *late, "resume=auto")
    assert_same_files(run_dir, whole, 3)
    assert metrics(run_dir) == metrics(whole), "no iteration appears twice"


def test_a_run_saves_after_every_iteration_once_its_machine_will_leave(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnPolicyFlow, "will_leave", lambda flow: flow.iteration >= 1)
    run_dir = train("run", *QUICK, "iterations=4", "checkpoints.every=4", "checkpoints.keep=9")
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        f"step_{step:06d}" for step in (2, 3, 4)
    ]


def test_the_critic_may_warm_up_first(train: Any) -> None:
    run_dir = train("run", *QUICK, "algorithm.value_warmup=1")
    first, second = checkpoint(run_dir, 1), checkpoint(run_dir, 2)
    factors = [name for name in first if ".lora_B" in name and name.startswith("adapter_model")]
    assert factors and all(
        (first[name] == 0).all() and (second[name] != 0).any() for name in factors
    )
    heads = [name for name in first if name.startswith("heads")]
    assert heads and all((first[name] != 0).any() for name in heads)


def test_training_learns_to_count(train: Any) -> None:
    """Success rises from chance to nearly 1, in a fraction of a second per iteration."""
    longer = (
        "iterations=15",
        "env.num_envs=16",
        "algorithm.minibatch_size=64",
        "algorithm.epochs=4",
        "episodes=60",
        "checkpoints.every=15",
    )
    run_dir = train("run", *longer, "model.lora.rank=0", "evaluation.filmed=0")
    before, after = (
        json.loads((run_dir / "evaluation" / f"{name}.json").read_text())["sampled"]
        for name in ("before", "after")
    )
    assert before["pc_success"] < 50 and after["pc_success"] > before["pc_success"] + 30


def test_evaluation_of_a_checkpoint(train: Any, rlinf_vla: CommandLine, counting: Counting) -> None:
    run_dir = train("run")
    found = rlinf_vla(
        *counting.arguments(
            "eval", "counting_ppo", f"checkpoint={run_dir}/checkpoints/step_000002", "--json"
        )
    )
    assert found.code == 0 and "success of step_000002 in 5 episodes" in found.err, found.err
    again = json.loads((run_dir / "evaluation" / "step_000002.json").read_text())
    assert json.loads(found.out) == again, "nothing else is on stdout"
    after = json.loads((run_dir / "evaluation" / "after.json").read_text())
    for mode in ("sampled", "greedy"):
        assert again[mode] == after[mode], "the same episodes, the same outcome"
    missing = rlinf_vla(
        *counting.arguments("eval", "counting_ppo", f"checkpoint={run_dir}/checkpoints/step_000009")
    )
    assert "step_000009" in missing.complaint
    probes = ("evaluation.probes=[blank_instruction,blank_image]", "run_dir=probed")
    found = rlinf_vla(
        *counting.arguments(
            "eval", "counting_ppo", f"checkpoint={run_dir}/checkpoints/step_000002", *probes
        )
    )
    assert "blank_instruction +0.0 points" in found.out, found.out + found.err
    probed = json.loads(Path("probed/evaluation/step_000002.json").read_text())["sampled"]
    assert probed["episodes"] == after["sampled"]["episodes"], (
        "the policy itself is evaluated as without probes"
    )
    blank = probed["probes"]["blank_image"]
    assert [(each["task"], each["seed"]) for each in blank["episodes"]] == [
        (each["task"], each["seed"]) for each in probed["episodes"]
    ]
    assert (
        blank["n_success"] - probed["n_success"]
        == blank["difference"]["n_gained"] - blank["difference"]["n_lost"]
    )
    assert [each["steps"] for each in blank["episodes"]] != [
        each["steps"] for each in probed["episodes"]
    ], "it reads images"


def test_training_may_start_from_a_checkpoint(train: Any) -> None:
    first = train("first")
    second = train("second", f"checkpoint={first}/checkpoints/step_000002")
    start = json.loads((second / "evaluation" / "before.json").read_text())
    assert (
        start["sampled"] == json.loads((first / "evaluation" / "after.json").read_text())["sampled"]
    )


def test_imitation_writes_a_policy_that_can_be_trained(
    rlinf_vla: CommandLine, counting: Counting, train: Any, tmp_path: Path
) -> None:
    arguments = counting.arguments(
        "train", "counting_sft", "run_dir=sft", "iterations=40", "checkpoints.every=20"
    )
    found = rlinf_vla(*arguments)
    assert found.code == 0, found.out + found.err
    assert metrics(tmp_path / "sft")[-1]["sft/loss"] < 0.3 < math.log(5), (
        "far better than guessing among the bins"
    )
    assert (tmp_path / "sft" / "policy" / "manifest.json").exists()
    run_dir = train("run", "iterations=1", f"model.checkpoint={tmp_path}/sft/policy")
    start = json.loads((run_dir / "evaluation" / "before.json").read_text())
    taught = json.loads((tmp_path / "sft" / "evaluation" / "after.json").read_text())
    assert start["greedy"]["episodes"] == taught["greedy"]["episodes"]


def test_resumed_imitation_equals_the_uninterrupted_run(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    """The learning-rate schedule must not be that of a shorter run: decay_steps sets its length."""
    fixed = ("algorithm.decay_steps=6", *QUICK)
    for name, iterations, resume in (
        ("whole", 6, "never"),
        ("parts", 3, "never"),
        ("parts", 6, "auto"),
    ):
        found = rlinf_vla(
            *counting.arguments(
                "train",
                "counting_sft",
                f"run_dir={name}",
                f"iterations={iterations}",
                f"resume={resume}",
                *fixed,
            )
        )
        assert found.code == 0, found.out + found.err
    assert_same_files(tmp_path / "parts", tmp_path / "whole", 6)


def test_bench(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> None:
    verb, *rest = counting.arguments("bench", "counting_ppo", "run_dir=bench")
    found = rlinf_vla(verb, "rollout", *rest)
    assert found.code == 0, found.out + found.err
    document = json.loads((tmp_path / "bench" / "bench_rollout.json").read_text())
    assert (
        document["serial"]["steps"] == document["pipelined"]["steps"] > 0 and document["ratio"] > 0
    )
    assert set(document["frames_per_s"]) == {"counter"} and all(
        env.closed for env in counting.plugin.created
    )


# errors that must end a run


def test_a_policy_that_disagrees_with_itself_is_refused(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = LinearPolicy.evaluate

    def other(self: LinearPolicy, *arguments: Any, **named: Any) -> ActionEval:
        found = evaluate(self, *arguments, **named)
        return ActionEval(found.log_prob - 0.01, found.entropy, found.value)

    monkeypatch.setattr(LinearPolicy, "evaluate", other)
    run_dir = train("run", *QUICK, code=1)
    assert not (run_dir / "checkpoints").exists(), "nothing was trained"


def test_a_gradient_that_is_not_finite_ends_the_run(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = LinearPolicy.evaluate

    def boundless(self: LinearPolicy, *arguments: Any, **named: Any) -> ActionEval:
        found = evaluate(self, *arguments, **named)
        return ActionEval(found.log_prob, found.entropy, found.value * math.inf)

    monkeypatch.setattr(LinearPolicy, "evaluate", boundless)
    run_dir = train("run", *QUICK, code=1)
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize("where", ["step_wait", "reset_wait"])
def test_a_simulator_that_dies_ends_the_run(
    train: Any, counting: Counting, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def die(self: CounterWorld) -> Any:
        raise RuntimeError("the world has ended")

    monkeypatch.setattr(CounterWorld, where, die)
    train("run", *QUICK, code=1)
    assert all(env.closed for env in counting.plugin.created)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action_dim": 7}, ["4 dimensions", "7"]),
        ({"images": {"wrist": (64, 64)}}, ["base", "wrist"]),
        ({"images": {"base": (32, 32)}}, ["64x64", "32x32"]),
        ({"images": {"base": (128, 32)}}, ["64x64", "128x32"]),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(
    rlinf_vla: CommandLine,
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    words: list[str],
) -> None:
    create = counting.plugin.create

    def otherwise(config: Any, groups: int) -> Any:
        envs = create(config, groups)
        for env in envs:
            env.spec = replace(env.spec, **change)
        return envs

    monkeypatch.setattr(counting.plugin, "create", otherwise)
    complaint = rlinf_vla(*counting.arguments("train", "counting_ppo")).complaint
    assert all(word in complaint for word in words), complaint
    assert all(env.closed for env in counting.plugin.created)


@pytest.mark.parametrize("overrides", [["algorithm.horizon=0"], ["algorithm.horizon=8"]])
def test_a_rollout_has_complete_episodes(
    rlinf_vla: CommandLine, counting: Counting, overrides: list[str]
) -> None:
    assert (
        overrides[0]
        in rlinf_vla(*counting.arguments("train", "counting_ppo", *overrides)).complaint
    )
    assert all(env.closed for env in counting.plugin.created)


def test_a_classifier_is_trained_and_used_as_reward(
    rlinf_vla: CommandLine, counting: Counting, train: Any, tmp_path: Path
) -> None:
    whole = train("whole", recipe="counting_classifier")
    found = json.loads((whole / "evaluation" / "after.json").read_text())
    assert found["frames of success"]["pc"] > 90
    assert found["other frames"]["pc"] > 60, (
        "the image does not show the task, and therefore not the target count"
    )
    assert (whole / "classifier" / "manifest.json").exists()
    seen = train(
        "seen",
        "iterations=1",
        "reward=classifier",
        f"reward.options.checkpoint={whole}/classifier",
        *QUICK,
    )
    own = train("own", "iterations=1", "reward=success", *QUICK)
    assert metrics(seen)[0]["rollout/reward_mean"] == pytest.approx(
        metrics(own)[0]["rollout/reward_mean"], abs=0.05
    )
    missing = rlinf_vla(*counting.arguments("train", "counting_ppo", "reward=classifier"))
    assert "reward.options.checkpoint has no value" in missing.complaint

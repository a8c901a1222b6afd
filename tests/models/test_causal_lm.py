"""Text as a world: the language model and the dialogues pass the suites, and learn together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.grpo import GRPO
from rlinf_vla.cli import main as cli
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Observation, Trajectory
from rlinf_vla.envs.dialogue.games import KEYS
from rlinf_vla.envs.dialogue.plugin import DialogueConfig, plugin
from rlinf_vla.models.causal_lm.options import CausalLMOptions
from rlinf_vla.models.causal_lm.policy import CausalLMPolicy
from rlinf_vla.runtime.recipes import asset_path
from rlinf_vla.telemetry.metrics import read_metrics
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance, episodes
from rlinf_vla.testing.policy import DiscretePolicyConformance
from rlinf_vla.testing.policy_calls import act
from tests.cli.conftest import handlers_of_a_module  # noqa: F401

TINY = asset_path("asset://causal_lm_tiny")


def tiny(folder: Path = TINY, **options: object) -> CausalLMPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CausalLMPolicy.load(folder, CausalLMOptions(random_weights=True, **options))  # type: ignore[arg-type]


class TestCausalLM(DiscretePolicyConformance):
    @pytest.fixture
    def policy(self) -> CausalLMPolicy:
        return tiny(prompt_length=48, alphabet="0123456789")

    def reload(self, policy: CausalLMPolicy, directory: Path) -> CausalLMPolicy:
        directory.mkdir()
        policy.save(directory)
        return CausalLMPolicy.load(
            directory, CausalLMOptions(prompt_length=48, alphabet="0123456789")
        )

    def choices(self, latent: dict[str, Tensor]) -> Tensor:
        tokens = latent["tokens"]
        ends = (tokens == 1).long()
        return torch.where(ends.cumsum(1) - ends == 0, tokens, -1)[..., None]


@pytest.mark.parametrize("random_weights", [False, True])
def test_dropout_is_off(tmp_path: Path, random_weights: bool) -> None:
    """A policy draws from its noise only, and the loss is that of the probabilities it acted by."""
    folder = Path(shutil.copytree(TINY, tmp_path / "lm"))
    tiny(prompt_length=48).save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    torch.manual_seed(0)
    policy = CausalLMPolicy.load(
        folder,
        CausalLMOptions(random_weights=random_weights, prompt_length=48, alphabet="0123456789"),
    )
    inputs = policy.prepare(Observation({}, torch.zeros(2, 0), ["1+2=", "3+4="]))
    first, second = (policy.encode(inputs).logits for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("ends", [None, [1, 2]])
def test_what_ends_an_answer_is_one_token(tmp_path: Path, ends: object) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "lm"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    with pytest.raises(
        UserError, match=r"eos_token_id is .*: write there the one token that ends an answer"
    ):
        tiny(folder, prompt_length=48)


class TestSums(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return plugin.create(
            DialogueConfig(num_envs=2 * NUM_ENVS, episode_limit=EPISODE_LIMIT, answer_tokens=9),
            groups=2,
        )


class TestSearch(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        config = DialogueConfig(
            task="search",
            num_envs=2 * NUM_ENVS,
            episode_limit=EPISODE_LIMIT,
            answer_tokens=9,
            token_bytes=2,
        )
        return plugin.create(config, groups=2)


def written(*answers: str, width: int = 1) -> Tensor:
    """Actions ``[B, C, width]`` that write an answer in each environment."""
    length = max(map(len, answers)) + 1
    rows = [
        [ord(letter) for letter in answer + "\n"] + [0] * (length - len(answer) - 1)
        for answer in answers
    ]
    return torch.nn.functional.pad(
        torch.tensor(rows, dtype=torch.float32)[..., None], (0, width - 1)
    )


def test_a_right_sum_is_rewarded() -> None:
    (env,) = plugin.create(DialogueConfig(num_envs=3, episode_limit=3), groups=1)
    prompts = env.reset(episodes(1, 2, 3)).instruction
    right = [f"{sum(map(int, prompt.removesuffix('=').split('+'))):02}" for prompt in prompts]
    result = env.step(written(right[0], "99", right[2]))
    assert result.reward.sum(1).tolist() == [1, 0, 1] == result.success.any(1).float().tolist()
    assert result.terminated.any(1).all() and not result.truncated.any()


def test_a_lead_adds_what_its_workers_found() -> None:
    """Agents see only their own prompts; the whole tree is one episode, with one outcome."""
    (env,) = plugin.create(
        DialogueConfig(task="search", num_envs=1, episode_limit=40, answer_tokens=3), groups=1
    )
    prompt = env.reset(episodes(5)).instruction[0]
    first, second = prompt.removeprefix("lead ").removesuffix(": ask ").split("+")
    seen, found = [], []
    for answer in (first + second, first, None, second, None):
        (text,) = env.step(written(answer or found[-1])).observation.instruction
        seen.append(text)
        if " is " in text:
            found.append(text.partition(": ")[2][1])
    assert seen[:2] == [f"worker {first}: find ", f"worker {first}: {first}{found[0]} is "]
    assert seen[-1] == f"lead {first}+{second}: {','.join(found)}="
    result = env.step(written(str(sum(map(int, found)))))
    assert result.success.any() and result.reward.sum() == 1


def test_a_worker_finds_only_what_is_in_the_corpus() -> None:
    (env,) = plugin.create(
        DialogueConfig(task="search", num_envs=1, episode_limit=40, answer_tokens=3), groups=1
    )
    env.reset(episodes(5))
    assert env.step(written("z")).observation.instruction == ["worker z: find "]
    assert (
        env.step(written("z")).observation.instruction == ["worker z: nothing is "]
        and "z" not in KEYS
    )
    assert env.step(written("1")).observation.instruction[0].endswith(": 1=")


def test_an_answer_ends_by_itself() -> None:
    (env,) = plugin.create(DialogueConfig(num_envs=1, answer_tokens=2, episode_limit=9), groups=1)
    env.reset(episodes(1))
    assert (
        env.step(torch.full((1, 1, 1), float(ord("1")))).observation.instruction[0].endswith("=1")
    )
    assert env.step(torch.full((1, 1, 1), float(ord("1")))).terminated.all()


def test_what_follows_the_end_is_not_written() -> None:
    policy = tiny(chunk=8, alphabet="01")
    inputs = policy.prepare(Observation({}, torch.zeros(64, 0), ["1+1="] * 64))
    sample = act(policy, inputs)
    found = policy.evaluate(inputs, sample.latent, 1.0)
    for row in range(64):
        numbers = sample.actions[row, :, 0].int().tolist()
        length = numbers.index(10) + 1 if 10 in numbers else 8
        assert set(numbers[: length - 1]) <= {48, 49} and set(numbers[length:]) <= {0}
        assert (sample.log_prob[row, :length] < 0).all() and (found.entropy[row, :length] > 0).all()
        assert not sample.log_prob[row, length:].any() and not found.entropy[row, length:].any()
    assert len({tuple(row) for row in sample.actions[..., 0].tolist()}) > 10


def test_long_tokens_are_written_in_one_action(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["né"] = vocabulary.pop("z")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    policy = tiny(tmp_path, alphabet="né")
    assert policy.spec.action_dim == 3 == policy.spec.env["token_bytes"]
    sample = act(policy, policy.prepare(Observation({}, torch.zeros(8, 0), ["1+1="] * 8)))
    assert {bytes(row) for chunk in sample.actions.int().tolist() for row in chunk} <= {
        "né".encode(),
        b"n\0\0",
        b"\n\0\0",
        b"\0\0\0",
    }
    assert torch.equal(policy.vocabulary.tokens(sample.actions), sample.latent["tokens"])
    assert not sample.log_prob[..., 1:].any()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    policy = tiny(prompt_length=3)
    with pytest.raises(UserError, match="prompt_length=4 or more"):
        policy.prepare(Observation({}, torch.zeros(1, 0), ["1+1="]))
    with pytest.raises(UserError, match=r"model\.options\.alphabet=é"):
        tiny(alphabet="é")
    with pytest.raises(UserError, match=r"model\.checkpoint"):
        tiny(tmp_path)
    with pytest.raises(UserError, match=r"env\.task=sum is unknown: did you mean sums"):
        plugin.create(DialogueConfig(task="sum"), groups=1)


SHORT = (
    "algorithm.episodes=512",
    "model.options.prompt_length=4",
    "evaluation.before_and_after=false",
    "cluster=laptop",
    "checkpoints.every=100",
)
PROMPTS = ("model.options.prompt_length=24",)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_its_answers_get_better(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = (
        []
        if algorithm == "grpo"
        else ["algorithm=dapo", "algorithm.granularity=action", "algorithm.resample=1"]
    )
    assert (
        cli.run(["train", "recipe=dialogue_grpo", *more, *SHORT, "iterations=30", "run_dir=run"])
        == 0
    )
    success = [
        line["rollout/success_once"]
        for line in read_metrics(tmp_path / "run")
        if "rollout/success_once" in line
    ]
    assert sum(success[-5:]) / 5 > sum(success[:5]) / 5 + 0.03


def test_a_whole_tree_shares_its_advantage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns of lead and workers are calls of one episode, and GRPO credits all of them alike."""
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[int, int]] = []

    def advantages(self: GRPO, calls: Trajectory) -> Tensor:
        found = original(self, calls)
        for episode in calls.episode_ids().unique():
            own = found[calls.episode_ids() == episode]
            seen.append((len(own), len(own.unique())))
        return found

    original = GRPO.advantages
    monkeypatch.setattr(GRPO, "advantages", advantages)
    words = (
        "env.task=search",
        "env.episode_limit=12",
        "model.options.alphabet=0123456789abcdef",
        "algorithm.minibatch_size=64",
    )
    assert (
        cli.run(
            [
                "train",
                "recipe=dialogue_grpo",
                *SHORT,
                *words,
                "algorithm.episodes=256",
                *PROMPTS,
                "iterations=2",
                "run_dir=run",
            ]
        )
        == 0
    )
    assert {count for count, _ in seen} >= {2, 6} and {advantages for _, advantages in seen} == {1}

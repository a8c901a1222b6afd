"""The command line as a user runs it."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError

from rlinf_vla import __version__
from rlinf_vla.cli import compose, train
from rlinf_vla.cli import list as list_command
from rlinf_vla.cli.doctor import unused_gpu
from rlinf_vla.cli.verbs import verbs
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core import plugins
from rlinf_vla.core.interrupt import Interrupted
from rlinf_vla.core.protocols import Diagnosis
from rlinf_vla.runtime import hooks, recipes
from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.unread import unread

VERBS = verbs()

PPO = "recipe=maniskill_ppo"
RECIPES = list(list_command.recipe_names())


def subprocess_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlinf_vla.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=cwd,
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[DictConfig]:
    """Recipes that ``train`` was called with; it reads its recipe and does nothing."""
    configs: list[DictConfig] = []

    def run(config: DictConfig) -> None:
        recipes.read(config)
        configs.append(config)

    monkeypatch.setattr(train, "run", run)
    return configs


# in separate processes


def test_the_program_without_arguments_shows_the_usage(tmp_path: Path) -> None:
    found = subprocess_run(cwd=tmp_path)
    assert found.returncode == 0 and found.stderr == "" and list(tmp_path.iterdir()) == []
    assert all(f"  {verb} " in found.stdout for verb in VERBS)


def test_a_process_ends_with_the_code_and_one_line(tmp_path: Path) -> None:
    found = subprocess_run("train", PPO, "algorithm.gama=0.9", cwd=tmp_path)
    assert found.returncode == 2 and found.stdout == "" and list(tmp_path.iterdir()) == []
    assert found.stderr == "rlinf-vla: algorithm.gama is not a key; did you mean algorithm.gamma?\n"


def test_the_log_level_shows_what_happens(tmp_path: Path) -> None:
    quiet, loud = (
        subprocess_run("list", "envs", *options, cwd=tmp_path)
        for options in ([], ["--log-level=debug"])
    )
    assert (
        "DEBUG rlinf_vla.core.plugins: rlinf_vla.envs maniskill is rlinf_vla.envs.maniskill.plugin:"
        in loud.stderr
    )
    assert quiet.stderr == "" and quiet.stdout == loud.stdout


@pytest.mark.parametrize(
    "arguments", [["list", "envs", "--log-level"], ["--log-level", "all", "list", "envs"]]
)
def test_a_wrong_log_level(rlinf_vla: CommandLine, arguments: list[str]) -> None:
    assert "choose debug, info, warning, error" in rlinf_vla(*arguments).complaint


def test_a_read_only_home_matters_only_to_commands_that_write_there(tmp_path: Path) -> None:
    program = "from rlinf_vla.cli import main as cli\ncli.run(['--version'])\nimport rlinf_vla.telemetry.charts"
    environment = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR"} | {
        "HOME": "/dev/null"
    }
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
        env=environment,
    )
    assert (found.returncode, found.stderr) == (0, "")


# recipes


@pytest.mark.parametrize("model", ["openvla", "openvla_oft", "pi0"])
@pytest.mark.parametrize("name", ["maniskill_sft", "maniskill_ppo"])
def test_the_main_recipes_have_an_initial_checkpoint_for_every_model(name: str, model: str) -> None:
    found = recipes.read(
        compose.load("train", [f"recipe={name}", f"model={model}", "cluster=laptop"])
    )
    assert found.model.name == model
    assert (recipes.asset_path(found.model.checkpoint) / "config.json").exists()
    assert (name == "maniskill_sft") == found.model.options.random_weights


def test_sac_may_learn_on_a_vlas_features() -> None:
    found = recipes.read(
        compose.load("train", ["recipe=maniskill_sac", "model=openvla_oft", "cluster=laptop"])
    )
    assert (
        found.algorithm.frozen_backbone
        and found.model.lora.rank == 0
        and not found.model.options.random_weights
    )


# usage


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_usage(rlinf_vla: CommandLine, arguments: list[str]) -> None:
    found = rlinf_vla(*arguments)
    assert (
        found.code == 0
        and "rlinf-vla VERB" in found.out
        and all(f"  {name:11} {verb.purpose}" in found.out for name, verb in VERBS.items())
    )
    assert all(len(line) <= 80 for line in found.out.splitlines())


def test_version(rlinf_vla: CommandLine) -> None:
    assert rlinf_vla("--version").out.strip() == __version__


@pytest.mark.parametrize(
    ("verb", "meant"), [("trian", "train"), ("evaluate", "eval"), ("docter", "doctor")]
)
def test_an_unknown_verb(rlinf_vla: CommandLine, verb: str, meant: str) -> None:
    assert f"'{verb}' is not a verb; did you mean {meant}?" in rlinf_vla(verb, "recipe=x").complaint


def test_an_absurd_verb_gets_no_advice(rlinf_vla: CommandLine) -> None:
    complaint = rlinf_vla("xyzzy").complaint
    assert "did you mean" not in complaint and "train" in complaint


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("arguments", [["--help"], ["recipe=maniskill_ppo", "-h"]])
def test_help_of_a_verb(
    rlinf_vla: CommandLine, trained: list[DictConfig], verb: str, arguments: list[str]
) -> None:
    """In one form, on a terminal of 80 columns."""
    found = rlinf_vla(verb, *arguments)
    assert (
        found.code == 0
        and found.out.startswith(f"rlinf-vla {verb}: {VERBS[verb].purpose}")
        and not trained
    )
    assert all(len(line) <= 80 for line in found.out.splitlines())
    usage, options, examples = (
        found.out.index(f"\n{head}:\n") for head in ("Usage", "Options", "Examples")
    )
    assert usage < options < examples and found.out[examples:].count(f"  rlinf-vla {verb}") == 3


def test_every_verb_has_a_module() -> None:
    modules = [
        f"{verb.module}.{word}" for verb in VERBS.values() if verb.programs for word in verb.words
    ]
    modules += [verb.module for verb in VERBS.values() if not verb.programs]
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


def test_a_package_brings_a_verb(
    rlinf_vla: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tmp_path / "package")
    monkeypatch.syspath_prepend(tmp_path / "package")
    assert rlinf_vla("count", "a", "b").out == "2\n"
    assert "  rlinf-vla count a b c\n" in rlinf_vla("count", "--help").out
    assert "\nCount:\n  count       count the words\n" in rlinf_vla().out
    assert "did you mean count?" in rlinf_vla("cuont").complaint


def test_a_missing_entry_point_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "Installed", lambda group: {})
    with pytest.raises(
        UserError, match=r"the entry point sweep .* is missing: install it once more"
    ):
        hooks.sweep()


# recipes and keys


def test_a_recipe_reaches_its_verb(rlinf_vla: CommandLine, trained: list[DictConfig]) -> None:
    assert rlinf_vla("train", PPO, "env.num_envs=8", "seed=3", "cluster=laptop").code == 0
    (config,) = trained
    read = recipes.read(config)
    assert (read.name, read.env.num_envs, read.seed, read.cluster.name, read.algorithm.name) == (
        "maniskill_ppo",
        8,
        3,
        "laptop",
        "ppo",
    )


def test_the_verb_without_a_recipe(rlinf_vla: CommandLine) -> None:
    complaint = rlinf_vla("train").complaint
    assert "recipe=NAME" in complaint and "rlinf-vla list recipes" in complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["recipe=maniskil_ppo"],
            ["recipe=maniskil_ppo does not exist", "did you mean recipe=maniskill_ppo?"],
        ),
        (["recipe=zzz"], ["recipe=zzz does not exist", "maniskill_ppo"]),
        ([PPO, "env=maniskil"], ["env=maniskil does not exist", "env=maniskill?"]),
        ([PPO, "cluster=lptop"], ["cluster=lptop does not exist", "cluster=laptop?"]),
        ([PPO, "algorithm.gama=0.9"], ["algorithm.gama is not a key", "algorithm.gamma?"]),
        ([PPO, "learning_rate=0.1"], ["learning_rate is not a key", "algorithm.learning_rate?"]),
        ([PPO, "env.horizon=20"], ["env.horizon is not a key", "algorithm.horizon?"]),
        ([PPO, "num_envs=2"], ["num_envs is not a key", "env.num_envs?"]),
        ([PPO, "env.num_env=2"], ["env.num_env is not a key", "env.num_envs?"]),
        (
            [PPO, "model.options.promt_length=2"],
            ["model.options.promt_length is not a key", "model.options.prompt_length?"],
        ),
        ([PPO, "zzz=1"], ["zzz is not a key"]),
        ([PPO, "+new.key=1"], ["new"]),
        ([PPO, "+algorithm.brand_new=1"], ["algorithm.brand_new is not a key"]),
        ([PPO, "~algorithm.gamma"], ["gamma"]),
        ([PPO, "env.num_envs=many"], ["env.num_envs", "many", "Integer"]),
        ([PPO, "env.num_envs=1.5"], ["env.num_envs", "1.5", "Integer"]),
        ([PPO, "algorithm.gamma=high"], ["algorithm.gamma", "high", "Float"]),
        ([PPO, "env.num_envs=[4]"], ["env.num_envs"]),
        ([PPO, "env.num_envs="], ["env.num_envs"]),
        ([PPO, "algorithm="], ["algorithm"]),
        ([PPO, "cluster=8"], ["cluster"]),
        ([PPO, "=3"], ["=3"]),
        ([PPO, "reward=succes"], ["reward=succes does not exist", "reward=success?"]),
        ([PPO, "reward=function"], ["reward.options.function has no value"]),
        ([PPO, "reward=success", "reward.option.x=1"], ["reward.option"]),
    ],
)
def test_a_wrong_key(
    rlinf_vla: CommandLine, trained: list[DictConfig], arguments: list[str], words: list[str]
) -> None:
    complaint = rlinf_vla("train", *arguments).complaint
    assert all(word in complaint for word in words), complaint
    assert not trained


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env.num_envs=15", ["env.num_envs=15", "rollout.pipeline_depth=2"]),
        ("env.num_envs=0", ["env.num_envs=0 is out of range", "a whole number from 1 to 1000000"]),
        ("rollout.pipeline_depth=0", ["rollout.pipeline_depth=0"]),
        ("rollout.batch_size=0", ["rollout.batch_size=0"]),
        ("rollout.batch_size=3", ["rollout.batch_size=3", "8"]),
        ("rollout.temperature=0", ["rollout.temperature=0"]),
        ("iterations=-1", ["iterations=-1"]),
        ("episodes=0", ["episodes=0"]),
        ("cluster.device=tpu", ["cluster.device=tpu", "cpu, cuda, npu, xpu, mps or fake_gpu"]),
        ("evaluation.modes=[sampled,dreaming]", ["evaluation.modes", "dreaming"]),
        ("checkpoints.every=0", ["checkpoints.every"]),
        ("checkpoints.keep=0", ["checkpoints.keep"]),
        ("algorithm.minibatch_size=0", ["algorithm.minibatch_size=0"]),
        ("cluster.micro_batch_size=0", ["cluster.micro_batch_size=0"]),
        ("rollout.temperature=nan", ["rollout.temperature=nan"]),
    ],
)
def test_an_impossible_combination(
    rlinf_vla: CommandLine, trained: list[DictConfig], override: str, words: list[str]
) -> None:
    """It is refused before anything is built."""
    complaint = rlinf_vla("train", PPO, "cluster=laptop", override).complaint
    assert all(word in complaint for word in words) and not trained, complaint


def test_a_model_that_is_not_in_the_package(rlinf_vla: CommandLine) -> None:
    complaint = rlinf_vla(
        "train", PPO, "cluster=laptop", "model.checkpoint=asset://openvla_tin"
    ).complaint
    assert "asset://openvla_tin is not in the package; did you mean openvla_tin" in complaint


def test_a_classifier_is_no_policy(rlinf_vla: CommandLine) -> None:
    other = ["model=compact", "model.checkpoint=asset://compact"]
    assert (
        "model=none"
        in rlinf_vla("train", "recipe=reward_classifier", "cluster=laptop", *other).complaint
    )
    assert (
        "model=none"
        in rlinf_vla("train", "recipe=maniskill_sft", "cluster=laptop", "model.name=none").complaint
    )
    assert (
        "set reward=classifier"
        in rlinf_vla(
            "train", "recipe=reward_classifier", "cluster=laptop", "reward.name=null"
        ).complaint
    )
    split = ["cluster.runtime=ray", "rollout.split=head"]
    assert (
        "does not act"
        in rlinf_vla("train", "recipe=reward_classifier", "cluster=laptop", *split).complaint
    )


def test_a_reward_without_a_network_is_not_trained(
    rlinf_vla: CommandLine, counting: Counting
) -> None:
    assert (
        "no model to train"
        in rlinf_vla(
            *counting.arguments("train", "counting_classifier", "reward=success")
        ).complaint
    )


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("repro_")])
@pytest.mark.parametrize("cluster", ["laptop", "1gpu"])
def test_every_recipe_is_complete(name: str, cluster: str) -> None:
    # only the user can provide it: a released checkpoint
    given = ["model.checkpoint=given"] if name.startswith("libero") and cluster == "1gpu" else []
    assert (
        recipes.read(compose.load("train", [f"recipe={name}", f"cluster={cluster}", *given])).name
        == name
    )


# showing without running


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cfg", "job", PPO],
        [PPO, "--cfg", "job"],
        [PPO, "seed=3", "--cfg", "job"],
        ["cluster=auto", PPO, "--cfg", "job"],
        ["--cfg=job", PPO, "cluster=laptop"],
    ],
)
def test_cfg_job_prints_the_recipe(
    rlinf_vla: CommandLine, trained: list[DictConfig], tmp_path: Path, arguments: list[str]
) -> None:
    """At any position of the flag."""
    found = rlinf_vla("train", *arguments)
    assert found.code == 0, found.err
    shown = OmegaConf.create(found.out)
    assert (shown.name, shown.cluster.name, shown.env.num_envs) == ("maniskill_ppo", "laptop", 16)
    assert not trained and list(tmp_path.iterdir()) == []


def test_the_printed_recipe_is_the_one_that_would_run(
    rlinf_vla: CommandLine, trained: list[DictConfig]
) -> None:
    overrides = [PPO, "cluster=laptop", "algorithm.gamma=0.5"]
    shown = OmegaConf.create(rlinf_vla("train", "--cfg", "job", *overrides).out)
    rlinf_vla("train", *overrides)
    assert OmegaConf.to_container(trained[0]) == OmegaConf.to_container(shown)


# the user's own recipes


@pytest.mark.parametrize("flag_first", [True, False])
def test_a_recipe_of_the_users(
    rlinf_vla: CommandLine, trained: list[DictConfig], tmp_path: Path, flag_first: bool
) -> None:
    write_recipe(tmp_path, "seed: 42\n")
    arguments = ["--config-dir", str(tmp_path / "mine"), "recipe=mine"]
    found = rlinf_vla("train", *(arguments if flag_first else [*arguments[2:], *arguments[:2]]))
    assert found.code == 0, found.err
    assert (trained[0].seed, trained[0].name, trained[0].env.task) == (42, "mine", "PushCube")


def write_recipe(folder: Path, text: str) -> None:
    (folder / "mine" / "recipe").mkdir(parents=True)
    head = "# @package _global_\ndefaults:\n  - maniskill_ppo\n  - _self_\nname: mine\n"
    (folder / "mine" / "recipe" / "mine.yaml").write_text(head + text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("sead: 42\n", "sead"),
        ("algorithm:\n  gama: 1\n", "gama"),
        ("env:\n  num_envs: many\n", "many"),
        ("env: [\n", "mine"),
        ("\tseed: 1\n", "mine"),
    ],
)
def test_a_mistake_in_a_recipe_of_the_users(
    rlinf_vla: CommandLine, trained: list[DictConfig], tmp_path: Path, text: str, word: str
) -> None:
    write_recipe(tmp_path, text)
    complaint = rlinf_vla("train", "--config-dir", str(tmp_path / "mine"), "recipe=mine").complaint
    assert word in complaint and not trained


def test_a_missing_folder_of_recipes(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    assert "nowhere" in rlinf_vla("train", "--config-dir", str(tmp_path / "nowhere"), PPO).complaint


# failures


@pytest.mark.parametrize(
    ("failure", "code", "line", "traced"),
    [
        (
            RuntimeError("the arm fell off\nand rolled away"),
            1,
            "RuntimeError: the arm fell off",
            True,
        ),
        (ValueError(), 1, "ValueError: no message", True),
        (
            FloatingPointError("the gradient is not finite"),
            1,
            "FloatingPointError: the gradient is not finite",
            True,
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            1,
            "No space left on device (/x/y): free space",
            False,
        ),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            1,
            "No space left on device: free space",
            False,
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300),
            2,
            f"File name too long ({'x' * 60}...)",
            False,
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x/y"), 1, "/x/y", True),
        (
            UserError("model.checkpoint=x: no such directory"),
            2,
            "model.checkpoint=x: no such directory",
            False,
        ),
        (Interrupted(signal.SIGINT), 130, "interrupted by SIGINT", False),
        (Interrupted(signal.SIGTERM), 143, "interrupted by SIGTERM", False),
        (KeyboardInterrupt(), 130, "interrupted", False),
    ],
)
def test_how_a_failure_ends(
    rlinf_vla: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    code: int,
    line: str,
    traced: bool,
) -> None:
    def fail(config: DictConfig) -> None:
        raise failure

    monkeypatch.setattr(train, "run", fail)
    found = rlinf_vla("train", PPO)
    assert found.code == code
    last = found.err.splitlines()[-1]
    assert last.startswith("rlinf-vla: ") and line in last
    assert ("Traceback" in found.err) == traced and (traced or found.err.count("\n") == 1)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_command(
    rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch, signum: int, code: int
) -> None:
    def interrupted(config: DictConfig) -> None:
        os.kill(os.getpid(), signum)
        pytest.fail("it goes on")

    monkeypatch.setattr(train, "run", interrupted)
    found = rlinf_vla("train", PPO)
    assert (
        found.code == code
        and found.err == f"rlinf-vla: interrupted by {signal.Signals(signum).name}\n"
    )


def test_an_interrupted_run_has_its_exit_code_although_its_output_is_closed() -> None:
    """Ctrl-C also ends ``| tee log``."""
    program = (
        "import sys\nfrom rlinf_vla.cli import main as cli\nfrom rlinf_vla.core.interrupt import Interrupted\n"
        "def dispatch(arguments):\n    print('unread')\n    sys.stdin.read()\n    raise Interrupted(2)\n"
        "cli._dispatch = dispatch\ncli.main()"
    )
    assert unread(program) == ("rlinf-vla: interrupted by SIGINT\n", 130)


def test_closed_standard_files_are_opened_on_dev_null(tmp_path: Path) -> None:
    """As by ``<&- >&- 2>&-``. Files opened later do not get their numbers, and output is discarded."""
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom rlinf_vla.cli import main as cli\n"
        "def dispatch(arguments):\n"
        "    print('unread', flush=True)\n    print('unread', file=sys.stderr, flush=True)\n"
        "    with open('made', 'w') as file:\n        file.write(f'{file.fileno()} {sys.stdin.read()!r} {sys.stdout.isatty()}')\n"
        "    return 0\n"
        "cli._dispatch = dispatch\ncli.main()"
    )
    (tmp_path / "program.py").write_text(program)
    command = f"{sys.executable} program.py <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=250).returncode == 0
    number, read, terminal = (tmp_path / "made").read_text().split()
    assert int(number) > 2 and (read, terminal) == ("''", "False")


def test_repeated_failures_are_reported_without_a_traceback(
    rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: DictConfig) -> None:
        raise Failure("simulator processes were lost")

    monkeypatch.setattr(train, "run", fail)
    found = rlinf_vla("train", PPO)
    assert (found.code, found.err) == (1, "rlinf-vla: simulator processes were lost\n")


# verbs without a recipe


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("recipes", "maniskill_ppo"),
        ("models", "openvla"),
        ("envs", "maniskill"),
        ("tasks", "PushCube"),
        ("rewards", "success"),
    ],
)
def test_list(rlinf_vla: CommandLine, what: str, word: str) -> None:
    found = rlinf_vla("list", what)
    assert found.code == 0 and word in found.out
    assert word in rlinf_vla("list").out


LIGHT = """
import sys
from rlinf_vla.cli.main import run
assert run(sys.argv[1:]) == 0
assert "torch" not in sys.modules, "it takes seconds to import"
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["list"],
        *(["list", each] for each in list_command.LISTS),
        ["train", "--shell-completion", "install=bash"],
    ],
    ids=" ".join,
)
def test_a_command_that_only_tells_names_imports_no_pytorch(arguments: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], check=True, capture_output=True, timeout=250
    )


@pytest.mark.parametrize("name", list(plugins.model_options()))
def test_a_model_registers_its_own_options(name: str) -> None:
    model, options = plugins.models()[name], plugins.model_options()[name]
    assert model.Config is options and model.lora_targets == options.lora_targets


def test_list_of_something_else(rlinf_vla: CommandLine) -> None:
    assert "did you mean recipes?" in rlinf_vla("list", "recipe").complaint


def test_lists_as_json(rlinf_vla: CommandLine) -> None:
    found = json.loads(rlinf_vla("list", "recipes", "envs", "--json").out)
    assert list(found) == ["recipes", "envs"]
    assert "maniskill_ppo" in [row["recipe="] for row in found["recipes"]]
    assert "did you mean recipes?" in rlinf_vla("list", "recipe", "--json").complaint


def test_a_verb_without_json(rlinf_vla: CommandLine, trained: list[DictConfig]) -> None:
    assert (
        "train has no --json: eval, plan" in rlinf_vla("train", PPO, "--json").complaint
        and not trained
    )
    assert "run without --multirun" in rlinf_vla("eval", PPO, "--json", "--multirun").complaint


def test_bench_requires_a_name(rlinf_vla: CommandLine) -> None:
    assert "rlinf-vla bench rollout recipe=maniskill_ppo" in rlinf_vla("bench").complaint
    assert (
        "rollout, throughput, policy, update, control, load, memory, env, soak"
        in rlinf_vla("bench", "polcy", PPO).complaint
    )
    assert "rlinf-vla bench rollout recipe=maniskill_ppo" in rlinf_vla("bench", PPO).complaint
    assert "env=maniskill[,NAME ...]" in rlinf_vla("bench", "env").complaint
    assert "did you mean env=maniskill" in rlinf_vla("bench", "env", "env=maniskil").complaint
    assert (
        "did you mean env.num_envs"
        in rlinf_vla("bench", "env", "env=maniskill", "env.num_env=2").complaint
    )


def test_doctor(rlinf_vla: CommandLine, counting: Counting) -> None:
    found = rlinf_vla("doctor")
    assert (
        found.code == 0
        and "needs nothing" in found.out
        and "torch" in found.out
        and "WRONG" not in found.out
    )
    assert "--fix" in rlinf_vla("doctor", "--mend").complaint


def test_doctor_as_json(rlinf_vla: CommandLine, counting: Counting) -> None:
    found = {each["name"]: each for each in json.loads(rlinf_vla("doctor", "--json").out)}
    assert (
        found["python"]["ok"]
        and not found["python"]["optional"]
        and set(found["python"]) == {"name", "ok", "optional", "detail", "fix"}
    )
    assert "give one of the two" in rlinf_vla("doctor", "--json", "--fix").complaint


@pytest.mark.parametrize(
    ("device", "missing"),
    [("npu", "torch_npu"), ("xpu", "PyTorch for XPU"), ("mps", "Apple silicon")],
)
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_a_device_that_pytorch_does_not_see_is_refused(
    rlinf_vla: CommandLine, verb: str, device: str, missing: str
) -> None:
    found = rlinf_vla(verb, PPO, f"cluster.device={device}")
    assert f"no {device.upper()} device" in found.complaint and missing in found.complaint
    assert "starting" not in found.out


def test_doctor_on_a_gpu_tells_of_fused_kernels(
    rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "fused kernels" not in rlinf_vla("doctor").out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "liger_kernel" else find_spec(name, *rest),
    )
    found = rlinf_vla("doctor")
    assert (
        "note  fused kernels" in found.out
        and 'pip install "rlinf-vla[cuda]"' in found.out
        and "NVIDIA Test" in found.out
    )


A_GPU = {"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n"}
CLASS = "sys/bus/pci/devices/0000:01:00.0/class"
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.159.04  Tue Oct 14 2026\n"


@pytest.mark.parametrize(
    ("driver", "built_for", "fix"),
    [
        (580, "12.9", "whl/cu130"),
        (595, None, "whl/cu130"),
        (560, "13.0", "whl/cu129"),
        (470, "13.0", "the driver 470 is too old: install 525 or newer"),
        (580, "13.0", "CUDA_VISIBLE_DEVICES hides it"),
        (None, "13.0", "install NVIDIA's driver, 580 or newer"),
    ],
)
def test_doctor_finds_a_gpu_that_is_not_used(
    tmp_path: Path, driver: int | None, built_for: str | None, fix: str
) -> None:
    files = A_GPU | {CLASS: "0x030200\n"}
    if driver is not None:
        files["proc/driver/nvidia/version"] = VERSION.format(driver)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    check = unused_gpu(built_for, tmp_path)
    assert check is not None and not check.ok and fix in check.fix
    assert check.detail.startswith("optional") == (built_for is None), "a CPU build may be wanted"


def test_doctor_misses_no_gpu_where_there_is_none(tmp_path: Path) -> None:
    assert unused_gpu("13.0", tmp_path) is None
    for name, content in (A_GPU | {CLASS: "0x040300\n"}).items():  # the sound of a GPU
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert unused_gpu("13.0", tmp_path) is None


def test_doctor_fixes_what_it_can(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"ok": False}

    def diagnose() -> list[Diagnosis]:
        return [
            Diagnosis(
                "counting", state["ok"], "fingers", "grow fingers", lambda: state.update(ok=True)
            )
        ]

    monkeypatch.setattr(counting.plugin, "diagnose", diagnose)
    sick = rlinf_vla("doctor")
    assert sick.code == 1 and "WRONG" in sick.out and "grow fingers" in sick.out and not state["ok"]
    assert rlinf_vla("doctor", "--fix").code == 0 and state["ok"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("seed", "=", "3"), "write seed=3"),
        (("seed", "=3"), "write seed=3"),
        (("seed=", "3"), "is not KEY=VALUE"),
        (("iterations:3",), "write iterations=3"),
        (("--iterations", "3"), "--iterations: a key is given without dashes, write iterations=3"),
        (("--num-envs", "3"), "unrecognized arguments"),
        (("--episodes=3",), "write episodes=3"),
        (("-recipe", "maniskill_sac"), "write recipe=maniskill_sac"),
        (("tracker=wandb",), "a list is expected, write 'tracker=[wandb]'"),
        (("evaluation.modes=greedy",), "write 'evaluation.modes=[greedy]'"),
        (("algorithm.target_kl=None",), "for no value write algorithm.target_kl=null"),
    ],
)
def test_how_other_programs_are_given_values(
    rlinf_vla: CommandLine, words: tuple[str, ...], told: str
) -> None:
    found = rlinf_vla("train", PPO, *words)
    assert found.code == 2 and told in found.err, found.err

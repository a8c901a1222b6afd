"""Shell completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_vla.cli import completion
from rlinf_vla.cli import list as list_command
from rlinf_vla.cli.verbs import verbs
from rlinf_vla.features.sweeps.runs import VERBS as OF_RUNS
from tests.cli.conftest import CommandLine

VERBS = verbs()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ex", ["export"]),
        ("train recipe=maniskill_ppo_putonplate2", ["recipe=maniskill_ppo_putonplate25"]),
        (
            "train rec",
            ["recipe=", "record.failures=", "record.first=", "record.player=", "record.video="],
        ),
        ("train preset=rl4", ["preset=rl4vla"]),
        ("train cluster=1", ["cluster=1gpu"]),
        ("train algorithm=d", ["algorithm=dagger", "algorithm=dapo", "algorithm=dr_grpo"]),
        ("eval --j", ["--json"]),
        ("train --d", ["--dry-run"]),
        ("runs p", ["prune"]),
        ("runs compare s", ["sac/20261103-100000"]),
        ("push s", ["sac/20261103-100000"]),
        ("push sac me/x --d", ["--dataset", "--dry-run"]),
        ("train run=s", ["run=sac/20261103-100000"]),
        ("train checkpoints.", ["checkpoints.every=", "checkpoints.keep="]),
        ("list tasks ro", ["robots"]),
        ("doctor rec", []),
        ("nonsense rec", []),
        ("train zzz=", []),
    ],
)
def test_candidates(rlinf_vla: CommandLine, tmp_path: Path, line: str, found: list[str]) -> None:
    (tmp_path / "runs" / "sac" / "20261103-100000").mkdir(parents=True)
    (tmp_path / "runs" / "sac" / "20261103-100000" / "recipe.yaml").touch()
    shown = rlinf_vla("completion", "--", *line.split(" "))
    assert (shown.code, shown.out.split()) == (0, found)


def test_the_words_are_those_of_the_verbs() -> None:
    assert set(VERBS["list"].words) == set(list_command.LISTS)
    assert set(VERBS["runs"].words) == set(OF_RUNS)
    assert set(VERBS["completion"].words) == set(completion.SCRIPTS)


def test_a_shell_has_a_script(rlinf_vla: CommandLine) -> None:
    for shell in completion.SCRIPTS:
        assert "rlinf-vla completion -- " in rlinf_vla("completion", shell).out
    assert "rlinf-vla completion {bash|zsh|fish}" in rlinf_vla("completion", "csh").complaint


IN_A_SHELL = {
    "bash": 'COMP_LINE="$LINE" COMP_POINT=${#LINE}\n_rlinf_vla\nprintf "%s\\n" "${COMPREPLY[@]}"\n',
    # outside its line editor, zsh lets a function stand for the builtin that offers the words
    "zsh": 'compadd() { print -rl -- $found }\nwords=("${(@s: :)LINE}") CURRENT=${#words}\n$_comps[rlinf-vla]\n',
    "fish": 'complete -C "$LINE"\n',
}
"""Shell -> what completes $LINE there, after the shell's script."""
BEFORE = {"zsh": "autoload -Uz compinit && compinit -u -d dump\n"}


@pytest.mark.parametrize("shell", IN_A_SHELL)
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rlinf-vla ver", "verify"),
        ("rlinf-vla config recipe=franka_dag", "recipe=franka_dagger"),
        ("rlinf-vla train checkpoints.ev", "checkpoints.every="),
        ("rlinf-vla train ", "algorithm="),
    ],
)
def test_a_shell_completes(tmp_path: Path, shell: str, line: str, found: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "rlinf-vla").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m rlinf_vla.cli.main "$@"\n'
    )
    (tmp_path / "rlinf-vla").chmod(0o755)
    program = BEFORE.get(shell, "") + completion.SCRIPTS[shell] + IN_A_SHELL[shell]
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "LINE": line,
    }
    command = [shell, *(["-f"] if shell == "zsh" else []), "-c", program]
    shown = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=250,
        cwd=tmp_path,
    ).stdout
    words = shown.split()
    assert words[0] == (
        found.partition("=")[2] or found if shell == "bash" else found
    )  # bash completes what follows =


def test_runs_and_view_start_without_pytorch() -> None:
    program = "import sys, rlinf_vla.features.sweeps.runs, rlinf_vla.features.view.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


def test_completion_imports_no_pytorch() -> None:
    program = (
        "import sys; from rlinf_vla.cli.main import run; run(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    )
    for line in (["train", "env="], ["train", "checkpoints."]):
        subprocess.run(
            [sys.executable, "-c", program, "completion", "--", *line],
            check=True,
            capture_output=True,
            timeout=250,
        )

"""``rlinf-vla serve`` in a separate process, and its one-line refusals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlinf_vla.core.types import Episodes, Observation
from rlinf_vla.features.serving import command
from rlinf_vla.features.serving.array_messages import pack, unpack
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.runtime.saved_recipe import read_saved
from rlinf_vla.testing.toy_policy import LinearPolicy
from rlinf_vla.training.checkpoint import load_checkpoint
from rlinf_vla.training.lora import acting
from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.skips import needs

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(
    folder: Path, arguments: list[str], **environment: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own that is ready, and its port."""
    announce(folder / "package")
    paths = {
        "PYTHONPATH": f"{folder / 'package'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "rlinf_vla.cli.main", *arguments, "serve.port=0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, cwd=folder, env=os.environ | paths | environment, text=True, **pipes
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        try:
            first, second = program.stdout.readline(), program.stdout.readline()
            found = re.search(r":(\d+) accepts connections", first)
            assert found is not None and second.startswith("ready: policy linear"), (
                first + second + program.stderr.read()
            )
            yield program, int(found[1])
        finally:
            program.kill()


def asked(port: int, message: dict[str, Any]) -> Any:
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{port}/", open_timeout=60) as client:
        assert "rlinf_vla" in unpack(client.recv(timeout=60))
        client.send(pack(message))
        return unpack(client.recv(timeout=60))["actions"]


@needs("serve")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_with_exit_code_0(
    counting: Counting, tmp_path: Path, signum: signal.Signals
) -> None:
    with serving(tmp_path, counting.arguments("serve", "counting_ppo", "cluster=laptop")) as (
        program,
        port,
    ):
        image = np.zeros((64, 64, 3), np.uint8)
        assert asked(port, {"images": {"base": image}, "instruction": "push"}).shape == (2, 4)
        program.send_signal(signum)
        out, err = program.communicate(timeout=60)
        assert (out, err, program.returncode) == ("stopped\n", "", 0)


@needs("serve")
def test_a_runs_newest_checkpoint_acts_as_in_eval(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    trained = rlinf_vla(
        *counting.arguments(
            "train",
            "counting_ppo",
            "run_dir=run",
            "evaluation.before_and_after=false",
            "cluster=laptop",
        )
    )
    assert trained.code == 0, trained.err
    images = torch.randint(
        256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    rows = torch.arange(2)
    recipe = recipes.read(read_saved(tmp_path / "run"))
    policy = builders.build_policy(recipe)
    load_checkpoint(tmp_path / "run" / "checkpoints" / "step_000002", policy)
    with acting(policy, recipe.rollout.rounded_weights):
        actor = Actor(policy, replace(builders.actor_settings(recipe, 1.0), batch_size=2))
        inputs = actor.prepare(Observation({"base": images}, torch.zeros(2, 0), ["push"] * 2))
        wanted = actor.act(inputs, Episodes.first_attempts(rows, rows + 5), rows).actions
    message = {
        "images": {"base": images.numpy()},
        "instruction": "push",
        "temperature": 1.0,
        "step": rows.numpy(),
    }
    message["episode"] = {"task": rows.numpy(), "seed": rows.numpy() + 5}
    with serving(tmp_path, ["serve", "run=run", "serve.max_batch_size=2"]) as (_, port):
        assert np.array_equal(asked(port, message), wanted.numpy())


def test_mistakes_are_one_line(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complaint(*overrides: str) -> str:
        return rlinf_vla(
            *counting.arguments("serve", "counting_ppo", "cluster=laptop", *overrides)
        ).complaint

    monkeypatch.setattr(command, "PACKAGES", ("starlettt", "uvicornn"))
    assert complaint() == "serve needs starlettt, uvicornn: pip install 'rlinf-vla[serve]'"
    monkeypatch.setattr(command, "PACKAGES", ())
    assert complaint("serve.host=0.0.0.0").startswith(
        "serve.host=0.0.0.0 can be reached from other machines: set serve.token_env=NAME"
    )
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    assert complaint("serve.token_env=NO_SUCH_TOKEN").startswith(
        "serve.token_env=NO_SUCH_TOKEN: this environment variable is not set"
    )
    assert complaint("serve.prot=1").startswith("serve.prot is not a key; did you mean serve.p")
    assert (
        complaint("serve.protocol=grpc")
        == "serve.protocol=grpc is not known: use openpi or vla_eval"
    )


def test_a_policy_on_another_server_is_not_served(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PACKAGES", ())
    monkeypatch.setattr(LinearPolicy, "learns", False)
    found = rlinf_vla(*counting.arguments("serve", "counting_ppo", "cluster=laptop"))
    assert found.complaint.startswith(
        "model=linear: its weights are on a server, there is nothing to serve"
    )


@needs("serve")
def test_what_cannot_be_loaded_is_one_line(rlinf_vla: CommandLine, counting: Counting) -> None:
    found = rlinf_vla(
        *counting.arguments(
            "serve", "counting_ppo", "cluster=laptop", "serve.port=0", "checkpoint=nowhere"
        )
    )
    assert found.complaint == "checkpoint=nowhere: no such directory"
    found = rlinf_vla(
        *counting.arguments("serve", "counting_classifier", "cluster=laptop", "serve.port=0")
    )
    assert (
        found.complaint
        == "recipe=counting_classifier has no model to serve: set model=NAME model.checkpoint=DIR"
    )


def test_a_file_chooses_neither_address_nor_security(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    trained = rlinf_vla(
        *counting.arguments(
            "train",
            "counting_ppo",
            "run_dir=run",
            "evaluation.before_and_after=false",
            "cluster=laptop",
        )
    )
    assert trained.code == 0, trained.err
    saved = tmp_path / "run" / "recipe.yaml"
    values = OmegaConf.load(saved)
    values.serve.insecure = True
    values.serve.host = "0.0.0.0"
    OmegaConf.save(values, saved)
    assert (
        "serve.host=0.0.0.0, but a file must not choose" in rlinf_vla("serve", "run=run").complaint
    )

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.algorithms.sft import Demonstrations, imitation_loss
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.origin import Origin
from rlinf_vla.core.protocols import Policy
from rlinf_vla.rollout.noise import imitation_noise
from rlinf_vla.testing.policy_calls import observations
from rlinf_vla.training import checkpoint as checkpoints
from rlinf_vla.training import lora
from rlinf_vla.training.checkpoint import (
    load_checkpoint,
    load_heads,
    save_checkpoint,
    save_heads,
    write_parts,
)
from rlinf_vla.training.checkpoint_files import complete_checkpoints, newest_sound, verify
from rlinf_vla.training.lora import add_lora
from rlinf_vla.training.ranks import Spread
from rlinf_vla.training.trainer import Trainer
from tests.models.tiny_openvla import smaller_config, smaller_directory, tiny
from tests.training.processes import in_process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smaller_directory(tmp_path_factory.mktemp("model"))


def build(model: Path, rank: int = 4, seed: int = 0) -> tuple[Policy, Trainer]:
    policy = tiny(directory=model, seed=0 if rank else seed)
    add_lora(policy, LoraOptions(rank=rank), seed)
    return policy, Trainer(policy, OptimizerConfig(1e-2, 1e-2, 1.0), 3)


def learn(policy: Policy, trainer: Trainer, steps: range) -> None:
    """Trains both actor and critic."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = policy.prepare(observations(policy, 4, seed=step))
        batch = Demonstrations(
            inputs,
            torch.rand(4, policy.spec.chunk, 4, generator=generator) * 2 - 1,
            torch.arange(4),
        )

        def loss(policy: Any, part: Demonstrations) -> tuple[Tensor, dict[str, Tensor]]:
            critic = (policy.value(policy.encode(part.inputs)) - part.actions[:, 0, 0]) ** 2
            return imitation_loss(policy, part, partial(imitation_noise, 0))[0] + critic.sum(), {}

        trainer.step(batch, loss)


def save(directory: Path, policy: Policy, trainer: Trainer, iteration: int, keep: int = 9) -> Path:
    return save_checkpoint(
        directory, policy, trainer, {"iteration": iteration, "note": "kept"}, keep
    )


def trained(model: Path, rank: int = 4, steps: int = 1) -> tuple[Policy, Trainer]:
    policy, trainer = build(model, rank)
    learn(policy, trainer, range(steps))
    return policy, trainer


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("rank", [4, 0])
def test_a_resumed_run_equals_the_uninterrupted_one(model: Path, tmp_path: Path, rank: int) -> None:
    policy, trainer = trained(model, rank, steps=2)
    written = save(tmp_path, policy, trainer, 2)
    learn(policy, trainer, range(2, 4))

    again, its_trainer = build(model, rank, seed=0 if rank else 7)
    assert load_checkpoint(written, again, its_trainer) == {"iteration": 2, "note": "kept"}
    learn(again, its_trainer, range(2, 4))
    assert_same(again.state_dict(), policy.state_dict())
    assert_same(its_trainer.state(), trainer.state())


def test_the_layout_is_the_documented_one(model: Path, tmp_path: Path) -> None:
    written = save(tmp_path, *trained(model), iteration=100)
    assert written == tmp_path / "step_000100"
    assert names(written) == [
        "COMPLETE",
        "adapter",
        "heads.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names(written / "adapter"))
    assert all(name.startswith("value_head.") for name in load_file(written / "heads.safetensors"))
    assert names(tmp_path) == ["step_000100"]
    assert all(path.stat().st_mode & 0o044 for path in written.rglob("*")), (
        "another user may evaluate it"
    )
    assert "adapter" not in names(save(tmp_path, *trained(model, rank=0), iteration=101))


def test_a_checkpoint_may_be_loaded_without_its_optimiser(model: Path, tmp_path: Path) -> None:
    policy, trainer = trained(model)
    other, _ = build(model, seed=5)
    load_checkpoint(save(tmp_path, policy, trainer, 1), other)
    assert_same(other.state_dict(), policy.state_dict())


def test_the_newest_are_kept(model: Path, tmp_path: Path) -> None:
    policy, trainer = trained(model)
    for iteration in (1, 2, 9, 10):
        save(tmp_path, policy, trainer, iteration, keep=2)
    assert names(tmp_path) == ["step_000009", "step_000010"]
    assert complete_checkpoints(tmp_path) == [tmp_path / "step_000009", tmp_path / "step_000010"]


def test_a_run_that_resumed_further_back_leaves_what_came_later(
    model: Path, tmp_path: Path
) -> None:
    policy, trainer = trained(model)
    for iteration in (5, 10, 15):
        save(tmp_path, policy, trainer, iteration, keep=3)
    for iteration, kept in ((7, [5, 7]), (9, [5, 7, 9]), (11, [7, 9, 11])):  # resumed from 5
        save(tmp_path, policy, trainer, iteration, keep=3)
        assert names(tmp_path) == [f"step_{each:06d}" for each in kept]


def test_what_a_killed_writer_left_is_removed_by_the_next(model: Path, tmp_path: Path) -> None:
    partial_copy = tmp_path / ".step_000001.4194305"
    partial_copy.mkdir()
    (partial_copy / "heads.safetensors").write_bytes(b"half of it")
    save(tmp_path, *trained(model), iteration=2)
    assert names(tmp_path) == ["step_000002"]


def frozen(model: Path, rank: int) -> tuple[Policy, Trainer]:
    algorithm = SAC(SACConfig(frozen_backbone=True, hidden=8, critics=2))
    policy = tiny(directory=model, seed=0)
    add_lora(policy, LoraOptions(rank=rank), 0)
    wrapped = algorithm.wrap(policy, 0)
    return wrapped, Trainer(wrapped, algorithm, 4)


def test_adapters_of_a_frozen_backbone_belong_to_the_model(model: Path, tmp_path: Path) -> None:
    """They are not trained, so a checkpoint has none."""
    policy, trainer = frozen(model, rank=4)
    written = save(tmp_path, policy, trainer, 1)
    assert "adapter" not in names(written)
    again, its_trainer = frozen(model, rank=4)
    assert load_checkpoint(written, again, its_trainer)["iteration"] == 1


def test_an_exported_policy_may_start_another_algorithm(model: Path, tmp_path: Path) -> None:
    """Its heads belong to the policy that the algorithm's networks are put on."""
    exported = tiny(directory=model, seed=0)
    with torch.no_grad():
        next(exported.value_head.parameters()).fill_(0.5)
    save_heads(exported, tmp_path)
    base = tiny(directory=model, seed=0)
    wrapped = SAC(SACConfig(frozen_backbone=True, hidden=8, critics=2)).wrap(base, 0)
    before = {name: value.clone() for name, value in wrapped.actor.state_dict().items()}
    load_heads(wrapped, tmp_path, base)
    assert bool((next(base.value_head.parameters()) == 0.5).all())
    assert_same(wrapped.actor.state_dict(), before)
    save_heads(wrapped, tmp_path)
    load_heads(frozen(model, 0)[0], tmp_path, base)
    with pytest.raises(UserError, match="does not fit this model"):
        load_heads(base, tmp_path)


def test_the_newest_has_the_highest_number(model: Path, tmp_path: Path) -> None:
    policy, trainer = trained(model)
    for iteration in (999_999, 1_000_000):
        save(tmp_path, policy, trainer, iteration, keep=1)
    assert complete_checkpoints(tmp_path) == [tmp_path / "step_1000000"]


def test_a_folder_of_another_name_is_no_checkpoint(model: Path, tmp_path: Path) -> None:
    policy, trainer = trained(model)
    first = save(tmp_path, policy, trainer, 1)
    for name in ("step_best", "step_000001_copy", "step_"):
        first.with_name(name).mkdir()
        (first.with_name(name) / "COMPLETE").write_text("{}")
    second = save(tmp_path, policy, trainer, 2, keep=1)
    assert complete_checkpoints(tmp_path) == [second]
    assert first.with_name("step_best").exists(), "other files there are kept"


def test_a_checkpoint_is_written_again_in_place(model: Path, tmp_path: Path) -> None:
    policy, trainer = trained(model)
    save(tmp_path, policy, trainer, 1)
    learn(policy, trainer, range(1, 2))
    other, its_trainer = build(model)
    load_checkpoint(save(tmp_path, policy, trainer, 1), other, its_trainer)
    assert names(tmp_path) == ["step_000001"]
    assert_same(other.state_dict(), policy.state_dict())


# an interrupted writer

WRITES = 3  # the adapter, the heads, the optimiser


def failing(monkeypatch: pytest.MonkeyPatch, at: int, fail: Callable[[], None]) -> None:
    """The ``at``-th file of weights is written half before ``fail``; after the last one, ``fail`` precedes COMPLETE."""
    count = [0]

    def half(write: Callable[..., None]) -> Callable[..., None]:
        def write_half(*arguments: Any) -> None:
            write(*arguments)
            path = arguments[-1]
            if count[0] == at:
                Path(path).write_bytes(Path(path).read_bytes()[:50])
                fail()
            count[0] += 1

        return write_half

    monkeypatch.setattr(lora, "save_file", half(save_file))
    monkeypatch.setattr(checkpoints, "write_parts", half(write_parts))
    if at == WRITES:
        monkeypatch.setattr(checkpoints, "digest", lambda path: fail())


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", range(WRITES + 1))
def test_a_full_disk_keeps_the_existing_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    policy, trainer = trained(model)
    before = save(tmp_path, policy, trainer, 1)
    with monkeypatch.context() as patch:
        failing(patch, at, disk_full)
        for iteration in (1, 2):
            with pytest.raises(OSError, match="No space left"):
                save(tmp_path, policy, trainer, iteration, keep=1)
    assert names(tmp_path) == ["step_000001"], "neither a step_ directory nor temporary files"
    load_checkpoint(before, *build(model))
    assert save(tmp_path, policy, trainer, 2, keep=1).exists()


@pytest.mark.parametrize("at", range(WRITES + 1))
def test_a_killed_writer_leaves_no_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    policy, trainer = trained(model)
    before = save(tmp_path, policy, trainer, 1)

    def write_and_die() -> None:
        failing(monkeypatch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        save(tmp_path, policy, trainer, 2)

    assert in_process(write_and_die) == -signal.SIGKILL
    assert list(tmp_path.glob("step_*")) == complete_checkpoints(tmp_path) == [before]
    load_checkpoint(before, *build(model))
    save(tmp_path, policy, trainer, 2, keep=1)
    assert complete_checkpoints(tmp_path) == [tmp_path / "step_000002"]


@pytest.mark.parametrize("limit", [0, 1_000, 30_000])
def test_a_real_limit_on_file_sizes(model: Path, tmp_path: Path, limit: int) -> None:
    """The kernel refuses to write more, in the middle of a file."""
    policy, trainer = trained(model)

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        save(tmp_path, policy, trainer, 2)

    assert in_process(write) == 1
    assert names(tmp_path) == []
    save(tmp_path, policy, trainer, 2)
    assert sum(path.stat().st_size > limit for path in tmp_path.rglob("*") if path.is_file()) > 0


# checkpoints that cannot be loaded


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
        "heads.safetensors",
        "optimizer.safetensors",
        "state.json",
    ],
)
@pytest.mark.parametrize(
    "damage", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])]
)
def test_a_damaged_file_is_named(
    model: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    written = save(tmp_path, *trained(model), iteration=1)
    verify(written)
    damage(written / name)
    with pytest.raises(UserError, match=name) as error:
        load_checkpoint(written, *build(model))
    assert "\n" not in str(error.value) and str(written) in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_a_changed_list_of_files_is_damage(model: Path, tmp_path: Path, content: str) -> None:
    written = save(tmp_path, *trained(model), iteration=1)
    (written / "COMPLETE").write_text(content)
    with pytest.raises(UserError, match="COMPLETE"):
        load_checkpoint(written, *build(model))


def test_a_list_of_files_that_names_a_device_is_damage(model: Path, tmp_path: Path) -> None:
    """Reading a device may never end; this one is empty, as its digest states."""
    written = save(tmp_path, *trained(model), iteration=1)
    (written / "COMPLETE").write_text(json.dumps({os.devnull: hashlib.sha256(b"").hexdigest()}))
    with pytest.raises(UserError, match=os.devnull):
        load_checkpoint(written, *build(model))


def test_an_incomplete_checkpoint_is_none(model: Path, tmp_path: Path) -> None:
    written = save(tmp_path, *trained(model), iteration=1)
    (written / "COMPLETE").unlink()
    assert complete_checkpoints(tmp_path) == []
    with pytest.raises(UserError, match="COMPLETE is missing"):
        load_checkpoint(written, *build(model))
    with pytest.raises(UserError, match="no such directory"):
        load_checkpoint(tmp_path / "step_000009", *build(model))


@pytest.mark.parametrize(
    ("saved", "built", "word"),
    [(4, 0, "with LoRA"), (0, 4, "without LoRA"), (4, 8, "lora"), (8, 4, "lora")],
)
def test_another_lora_rank_is_refused(
    model: Path, tmp_path: Path, saved: int, built: int, word: str
) -> None:
    written = save(tmp_path, *trained(model, saved), iteration=1)
    policy, trainer = build(model, built)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with pytest.raises(UserError, match=word) as error:
        load_checkpoint(written, policy, trainer)
    assert "\n" not in str(error.value)
    assert_same(policy.state_dict(), before)


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize(
    ("key", "size"), [("hidden_size", 48), ("num_hidden_layers", 3), ("num_hidden_layers", 1)]
)
def test_another_model_is_refused(
    model: Path, tmp_path: Path, rank: int, key: str, size: int
) -> None:
    """Wider, deeper or shallower: no weight is ignored silently."""
    config = smaller_config()
    config["text_config"][key] = size
    written = save(
        tmp_path / "run", *trained(smaller_directory(tmp_path / "other", config), rank), iteration=1
    )
    with pytest.raises(UserError, match="fit"):
        load_checkpoint(written, *build(model, rank))


@pytest.mark.parametrize(
    "name", ["target.layers.0", "value_head.gone.exp_avg"], ids=["averages", "moments"]
)
def test_the_optimiser_state_of_another_algorithm_is_refused(
    model: Path, tmp_path: Path, name: str
) -> None:
    class Another(Trainer):
        def spread_state(self) -> Spread:
            return Spread({name: torch.zeros(1)})

    policy, _ = build(model)
    checkpoint = save(tmp_path, policy, Another(policy, OptimizerConfig(1e-2, 1e-2, 1.0), 3), 1)
    with pytest.raises(
        UserError, match="step_000001 has the optimiser state of another algorithm or version"
    ):
        load_checkpoint(checkpoint, *build(model))


def test_the_state_is_json_and_weights_are_safetensors(model: Path, tmp_path: Path) -> None:
    written = save(tmp_path, *trained(model), iteration=3)
    assert json.loads((written / "state.json").read_text())["iteration"] == 3
    kinds = {
        path.suffix for path in written.rglob("*") if path.is_file() and path.name != "COMPLETE"
    }
    assert kinds <= {".safetensors", ".json", ".md"}


@pytest.mark.parametrize(
    ("file", "refused"),
    [
        ("config.json", True),
        ("model.safetensors", True),
        ("full_weights.pt", True),
        ("notes.json", False),
        ("README.md", False),
    ],
)
def test_adapters_belong_to_the_files_of_their_model(
    model: Path, tmp_path: Path, file: str, refused: bool
) -> None:
    for name in ("base", "moved"):
        (tmp_path / name).mkdir()
        for known in ("config.json", "model.safetensors"):
            (tmp_path / name / known).write_text(known)
    policy, trainer = trained(model)
    policy.origin = Origin(tmp_path / "base")
    written = save(tmp_path, policy, trainer, 1)
    assert (
        json.loads((written / "state.json").read_text())["model"]["config.json"]
        == hashlib.sha256(b"config.json").hexdigest()
    )
    again, _ = build(model)
    again.origin = Origin(tmp_path / "moved")
    load_checkpoint(written, again)
    (tmp_path / "moved" / file).write_text("other")
    again.origin = Origin(tmp_path / "moved")
    if refused:
        with pytest.raises(
            UserError,
            match=rf"was trained on another model than the one that is now in .*moved \({file} differs\)",
        ):
            load_checkpoint(written, again)
    else:
        load_checkpoint(written, again)


def test_a_checkpoint_with_all_weights_belongs_to_no_files(model: Path, tmp_path: Path) -> None:
    policy, trainer = trained(model, rank=0)
    policy.origin = Origin(model)
    assert "model" not in json.loads(
        (save(tmp_path, policy, trainer, 1) / "state.json").read_text()
    )


@pytest.mark.parametrize(
    "name", ["heads.safetensors", "adapter/adapter_model.safetensors", "state.json"]
)
def test_a_file_that_is_not_listed_is_damage(model: Path, tmp_path: Path, name: str) -> None:
    written = save(tmp_path, *trained(model), iteration=1)
    listed = json.loads((written / "COMPLETE").read_text())
    for left in ({key: value for key, value in listed.items() if key != name}, {}):
        (written / "COMPLETE").write_text(json.dumps(left))
        with pytest.raises(UserError, match="is missing or changed"):
            verify(written)


def test_a_run_continues_from_the_newest_checkpoint_that_is_not_damaged(
    model: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    assert newest_sound(tmp_path, said.append) is None
    written = [save(tmp_path, *trained(model), iteration=number) for number in (1, 2, 3)]
    (written[2] / "COMPLETE").write_text("{}")
    (written[1] / "heads.safetensors").write_bytes(b"cut")
    assert newest_sound(tmp_path, said.append) == written[0]
    assert [str(path) in line for path, line in zip(reversed(written[1:]), said, strict=True)] == [
        True,
        True,
    ]
    (written[0] / "state.json").unlink()
    with pytest.raises(UserError, match=r"step_000001 is damaged"):
        newest_sound(tmp_path, said.append)

"""A checkpoint that cannot be used is a user's mistake: one line, exit code 2, and nothing in it is run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import CommandLine
from tests.models.tiny_openvla import smaller_directory, tiny

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def checkpoint(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid, tmp_path / "model"))


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid one, in three shards."""
    folder = tmp_path_factory.mktemp("valid")
    directory = smaller_directory(folder / "model")
    tiny(directory=smaller_directory(folder / "source")).save(directory)
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {key: SHARDS[i % 3] for i, key in enumerate(state)}
    for name in SHARDS:
        save_file(
            {key: value for key, value in state.items() if places[key] == name}, directory / name
        )
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def evaluation(package: Path, checkpoint: Path) -> list[str]:
    return [
        "eval",
        "--config-dir",
        str(package),
        "recipe=counted",
        "cluster=laptop",
        f"model.checkpoint={checkpoint}",
    ]


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def pickled(name: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        for path in (directory / INDEX, *(directory / shard for shard in SHARDS)):
            path.unlink()
        torch.save({"weight": Hostile(directory.parent / "touched")}, directory / name)

    return spoil


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index)
        (directory / INDEX).write_text(json.dumps(index))

    return spoil


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        state = load_file(directory / SHARDS[1])
        key = min(state)
        save_file(state | {key: change(state[key])}, directory / SHARDS[1])

    return spoil


def with_code(directory: Path) -> None:
    """Only the dataset is missing: the checkpoint's Python files must not be read."""
    (directory / "modeling_prismatic.py").write_text(
        f"from pathlib import Path; Path({str(directory.parent / 'touched')!r}).touch()"
    )
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModelForVision2Seq": "modeling_prismatic.OpenVLAForActionPrediction"}
    (directory / "config.json").write_text(json.dumps(config))
    statistics = json.loads((directory / "dataset_statistics.json").read_text())
    (directory / "dataset_statistics.json").write_text(
        json.dumps({"bridge": statistics["maniskill"], "fractal": statistics["maniskill"]})
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda directory: (directory / SHARDS[1]).write_bytes(
                (directory / SHARDS[1]).read_bytes()[:-64]
            ),
            [SHARDS[1], "copy it again"],
        ),
        (lambda directory: (directory / SHARDS[1]).unlink(), [SHARDS[1], "missing"]),
        (lambda directory: (directory / SHARDS[1]).write_bytes(b""), [SHARDS[1], "damaged"]),
        (edited(lambda index: index.pop("weight_map")), [INDEX, "weight_map"]),
        (
            edited(lambda index: index["weight_map"].update(x="../../elsewhere.safetensors")),
            [INDEX, "weight_map"],
        ),
        (
            edited(lambda index: index.update(weight_map={"x": SHARDS[0]})),
            ["missing weights, first "],
        ),
        (changed(lambda value: value[None]), ["has shape", "config.json says"]),
        (changed(lambda value: value.fill_(float("nan"))), ["NaN"]),
        (changed(lambda value: value.to(torch.int8)), ["int8", "quantised"]),
        (pickled("model.safetensors"), ["model.safetensors cannot be read"]),
        (
            pickled("pytorch_model.bin"),
            ["only pytorch_model.bin, a pickle", "weights_only=True), 'model.safetensors'"],
        ),
        (with_code, ["unnorm_key", "bridge", "fractal"]),
    ],
)
def test_a_bad_checkpoint_is_one_line(
    rlinf_vla: CommandLine,
    package: Path,
    checkpoint: Path,
    spoil: Callable[[Path], None],
    words: list[str],
) -> None:
    spoil(checkpoint)
    found = rlinf_vla(*evaluation(package, checkpoint))
    assert all(word in found.complaint for word in words), found.complaint
    assert (
        not (checkpoint.parent / "touched").exists() and not (checkpoint.parent / "runs").exists()
    )


def test_the_advice_for_a_pickle_works(
    rlinf_vla: CommandLine, package: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {key: value for shard in SHARDS for key, value in load_file(checkpoint / shard).items()}
    pickled("pytorch_model.bin")(checkpoint)
    torch.save(state, checkpoint / "pytorch_model.bin")
    complaint = rlinf_vla(*evaluation(package, checkpoint)).complaint
    program = complaint.split('python -c "')[1].split('"`')[0]
    monkeypatch.chdir(checkpoint)
    exec(program, {})  # in this process, because importing torch again takes seconds
    converted = load_file(checkpoint / "model.safetensors")
    assert converted.keys() == state.keys() and all(
        torch.equal(value, state[key]) for key, value in converted.items()
    )

"""PutOnPlateInScene25: what needs no simulator, and all of it against recordings of the published environment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.errors import UserError
from rlinf_vla.envs.maniskill import scene25_assets, scene25_pictures
from rlinf_vla.envs.maniskill.config import ManiSkillConfig
from rlinf_vla.envs.maniskill.plugin import plugin
from rlinf_vla.envs.maniskill.rows import by_row
from rlinf_vla.envs.maniskill.scene25_episodes import OBJECT_SETS, TASKS, Episodes25
from rlinf_vla.envs.maniskill.scene25_rules import Progress
from rlinf_vla.envs.maniskill.tasks import TASKS as ALL_TASKS
from rlinf_vla.envs.maniskill.tasks import WIDOWX_MODES
from tests.envs.scene25 import KEPT, RECORDINGS, needs_recordings, published_folder
from tests.skips import needs

MAIN = "PutOnPlateInScene25Main-v3"


def configured(folder: Path | None = None, task: str = MAIN, **keys: object) -> ManiSkillConfig:
    return ManiSkillConfig(
        **{"task": task, "control_mode": WIDOWX_MODES[0], "asset_dir": folder and str(folder)}
        | keys
    )


@pytest.mark.parametrize("task", TASKS)
@given(data=st.data())
def test_every_id_is_an_episode_and_every_episode_has_an_id(task: str, data: st.DataObject) -> None:
    episodes = Episodes25(task, data.draw(st.sampled_from(OBJECT_SETS)))
    number = data.draw(st.integers(0, len(episodes) - 1))
    episode = episodes[number]
    assert episodes[number + len(episodes)] == episode
    assert (
        episode.object in episodes.objects
        and episode.plate in episodes.plates
        and episode.table in episodes.tables
    )
    assert episode.pair in episodes.pairs and episode.turn in episodes.turns
    other = data.draw(st.integers(0, len(episodes) - 1))
    assert (episodes[other] == episode) == (other == number)


def test_rewards_are_the_changes_of_what_was_reached() -> None:
    progress = Progress(2, torch.device("cpu"))
    every = torch.tensor([True, True])
    levels = [
        progress.level(torch.tensor([False, success])).tolist()
        for grasping, success in [
            (1, 0),
            (1, 0),
            (0, 0),
            (1, 0),
            (1, 0),
            (1, 0),
            (1, 0),
            (1, 0),
            (0, 1),
            (0, 0),
        ]
        if progress.count(every, torch.tensor([False, bool(grasping)])) is None
    ]
    assert [row[0] for row in levels] == [0.0] * 10
    assert [row[1] for row in levels] == pytest.approx([0.1] * 7 + [0.2, 1.2, 0.2])
    progress.begin(torch.tensor([1]))
    assert progress.level(torch.tensor([True, True])).tolist() == [0.0, 0.0], (
        "success without a grasp pays nothing"
    )
    assert progress.step.tolist() == [10, 0]


def test_a_question_is_answered_by_what_is_chosen_in_each_row() -> None:
    asked: list[str] = []

    def question(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.tensor([[ord(name) + row, 0.0] for row in range(4)])

    assert by_row(["b", "a", "b", "c"], question)[:, 0].tolist() == [98, 98, 100, 102]
    assert asked == ["b", "a", "c"]


def test_a_picture_that_shows_nothing_is_the_photograph() -> None:
    size = (scene25_pictures.HEIGHT, scene25_pictures.WIDTH)
    picture = torch.full((*size, 3), 7, dtype=torch.uint8)
    nothing = torch.zeros(size, dtype=torch.bool)
    texture = torch.full((2 * size[0], 2 * size[1], 3), 200, dtype=torch.uint8)
    assert torch.equal(scene25_pictures.with_texture(picture, nothing, texture, 0.5), picture)
    assert torch.equal(scene25_pictures.with_window(picture, nothing, texture, 0.5), picture)
    corner = nothing.clone()
    corner[-1, -1] = True
    assert scene25_pictures.with_window(picture, corner, texture, 0.5).unique().tolist() == [103], (
        "the window stays in the texture"
    )


def test_every_published_task_can_be_named() -> None:
    names = {name for name, entry in ALL_TASKS.items() if entry.scene25}
    assert len(names) == len(TASKS) * len(OBJECT_SETS)
    assert {
        MAIN,
        "PutOnPlateInScene25VisionImage-v1-test",
        "PutOnPlateInScene25MultiPlate-v1-all",
    } <= names


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            configured(),
            r"needs assets .*hf download --repo-type dataset RLinf/maniskill_assets --local-dir",
        ),
        (configured(task="PutOnPlateInScene25Main-v2"), "did you mean PutOnPlateInScene25Main-v3"),
        (
            ManiSkillConfig(version="rl4vla"),
            "env.version=rl4vla is of the tasks PutOnPlateInScene25",
        ),
        (ManiSkillConfig(image_size=None), "env.image_size=null is the size of a photograph"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(
    config: ManiSkillConfig, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    monkeypatch.delenv(scene25_assets.VARIABLE, raising=False)
    with pytest.raises(UserError, match=message):
        plugin.create(config, 1)


def test_the_gpu_backend_plays_it_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_vla.envs.batched.why_not_on_gpu", lambda: None)
    monkeypatch.setattr("rlinf_vla.envs.batched.current_gpu", lambda: (None, {}))
    monkeypatch.setattr("rlinf_vla.envs.maniskill.vulkan.sees_gpu", lambda variables: True)
    large = {"num_envs": 64}
    assert plugin.backend(configured(image_size=None, **large)) == "gpu"
    assert plugin.backend(configured(image_size=224, **large)) == "cpu"
    with pytest.raises(UserError, match=r"use env\.image_size=null"):
        plugin.backend(configured(image_size=224, backend="gpu"))


class TestAssets:
    def test_the_outline_lists_every_instruction(self, tmp_path: Path) -> None:
        folder = published_folder(tmp_path)
        for task, count in (
            (MAIN, 16),
            ("PutOnPlateInScene25Main-v3-test", 9),
            ("PutOnPlateInScene25Instruct-v1-test", 16 * 16),
        ):
            known = plugin.outline(configured(folder, task, image_size=None, state="qpos"))
            assert known is not None
            assert (known.images, known.state_dim, len(known.instructions)) == (
                {"base": (480, 640)},
                8,
                count,
            )

    @pytest.mark.parametrize(
        "damage", ["no list", "no box", "no mesh", "no photograph", "another number"]
    )
    def test_a_damaged_folder_is_refused(self, damage: str, tmp_path: Path) -> None:
        folder = published_folder(tmp_path)
        objects = scene25_assets.database(folder / "carrot", scene25_assets.OBJECTS)
        known = json.loads(objects.read_text())
        first = next(iter(known))
        if damage == "no list":
            objects.write_text("[]")
        elif damage == "no box":
            del known[first]["bbox"]
            objects.write_text(json.dumps(known))
        elif damage == "no mesh":
            path = folder / "carrot" / scene25_assets.OBJECTS / first
            path.unlink()
            path.mkdir()
        elif damage == "no photograph":
            next((folder / "carrot" / scene25_assets.TABLES / "imgs").iterdir()).unlink()
        else:
            del known[first]
            objects.write_text(json.dumps(known))
        with pytest.raises(UserError, match=str(folder)):
            plugin.create(configured(folder), 1)

    def test_the_published_variable_names_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = published_folder(tmp_path)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        shutil.move(folder / "carrot", elsewhere / "carrot")
        monkeypatch.setenv(scene25_assets.VARIABLE, str(elsewhere))
        assert scene25_assets.directory(folder) == elsewhere / "carrot"
        known = plugin.outline(configured(folder))
        assert known is not None and known.instructions


class TestRecordings:
    """As `make scene25-recordings`, whose page has the numbers."""

    @pytest.mark.parametrize(
        "folder", [KEPT, pytest.param(RECORDINGS, marks=needs_recordings)], ids=["kept", "all"]
    )
    def test_without_a_simulator(self, folder: Path) -> None:
        from studies.scene25_recordings import without_simulator

        compared = without_simulator(folder)
        assert compared and all(row.count and row.largest <= row.limit for row in compared), (
            compared
        )

    @needs_recordings
    @pytest.mark.simulator
    @pytest.mark.nightly
    @pytest.mark.timeout(1200)  # a minute on a machine that does nothing else
    @needs("maniskill")
    def test_with_the_simulator(self) -> None:
        from studies.scene25_recordings import with_simulator

        compared = with_simulator(RECORDINGS)
        assert compared and all(row.count and row.largest <= row.limit for row in compared), (
            compared
        )


def test_a_mixture_is_cut_and_not_rounded() -> None:
    picture = torch.tensor([[[10, 11, 255]]], dtype=torch.uint8)
    mixed = scene25_pictures.mixed(picture, torch.tensor([[[20, 20, 255]]], dtype=torch.uint8), 0.3)
    assert mixed.tolist() == [[[13, 13, 255]]]
    assert np.allclose(0.7 * 11 + 0.3 * 20, 13.7)

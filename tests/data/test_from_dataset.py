"""Training on a recording of counter world equals training on the episodes themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.base import DemonstrationConfig, WeightedDataset
from rlinf_vla.algorithms.sac import SACConfig
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.transitions import ACTED, ACTION, DISCOUNT, REWARD
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.from_dataset import dataset_transitions
from rlinf_vla.data.lerobot_format import Column, Feature
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.demonstrations import collect_demonstrations
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.recording import (
    EXPERT_ACTION,
    RecordedEpisode,
    features_of,
    record_expert,
)
from rlinf_vla.rollout.transitions import record_transitions
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.policy_calls import noise
from rlinf_vla.testing.toy_env import CounterWorld, groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.models.test_pi0 import small as small_pi0

NOISY = DemonstrationConfig(episodes=9, noise=[0.0, 0.8], random_actions=0.3)


class Sees(LinearPolicy):
    """Keeps the image, the state and the length of the instruction."""

    def __init__(self, chunk: int = 1, state_dim: int = 2) -> None:
        super().__init__(LinearOptions(chunk=chunk))
        self.spec = replace(self.spec, state_dim=state_dim)

    def prepare(self, obs: Observation) -> Inputs:
        lengths = torch.tensor([len(each) for each in obs.instruction])
        return {"image": obs.images["base"].clone(), "state": obs.state.clone(), "words": lengths}


def played(
    envs: list[CounterWorld] | None = None, config: DemonstrationConfig = NOISY
) -> list[RecordedEpisode]:
    found: list[RecordedEpisode] = []
    record_expert(envs or groups(4, 2), config, 0, found.append)
    return found


def write(directory: Path, episodes: list[RecordedEpisode], drop: tuple[str, ...] = ()) -> str:
    features = {
        key: each
        for key, each in features_of(groups(1, 1)[0].spec, video=False).items()
        if key not in drop
    }
    with LeRobotWriter(directory, 10, features) as writer:
        for episode in episodes:
            writer.add_episode({key: episode.frames[key] for key in features}, episode.instruction)
    return str(directory)


def assert_equal(found: Demonstrations, expected: Demonstrations) -> None:
    assert torch.equal(found.actions, expected.actions) and torch.equal(found.draws, expected.draws)
    assert found.inputs.keys() == expected.inputs.keys()
    for name, value in expected.inputs.items():
        assert torch.equal(found.inputs[name], value) and found.inputs[name].dtype == value.dtype, (
            name
        )


@pytest.mark.parametrize("chunk", [1, 3])
def test_training_on_a_recording_equals_training_on_the_episodes(
    tmp_path: Path, chunk: int
) -> None:
    policy = Sees(chunk)
    expected, success = collect_demonstrations(policy, groups(4, 2), NOISY, 0)
    recorded = DemonstrationConfig(
        dataset=write(tmp_path / "data", played()), action_key=EXPERT_ACTION
    )
    seen: list[float] = []
    found, again = collect_demonstrations(policy, (), recorded, 0, seen.append)
    assert again == success and seen[-1] == 1.0
    assert_equal(found, expected)


def test_a_flow_policy_learns_the_datasets_actions_also_those_that_it_does_not_execute(
    tmp_path: Path,
) -> None:
    policy = small_pi0(tmp_path / "pi0", chunk=2)
    dims = policy.spec
    generator = np.random.default_rng(0)
    length = 7
    actions = generator.normal(size=(length, dims.action_dim)).astype(np.float32)
    features = {
        form.ACTION: Feature("float32", (dims.action_dim,)),
        form.STATE: Feature("float32", (dims.state_dim,)),
        form.IMAGES + "base": Feature("image", (32, 32, 3)),
    }
    with LeRobotWriter(tmp_path / "data", 10, features) as writer:
        images = np.zeros((length, 32, 32, 3), np.uint8)
        state = np.zeros((length, dims.state_dim), np.float32)
        writer.add_episode(
            {form.ACTION: actions, form.STATE: state, form.IMAGES + "base": images}, "stack"
        )
    shown, _ = collect_demonstrations(
        policy, (), DemonstrationConfig(dataset=str(tmp_path / "data")), 0
    )
    last = length - 1
    expected = [
        [actions[min(first + step, last)].tolist() for step in range(4)] for first in range(length)
    ]
    assert policy.spec.chunk == 2 and shown.actions.tolist() == expected
    shown.actions.requires_grad_()
    policy.supervised_loss(shown.inputs, shown.actions, noise(shown.draws)).sum().backward()
    assert shown.actions.grad is not None and shown.actions.grad.abs().sum(-1).gt(0).all(), (
        "each is a target"
    )


def test_groups_and_environments_do_not_change_the_recording() -> None:
    first = played()
    for envs in (groups(1, 1), groups(6, 3)):
        for episode, other in zip(first, played(envs), strict=True):
            assert (episode.instruction, episode.success) == (other.instruction, other.success)
            assert all(
                np.array_equal(value, other.frames[key]) for key, value in episode.frames.items()
            )


def test_a_frame_has_observation_action_and_outcome() -> None:
    """The recorded actions are executed again in counter world."""
    for number, episode in enumerate(played()):
        env = CounterWorld(1)
        frames = episode.frames
        listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, NOISY.episodes, 2)
        observation = env.reset(listed[number : number + 1])
        for step in range(len(frames[form.ACTION])):
            assert frames[form.STATE][step].tolist() == observation.state[0].tolist()
            assert np.array_equal(
                frames[form.IMAGES + "base"][step], observation.images["base"][0].numpy()
            )
            assert frames[EXPERT_ACTION][step].tolist() == env.expert_actions()[0].tolist()
            result = env.step(torch.from_numpy(frames[form.ACTION][step])[None, None])
            observation = result.observation
            came = {
                form.REWARD: result.reward,
                form.SUCCESS: result.success,
                form.TRUNCATED: result.truncated & ~result.terminated,
            }
            assert (
                all(frames[key][step] == value[0, 0] for key, value in came.items())
                and frames[form.DONE][step] == result.done[0]
            )
        assert (
            frames[form.DONE].tolist() == [False] * step + [True]
            and episode.success == frames[form.SUCCESS][-1]
        )
        assert episode.instruction == observation.instruction[0]


@pytest.mark.parametrize("kept", ["all", "no success", "no next"])
def test_success_is_recorded_or_unknown(tmp_path: Path, kept: str) -> None:
    following = (form.REWARD, form.DONE, form.TRUNCATED, form.SUCCESS)
    drop = {"all": (), "no success": (form.SUCCESS,), "no next": following}[kept]
    _, success = collect_demonstrations(
        Sees(), (), DemonstrationConfig(dataset=write(tmp_path / "data", played(), drop)), 0
    )
    assert success == (sum(each.success for each in played()) / 9 if kept == "all" else None)


CLEAN = DemonstrationConfig(episodes=6, noise=[0.0])


@pytest.mark.parametrize("limit", [3, 30])
def test_transitions_equal_those_of_the_episodes(tmp_path: Path, limit: int) -> None:
    """Where an episode was truncated, the recording lacks its final observation: one transition less."""
    policy = Sees()
    config = SACConfig(dataset=str(tmp_path / "data"), gamma=0.9)
    envs = groups(2, 1, episode_limit=limit)
    write(tmp_path / "data", played(envs, CLEAN))
    listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, 6, 2)
    actor = Actor(policy, Settings(0, 1.0, 1))
    rewards = partial(chunk_rewards, gamma=0.9)
    truth = record_transitions(policy, actor, envs, listed, rewards, True, Timeline())
    found = list(dataset_transitions(policy, config))
    cut = [bool((each.records[ACTED] == 0).any()) for each in truth]
    assert any(cut) == (limit == 3) and not all(cut)
    for each, expected, was_cut in zip(found, truth, cut, strict=True):
        assert each.success == expected.success and each.steps == expected.steps - was_cut
        for name, value in expected.records.items():
            wanted = value[:-1].clone() if was_cut else value
            if was_cut and name in (ACTION, REWARD, DISCOUNT, ACTED):
                wanted[-1] = 0
            assert torch.equal(each.records[name], wanted), name


def recording(
    directory: Path, rewards: list[float], flags: dict[str, list[bool]], action: float = 0.5
) -> SACConfig:
    length = len(rewards)
    frames: dict[str, Column] = {
        form.ACTION: np.full((length, 4), action, np.float32),
        form.REWARD: np.array(rewards, np.float32),
        form.IMAGES + "front": np.zeros((length, 64, 64, 3), np.uint8),
    }
    features = {form.ACTION: Feature("float32", (4,)), form.REWARD: Feature("float32", (1,))}
    features |= {form.IMAGES + "front": Feature.camera((64, 64), False)} | {
        key: Feature("bool", (1,)) for key in flags
    }
    with LeRobotWriter(directory, 10, features) as writer:
        writer.add_episode(frames | {key: np.array(value) for key, value in flags.items()}, "task")
    return SACConfig(dataset=str(directory), dataset_cameras=["base:front"], gamma=0.5)


@pytest.mark.parametrize(
    ("flags", "terminated"),
    [
        ({}, False),
        ({form.DONE: True}, True),  # as LeRobot's HIL-SERL: the last action was rewarded
        ({form.DONE: False}, False),
        ({form.SUCCESS: True}, True),
        ({form.SUCCESS: False, form.DONE: True}, False),
        ({form.DONE: True, form.TRUNCATED: True, form.SUCCESS: True}, False),
        ({form.DONE: True, form.TRUNCATED: False, form.SUCCESS: False}, True),
    ],
)
def test_chunks_and_ends(tmp_path: Path, flags: dict[str, bool], terminated: bool) -> None:
    config = recording(
        tmp_path / "data",
        [1, 2, 3, 4, 5],
        {key: [False] * 4 + [last] for key, last in flags.items()},
    )
    (found,) = dataset_transitions(Sees(chunk=2, state_dim=0), config)
    records = found.records
    assert records[ACTION].shape == (3, 2, 4)
    if terminated:
        assert found.steps == 5 and records[ACTED].tolist() == [True] * 3
        assert records[REWARD].tolist() == [1 + 0.5 * 2, 3 + 0.5 * 4, 5] and records[
            DISCOUNT
        ].tolist() == [0.25, 0.25, 0]
    else:
        assert found.steps == 4 and records[ACTED].tolist() == [True, True, False]
        assert records[REWARD].tolist() == [2, 5, 0] and records[DISCOUNT].tolist() == [
            0.25,
            0.25,
            0,
        ]


def test_without_other_columns_an_end_with_a_reward_is_a_success(tmp_path: Path) -> None:
    """LeRobot's recorder for HIL-SERL writes next.done for success and for a time limit alike."""
    for name, last, success in (("won", 1.0, True), ("lost", 0.0, False)):
        config = recording(tmp_path / name, [0, 0, last], {form.DONE: [False, False, True]})
        (found,) = dataset_transitions(Sees(state_dim=0), config)
        assert found.success == success and float(found.records[REWARD].sum()) == last
        assert found.records[DISCOUNT].tolist() == [0.5, 0.5, 0]
        assert found.records[ACTED].tolist() == ([True] * 3 if success else [True, True, False])


def test_a_truncated_episode_of_one_frame_gives_no_transition(tmp_path: Path) -> None:
    config = recording(tmp_path / "data", [1], {})
    assert list(dataset_transitions(Sees(state_dim=0), config)) == []


def test_actions_in_other_units_are_refused(tmp_path: Path) -> None:
    config = recording(tmp_path / "data", [1, 2], {}, action=57.0)
    with pytest.raises(
        UserError, match=r"actions of episode 0 reach 57, outside SAC's range \[-1, 1\]"
    ):
        list(dataset_transitions(Sees(state_dim=0), config))


def one_number(directory: Path, length: int = 5) -> tuple[str, Column]:
    """Actions and states of one number, which lerobot stores as a number per row; the last frame is a success."""
    numbers = np.linspace(-0.5, 0.5, length, dtype=np.float32)
    features = {
        form.ACTION: Feature("float32", (1,)),
        form.STATE: Feature("float32", (1,)),
        form.REWARD: Feature("float32", (1,)),
    }
    features |= {
        form.SUCCESS: Feature("bool", (1,)),
        form.IMAGES + "base": Feature.camera((64, 64), False),
    }
    frames: dict[str, Column] = {
        form.ACTION: numbers[:, None],
        form.STATE: 2 * numbers,
        form.REWARD: numbers,
    }
    frames |= {
        form.SUCCESS: np.arange(length) == length - 1,
        form.IMAGES + "base": np.zeros((length, 64, 64, 3), np.uint8),
    }
    with LeRobotWriter(directory, 10, features) as writer:
        writer.add_episode(frames, "task")
    return str(directory), numbers


def test_actions_and_states_of_one_number(tmp_path: Path) -> None:
    path, numbers = one_number(tmp_path / "data")
    policy = spec(Sees(chunk=2), action_dim=1, state_dim=1)
    found, success = collect_demonstrations(policy, (), DemonstrationConfig(dataset=path), 0)
    assert success == 1 and found.inputs["state"].tolist() == [
        [2 * each] for each in numbers.tolist()
    ]
    following = [*numbers.tolist(), numbers[-1]]
    assert found.actions.tolist() == [[[following[row]], [following[row + 1]]] for row in range(5)]
    (episode,) = dataset_transitions(policy, SACConfig(dataset=path))
    assert (
        episode.records[ACTION].shape == (3, 2, 1)
        and episode.records[ACTION].flatten()[:5].tolist() == numbers.tolist()
    )


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        (
            form.REWARD,
            {"shape": [2]},
            r"next.reward has shape \[2\], it needs one number per frame: they must match",
        ),
        (
            form.SUCCESS,
            {"shape": [1, 1]},
            r"next.success has shape \[1, 1\], it needs one number per frame",
        ),
        (form.SUCCESS, {"dtype": "string"}, "next.success is string, numbers are needed"),
        (form.ACTION, {"dtype": "string"}, "action is string, numbers are needed"),
        (form.STATE, {"dtype": "video"}, "observation.state is video, numbers are needed"),
    ],
)
def test_columns_of_another_shape_are_refused_before_they_are_read(
    tmp_path: Path, key: str, changes: dict[str, Any], message: str
) -> None:
    path, _ = one_number(tmp_path / "data")
    info = tmp_path / "data" / form.INFO
    document = json.loads(info.read_text())
    document["features"][key] |= changes
    info.write_text(json.dumps(document))
    with pytest.raises(UserError, match=message):
        list(dataset_transitions(spec(Sees(), action_dim=1, state_dim=1), SACConfig(dataset=path)))


def spec(policy: Sees, **changes: Any) -> Sees:
    policy.spec = replace(policy.spec, **changes)
    return policy


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"action_dim": 7}, {}, r"action has shape \[4\], the policy's actions 7 dimensions"),
        (
            {"state_dim": 3},
            {},
            r"observation.state has shape \[2\], the policy's state 3 dimensions",
        ),
        (
            {"images": {"wrist": (64, 64)}},
            {},
            r"has cameras \['base'\] and no 'wrist'.* algorithm.demonstrations.cameras=\[wrist:NAME\]",
        ),
        (
            {"images": {"base": (64, 128)}},
            {},
            "the policy's image 'base' is 64x128 pixels, observation.images.base of .* only 64x64",
        ),
        (
            {"images": {"base_depth": (64, 64)}},
            {"cameras": ["base_depth:base"]},
            "image 'base_depth' shows distances, a LeRobotDataset has only colours: leave this camera out",
        ),
        (
            {},
            {"cameras": ["front:base"]},
            r"'front:base' must be POLICY_CAMERA:DATASET_CAMERA, the former one of \['base'\]",
        ),
        ({}, {"cameras": ["base"]}, "'base' must be POLICY_CAMERA:DATASET_CAMERA"),
        ({}, {"cameras": ["base:front"]}, r"has cameras \['base'\] and no 'front'"),
        ({}, {"action_key": "action.clean"}, "has no feature action.clean"),
    ],
)
def test_a_dataset_that_does_not_fit_is_one_line(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "data", played(config=CLEAN))
    with pytest.raises(UserError, match=message) as caught:
        collect_demonstrations(
            spec(Sees(), **changes), (), DemonstrationConfig(dataset=path, **options), 0
        )
    assert "\n" not in str(caught.value)


def test_names_of_rlinf_and_openpi(tmp_path: Path) -> None:
    """``state``, ``actions`` and ``image``, as RLinf's rlinf/data/lerobot_writer.py and openpi's LIBERO dataset call them."""
    names = {form.STATE: "state", form.ACTION: "actions", "observation.images.base": "image"}
    ours, theirs = (write(tmp_path / each, played(config=CLEAN)) for each in ("ours", "theirs"))
    rename(Path(theirs), names)
    keys = {"action_key": "actions", "state_key": "state", "cameras": ["base:image"]}
    found, expected = (
        collect_demonstrations(Sees(), (), DemonstrationConfig(dataset=path, **options), 0)[0]
        for path, options in ((theirs, keys), (ours, {}))
    )
    assert_equal(found, expected)


def test_a_policy_that_reads_no_state_needs_none(tmp_path: Path) -> None:
    path = write(tmp_path / "data", played(config=CLEAN), drop=(form.STATE,))
    found, _ = collect_demonstrations(Sees(state_dim=0), (), DemonstrationConfig(dataset=path), 0)
    assert found.inputs["state"].shape == (len(found), 0)
    with pytest.raises(UserError, match=r"has no feature observation\.state"):
        collect_demonstrations(Sees(), (), DemonstrationConfig(dataset=path), 0)


@pytest.fixture
def two(tmp_path: Path) -> list[dict[str, Any]]:
    """Two datasets of counter world, the second with other names: entries of a mixture."""
    paths = [
        write(tmp_path / name, played(config=replace(CLEAN, episodes=count)))
        for name, count in (("ours", 4), ("theirs", 2))
    ]
    rename(Path(paths[1]), {form.ACTION: "actions", "observation.images.base": "image"})
    return [
        {"dataset": paths[0], "weight": 3.0},
        {"dataset": paths[1], "action_key": "actions", "cameras": ["base:image"]},
    ]


def mixed(entries: list[dict[str, Any]], **keys: Any) -> DemonstrationConfig:
    return DemonstrationConfig(mixture=[WeightedDataset(**entry) for entry in entries], **keys)


def test_a_mixture_has_the_frames_of_its_datasets_and_their_weights(
    two: list[dict[str, Any]],
) -> None:
    policy = Sees(2)
    seen: list[float] = []
    found, success = collect_demonstrations(policy, (), mixed(two), 0, seen.append)
    parts = [collect_demonstrations(policy, (), mixed([entry]), 0) for entry in two]
    assert success == 0.75 * parts[0][1] + 0.25 * parts[1][1]  # type: ignore[operator]
    assert (
        sorted(seen) == seen and seen[-1] == 1.0 and all(part.weight is None for part, _ in parts)
    )
    both = Demonstrations.cat([part for part, _ in parts])
    assert_equal(found, replace(both, draws=torch.arange(len(both))))
    first = len(parts[0][0])
    assert found.weight is not None
    assert torch.allclose(
        torch.stack([found.weight[:first].sum(), found.weight[first:].sum()]),
        torch.tensor([0.75, 0.25], dtype=torch.float64),
    )
    assert found.weight[:first].unique().numel() == 1


@pytest.mark.parametrize(
    ("number", "changes", "keys", "message"),
    [
        (1, {"action_key": None}, {}, "theirs has no feature action "),
        (
            1,
            {"cameras": None},
            {},
            r"theirs has cameras \['image'\] .*mixture\[1\].cameras=\[base:NAME\]",
        ),
        (0, {"dataset": "nowhere"}, {}, "nowhere is not a directory"),
        (
            0,
            {},
            {"dataset": "x"},
            "dataset and algorithm.demonstrations.mixture exclude each other",
        ),
        (
            0,
            {},
            {"state_key": "next.reward"},
            r"ours: next.reward has shape \[1\], the policy's state",
        ),
    ],
)
def test_a_mixture_that_does_not_fit_is_one_line(
    two: list[dict[str, Any]],
    number: int,
    changes: dict[str, Any],
    keys: dict[str, Any],
    message: str,
) -> None:
    two[number] |= changes
    with pytest.raises(UserError, match=message) as caught:
        collect_demonstrations(Sees(), (), mixed(two, **keys), 0)
    assert "\n" not in str(caught.value)


def test_datasets_of_a_mixture_have_one_control_rate(two: list[dict[str, Any]]) -> None:
    slow(Path(two[1]["dataset"]))
    with pytest.raises(
        UserError, match=r"theirs has 5 steps per second, .*ours 10: a mixture needs"
    ):
        collect_demonstrations(Sees(), (), mixed(two), 0)
    with pytest.raises(UserError, match="theirs has 5 steps per second, the environment 10"):
        collect_demonstrations(Sees(), groups(1, 1), mixed(two), 0)


def slow(directory: Path) -> None:
    info = directory / form.INFO
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fps": 5}))


def rename(directory: Path, names: dict[str, str]) -> None:
    """Give features of a dataset other names."""
    info = directory / form.INFO
    document = json.loads(info.read_text())
    document["features"] = {
        names.get(key, key): feature for key, feature in document["features"].items()
    }
    info.write_text(json.dumps(document))
    for path in directory.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(
            table.rename_columns([names.get(name, name) for name in table.column_names]), path
        )

"""Published checkpoints get their conventions from a card, found by the repository's name.

Small random models stand for the published ones, which cannot be downloaded here.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Convention, EnvSpec, ToolUnits
from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.conventions import native
from rlinf_vla.envs.libero.plugin import simulator_options
from rlinf_vla.models.cards import repository_of
from rlinf_vla.models.openvla.cards import suite_key
from rlinf_vla.models.openvla.oft import OpenVLAOFTOptions, OpenVLAOFTPolicy
from rlinf_vla.models.openvla.policy import OpenVLAOptions, OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.runtime.fit import check_fit, fitted
from tests.models.tiny_openvla import ASSETS, smaller_config

MOOJINK = "moojink/openvla-7b-oft-finetuned-libero-spatial"
LIBERO_ACTION = {"q01": [-0.7] * 6 + [0.0], "q99": [0.8] * 6 + [1.0], "mask": [True] * 6 + [False]}
LIBERO_STATISTICS = {"action": LIBERO_ACTION, "proprio": {"q01": [-1.0] * 8, "q99": [1.0] * 8}}


def cached(
    root: Path, repository: str, datasets: tuple[str, ...] = ("libero_spatial_no_noops", "other")
) -> Path:
    """An OpenVLA as the Hub's cache lays it out, without weights."""
    directory = root / f"models--{repository.replace('/', '--')}" / "snapshots" / "0123abcd"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in smaller_config().items() if key != "chunk"})
    )
    (directory / "dataset_statistics.json").write_text(
        json.dumps(dict.fromkeys(datasets, LIBERO_STATISTICS))
    )
    shutil.copyfile(ASSETS / "openvla_tiny" / "tokenizer.json", directory / "tokenizer.json")
    return directory


def edit(path: Path, **values: Any) -> None:
    """Puts these values into a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def oft(directory: Path, **options: Any) -> OpenVLAOFTPolicy:
    return OpenVLAOFTPolicy.load(directory, OpenVLAOFTOptions(random_weights=True, **options))


def libero_spec(policy: Any, **config: Any) -> EnvSpec:
    """What LIBERO declares where a recipe sets only ``config`` under ``env``."""
    options = simulator_options(fitted(LiberoConfig(**config), policy.spec))
    told = native(options)
    images = dict.fromkeys(options["cameras"], (options["image_size"],) * 2)
    convention = Convention(**told | {"tool": ToolUnits(*told["tool"])})
    return EnvSpec(1, 7, 8, 20.0, 220, images, ("task",), torch.device("cpu"), native=convention)


def test_an_official_oft_checkpoint_needs_no_further_key(tmp_path: Path) -> None:
    policy = oft(cached(tmp_path, MOOJINK))
    assert (
        list(policy.spec.images) == ["base", "wrist"]
        and policy.spec.chunk == 8
        and policy.spec.state_dim == 8
    )
    assert policy.action_head is not None and policy.stop_id is not None
    assert {name: policy.config[name] for name in ("center_crop", "resize", "gripper", "card")} == {
        "center_crop": True,
        "resize": "rlds",
        "gripper": "close_positive",
        "card": "openvla_oft_libero",
    }
    assert policy.spec.convention == Convention(
        ToolUnits(0.05, 0.5), "close_positive", "axis_angle", "rot180", jpeg=True
    )
    spec = libero_spec(policy)
    assert spec.images == {"base": (256, 256), "wrist": (256, 256)}
    check_fit(policy, spec)
    with pytest.raises(
        UserError, match=r"needs state as axis_angle, .* with env=libero set env.convention=openvla"
    ):
        check_fit(policy, libero_spec(policy, convention="common"))


@pytest.mark.parametrize(
    ("repository", "head", "stop"),
    [
        ("Haozhan72/Openvla-oft-SFT-libero-spatial-traj1", "discrete", True),
        ("RLinf/RLinf-OpenVLAOFT-LIBERO-90-Base", "discrete", False),
    ],
)
def test_checkpoints_of_rl_projects_differ_in_the_stop_token(
    tmp_path: Path, repository: str, head: str, stop: bool
) -> None:
    policy = oft(cached(tmp_path, repository, ("libero_90_no_noops", "libero_spatial_no_noops")))
    assert (policy.options.head, policy.options.stop_token, policy.spec.state_dim) == (
        head,
        stop,
        0,
    )
    assert list(policy.spec.images) == ["base"] and policy.spec.chunk == 8
    check_fit(policy, libero_spec(policy))


@pytest.mark.parametrize(
    ("repository", "kind", "dataset"),
    [
        ("RLinf/RLinf-OpenVLAOFT-LIBERO-90-Base", OpenVLAOFTPolicy, "libero_90_no_noops"),
        ("RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main", OpenVLAOFTPolicy, "bridge_orig"),
        ("gen-robot/openvla-7b-rlvla-warmup", OpenVLAPolicy, "bridge_orig"),
    ],
)
def test_rlinf_neither_crops_nor_compresses_images(
    tmp_path: Path, repository: str, kind: Any, dataset: str
) -> None:
    directory = cached(tmp_path, repository, (dataset,))
    edit(directory / "config.json", norm_stats={dataset: LIBERO_STATISTICS})
    known, guessed = (
        kind.load(directory, kind.Config(random_weights=True, card=card)) for card in (None, "none")
    )
    assert (known.config["center_crop"], known.config["resize"]) == (
        False,
        "processor",
    ) and not known.spec.convention.jpeg
    assert guessed.config["center_crop"] and guessed.spec.convention.jpeg, (
        "as files of an official fine-tune"
    )


def test_values_of_the_recipe_and_of_our_config_win(tmp_path: Path) -> None:
    directory = cached(tmp_path, MOOJINK)
    policy = oft(
        directory,
        head="discrete",
        chunk=2,
        images=["base"],
        proprio=False,
        gripper="open_positive",
        center_crop=False,
    )
    assert (
        policy.spec.chunk == 2
        and list(policy.spec.images) == ["base"]
        and policy.spec.env["cameras"] == ["base"]
    )
    assert (
        policy.action_head is None
        and not policy.config["center_crop"]
        and policy.spec.convention.gripper == "open_positive"
    )
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    again = OpenVLAOFTPolicy.load(saved, OpenVLAOFTOptions(images=["base"], unnorm_key="other"))
    assert again.config == policy.config and again.spec == replace(policy.spec, suite=None), (
        "its own config.json names the card and overrides its values"
    )


def test_a_copied_directory_has_the_card_of_its_name_or_option(tmp_path: Path) -> None:
    copy = tmp_path / "openvla-7b-oft-finetuned-libero-spatial"
    shutil.copytree(cached(tmp_path, MOOJINK), copy)
    assert oft(copy).config["card"] == "openvla_oft_libero"
    renamed = copy.rename(tmp_path / "mine")
    assert "card" not in oft(renamed, unnorm_key="other").config
    assert oft(renamed, unnorm_key="other", card="simplevla_libero").options.head == "discrete"
    renamed.rename(copy)
    plain = oft(copy, card="none")
    assert "card" not in plain.config and plain.spec.env == {} and plain.options.head == "discrete"


@pytest.mark.parametrize(
    "name",
    [
        "openvla-7b-oft-finetuned-libero-spatial",
        "moojink--{}",
        "moojink_{}",
        "{}/main",
        f"{{}}/{'0a' * 20}",
        "link",
    ],
)
def test_a_card_is_found_by_any_name_of_the_repository(tmp_path: Path, name: str) -> None:
    source = cached(tmp_path, MOOJINK)
    directory = tmp_path / "own" / name.format(MOOJINK.partition("/")[2])
    directory.parent.mkdir(parents=True)
    if name == "link":
        directory.symlink_to(source)
    else:
        shutil.copytree(source, directory)
    policy = oft(directory)
    assert policy.options.head == "l1" and policy.dataset == "libero_spatial_no_noops"
    assert policy.spec.remarks[0] == "model.options.card: openvla_oft_libero gives what is null"


def test_a_checkpoint_without_a_card_says_so(tmp_path: Path) -> None:
    directory = cached(tmp_path, "me/mine", ("other",))
    assert oft(directory).spec.remarks == ("model.options.card: none, null options are defaults",)
    pair = tmp_path / "my_openvla-7b-oft-finetuned-libero-spatial"
    shutil.copytree(directory, pair)
    assert "card" not in oft(pair).config, "of another organisation"


def test_names_of_two_cards_are_ambiguous(tmp_path: Path) -> None:
    link = tmp_path / "openvla-oft-SFT-libero-spatial"
    link.symlink_to(cached(tmp_path, MOOJINK))
    words = r"has names of several cards \((simplevla_libero, openvla_oft_libero)\): choose one with model\.options\.card"
    with pytest.raises(UserError, match=words):
        oft(link)
    assert oft(link, card="openvla_oft_libero").options.head == "l1"


def test_an_unknown_card_and_another_plug_in_are_refused(tmp_path: Path) -> None:
    directory = cached(tmp_path, MOOJINK)
    with pytest.raises(
        UserError,
        match=r"model.options.card=openvla_oft_liberro is not known; did you mean openvla_oft_libero\?",
    ):
        oft(directory, card="openvla_oft_liberro")
    with pytest.raises(
        UserError,
        match=r"\(card openvla_oft_libero\) is of model=openvla_oft, not openvla: set model=openvla_oft",
    ):
        OpenVLAPolicy.load(directory, OpenVLAOptions(random_weights=True))


def test_the_base_model_is_refused_where_an_action_of_1_is_not_a_metre(tmp_path: Path) -> None:
    directory = cached(tmp_path, "openvla/openvla-7b", ("bridge_orig", "fractal20220817_data"))
    policy = OpenVLAPolicy.load(
        directory, OpenVLAOptions(random_weights=True, unnorm_key="bridge_orig")
    )
    assert policy.spec.convention == Convention(ToolUnits(1.0, 1.0), "zero_to_one")
    panda = replace(libero_spec(policy), native=None, tool=ToolUnits(0.1, 0.1))
    with pytest.raises(
        UserError,
        match=r"an action of 1 means 1 m and 1 rad to the policy, 0.1 m and 0.1 rad to the environment",
    ):
        check_fit(policy, panda)
    other = OpenVLAPolicy.load(
        directory, OpenVLAOptions(random_weights=True, unnorm_key="fractal20220817_data")
    )
    assert other.spec.convention.tool is None, "only what is known of a dataset is claimed"
    with pytest.raises(
        UserError,
        match=r"gripper action means: 0 closes, 1 opens; .* set model.options.gripper=open_positive",
    ):
        check_fit(other, panda)


BASE = ("bridge_orig", "fractal20220817_data")


@pytest.mark.parametrize(
    ("repository", "kind", "fine_tuned", "base", "key", "resolved"),
    [
        (
            "gen-robot/openvla-7b-rlvla-warmup",
            OpenVLAPolicy,
            ("warmup",),
            BASE,
            None,
            "bridge_orig",
        ),
        ("gen-robot/openvla-7b-rlvla-warmup", OpenVLAPolicy, ("warmup",), BASE, "warmup", "warmup"),
        ("gen-robot/openvla-7b-rlvla-warmup", OpenVLAPolicy, ("warmup",), (), None, "warmup"),
        ("gen-robot/openvla-7b-rlvla-rl", OpenVLAPolicy, (), BASE, None, "bridge_orig"),
        (
            "RLinf/RLinf-OpenVLA-GRPO-ManiSkill-25ood",
            OpenVLAPolicy,
            ("bridge_orig",),
            (),
            None,
            "bridge_orig",
        ),
        (
            "RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main",
            OpenVLAOFTPolicy,
            BASE,
            (),
            None,
            "bridge_orig",
        ),
        ("openvla/openvla-7b", OpenVLAPolicy, (), BASE[:1], None, "bridge_orig"),
        (
            "gen-robot/openvla-7b-rlvla-mine",
            OpenVLAPolicy,
            ("mine", "warmup"),
            BASE,
            None,
            "bridge_orig",
        ),
    ],
)
def test_units_are_those_of_the_dataset_that_was_resolved(
    tmp_path: Path,
    repository: str,
    kind: Any,
    fine_tuned: tuple[str, ...],
    base: tuple[str, ...],
    key: str | None,
    resolved: str,
) -> None:
    """Commands in metres are never played where an action of 1 is less, whether or not the recipe names the dataset."""
    directory = cached(tmp_path, repository, fine_tuned)
    edit(directory / "config.json", norm_stats=dict.fromkeys(base, LIBERO_STATISTICS))
    if not fine_tuned:
        (directory / "dataset_statistics.json").unlink()
    options = kind.Config(random_weights=True, unnorm_key=key)
    policy = kind.load(directory, options)
    assert policy.dataset == kind.dataset_of(directory, options) == resolved
    assert policy.spec.convention.tool == ToolUnits(1.0, 1.0)
    with pytest.raises(
        UserError,
        match=r"an action of 1 means 1 m and 1 rad to the policy, 0.1 m and 0.1 rad to the environment",
    ):
        check_fit(policy, replace(libero_spec(policy), native=None, tool=ToolUnits(0.1, 0.1)))


def test_units_that_a_card_does_not_know_are_said(tmp_path: Path) -> None:
    directory = cached(tmp_path, "openvla/openvla-7b", BASE)
    policy = OpenVLAPolicy.load(directory, OpenVLAOptions(random_weights=True, unnorm_key=BASE[1]))
    assert policy.spec.remarks == (
        "model.options.card: openvla gives what is null",
        f"card openvla does not know the action units of dataset {BASE[1]}: they are not checked",
    )


@pytest.mark.parametrize(
    ("name", "own", "base"),
    [
        ("openvla-7b-rlvla-mypick", "mypick", BASE),
        ("my-libero-10-finetune", "libero_10_mine", ("libero_10_no_noops", *BASE)),
        ("openvla-7b-finetuned-libero-goal", "libero_goal", ("libero_goal_no_noops",)),
    ],
)
def test_a_fine_tune_on_other_data_is_not_un_normalised_as_its_base_model(
    tmp_path: Path, name: str, own: str, base: tuple[str, ...]
) -> None:
    directory = cached(tmp_path, name, (own,)).rename(tmp_path / name)
    other = {"action": LIBERO_ACTION | {"q99": [9.0] * 7}}
    edit(directory / "config.json", norm_stats=dict.fromkeys(base, other))
    policy = OpenVLAPolicy.load(directory, OpenVLAOptions(random_weights=True))
    assert policy.dataset == own and policy.statistics == LIBERO_STATISTICS
    assert policy.spec.convention.tool == (ToolUnits(0.05, 0.5) if own == "libero_goal" else None)


def test_a_dataset_of_the_base_model_does_not_have_the_units_of_the_fine_tune(
    tmp_path: Path,
) -> None:
    directory = cached(tmp_path, "openvla/openvla-7b-finetuned-libero-spatial", ("libero_spatial",))
    edit(directory / "config.json", norm_stats=dict.fromkeys(BASE, LIBERO_STATISTICS))
    policy = OpenVLAPolicy.load(
        directory, OpenVLAOptions(random_weights=True, unnorm_key="bridge_orig")
    )
    assert policy.spec.convention.tool is None
    assert policy.spec.remarks == (
        "model.options.card: openvla_libero gives what is null",
        "card openvla_libero does not know the action units of dataset bridge_orig: they are not checked",
    )


def test_a_fine_tune_s_own_statistics_win(tmp_path: Path) -> None:
    directory = cached(tmp_path, MOOJINK, ("libero_spatial_no_noops",))
    other = {"action": LIBERO_ACTION | {"q99": [9.0] * 7}, "proprio": LIBERO_STATISTICS["proprio"]}
    edit(
        directory / "config.json",
        norm_stats=dict.fromkeys(("libero_spatial_no_noops", *BASE), other),
    )
    policy = oft(directory)
    assert policy.dataset == "libero_spatial_no_noops" and policy.statistics == LIBERO_STATISTICS
    with pytest.raises(
        UserError,
        match=r"unnorm_key=warmup: .* has statistics for \['bridge_orig', 'fractal.*', 'libero_spatial_no_noops'\]",
    ):
        oft(directory, unnorm_key="warmup")


def test_an_openvla_of_libero_is_evaluated_as_the_official_script_does(tmp_path: Path) -> None:
    directory = cached(tmp_path, "openvla/openvla-7b-finetuned-libero-spatial", ("libero_spatial",))
    policy = OpenVLAPolicy.load(directory, OpenVLAOptions(random_weights=True))
    assert (
        policy.config["gripper"] == "close_positive"
        and policy.config["resize"] == "rlds"
        and policy.config["center_crop"]
    )
    check_fit(policy, libero_spec(policy))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (MOOJINK, "libero_spatial_no_noops"),
        ("Haozhan72/Openvla-oft-SFT-libero10-traj1", "libero_10"),
        ("RLinf/RLinf-OpenVLAOFT-LIBERO-90-Base", "libero_90_no_noops"),
        ("moojink/openvla-7b-oft-finetuned-libero-spatial-object-goal-10", None),
        ("RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora", "libero_130_no_noops_trajall"),
        ("RLinf/RLinf-OpenVLAOFT-LIBERO-130", "libero_130_no_noops_trajall"),
        ("openvla/openvla-7b", None),
    ],
)
def test_the_statistics_are_those_of_the_suite_in_the_name(
    tmp_path: Path, name: str, key: str | None
) -> None:
    directory = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "1"
    assert repository_of(directory) == [name]
    names = ("spatial_no_noops", "10", "10_no_noops", "90_no_noops", "goal", "130_no_noops_trajall")
    known = {f"libero_{name}": None for name in names}
    assert suite_key(directory, known) == key


def test_a_policy_of_one_suite_says_so(tmp_path: Path) -> None:
    assert oft(cached(tmp_path, MOOJINK)).spec.suite == "libero_spatial"
    alone = cached(tmp_path, "Haozhan72/Openvla-oft-SFT-libero10-trajall", ("libero_10_no_noops",))
    assert oft(alone).spec.suite == "libero_10"
    assert oft(alone, unnorm_key="libero_10_no_noops").spec.suite is None, (
        "who names the dataset has chosen"
    )
    of_all = cached(tmp_path, "RLinf/RLinf-OpenVLAOFT-LIBERO-130", ("libero_130_no_noops_trajall",))
    assert oft(of_all).spec.suite is None


@pytest.mark.parametrize(
    ("repository", "delta", "in_prompt"),
    [("openpi/pi05_libero", [], False), ("lerobot/pi0_libero", [0, 1, 2, 3, 4, 5], None)],
)
def test_a_pi0_of_libero_needs_no_further_key(
    tmp_path: Path, repository: str, delta: list[int], in_prompt: bool | None
) -> None:
    directory = tmp_path / f"models--{repository.replace('/', '--')}" / "snapshots" / "1"
    shutil.copytree(ASSETS / "pi0_tiny_libero", directory)
    edit(directory / "config.json", action_horizon=10, pi05="pi05" in repository)
    policy = Pi0Policy.load(directory, Pi0Options(random_weights=True))
    assert policy.delta == delta and policy.options.state_in_prompt is in_prompt
    assert list(policy.spec.images) == ["base", "wrist"] and policy.spec.chunk == 5
    check_fit(policy, libero_spec(policy))
    with pytest.raises(
        UserError, match=r"needs state as axis_angle, .* with env=libero set env.convention=openvla"
    ):
        check_fit(policy, libero_spec(policy, convention="common"))

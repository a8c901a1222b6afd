from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions, OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.testing.policy import DiscretePolicyConformance
from rlinf_vla.testing.policy_calls import act, noise, observations
from tests.models.tiny_openvla import smaller_config, smaller_directory


def small(directory: Path, options: dict[str, Any] | None = None, **oft: Any) -> OpenVLAOFTPolicy:
    """Random weights; ``oft`` goes into config.json, ``options`` into the recipe's node."""
    smaller_directory(directory, smaller_config() | {"oft": {"chunk": 2} | oft})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OpenVLAOFTPolicy.load(
            directory, OpenVLAOFTOptions(random_weights=True, **(options or {}))
        )


class OFT(DiscretePolicyConformance):
    def choices(self, latent: dict[str, Tensor]) -> Tensor:
        return (latent["token_ids"] - 504).unflatten(1, (2, 4))


class TestOFT(OFT):
    @pytest.fixture
    def policy(self, tmp_path: Path) -> OpenVLAOFTPolicy:
        return small(tmp_path / "small")

    def test_slots_do_not_depend_on_each_others_tokens(self, policy: OpenVLAOFTPolicy) -> None:
        inputs = policy.prepare(observations(policy, 2))
        choice = act(policy, inputs).latent["token_ids"]
        other = choice.clone()
        other[:, 0] = 504 + (choice[:, 0] - 503) % 8
        found = [
            policy.evaluate(inputs, {"token_ids": ids}, 1.0).log_prob.flatten(1)
            for ids in (choice, other)
        ]
        assert torch.equal(found[0][:, 1:], found[1][:, 1:]) and not torch.equal(
            found[0][:, 0], found[1][:, 0]
        )


class TestOFTWithProprioceptionAndFiLM(OFT):
    @pytest.fixture
    def policy(self, tmp_path: Path) -> OpenVLAOFTPolicy:
        return small(tmp_path / "small", proprio=True, film=True, stop_token=False)

    @pytest.mark.parametrize("changed", ["state", "word"])
    def test_actions_depend_on_state_and_instruction(
        self, policy: OpenVLAOFTPolicy, changed: str
    ) -> None:
        inputs = policy.prepare(
            replace(
                observations(policy, 2), instruction=["push the red cube", "push the blue cube"]
            )
        )
        same = (
            ("image.base", "token_ids", "token_mask")
            if changed == "state"
            else ("image.base", "proprio")
        )
        latent = {
            "token_ids": torch.full((2, 8), 506)
        }  # equal in both rows, so that only the inputs differ
        log_prob = policy.evaluate(
            inputs | {name: inputs[name][[0, 0]] for name in same}, latent, 1.0
        ).log_prob
        assert (log_prob[0] - log_prob[1]).abs().max() > 1e-3

    def test_the_state_is_normalised_by_its_quantiles(self, policy: OpenVLAOFTPolicy) -> None:
        low, high = (np.array(policy.statistics["proprio"][name]) for name in ("q01", "q99"))
        state = (
            np.random.default_rng(0)
            .uniform(low - 0.1, high + 0.1, (20, len(low)))
            .astype(np.float32)
        )
        observed = replace(observations(policy, 20), state=torch.tensor(state))
        expected = np.clip(2 * (state - low) / (high - low + 1e-8) - 1, -1, 1)
        np.testing.assert_allclose(policy.prepare(observed)["proprio"].numpy(), expected, atol=1e-5)


def test_two_cameras_are_two_sets_of_patches(tmp_path: Path) -> None:
    policy = small(tmp_path / "small", options={"images": ["base", "wrist"]})
    observed = observations(policy, 2)
    log_prob = act(policy, policy.prepare(observed)).log_prob
    observed.images["wrist"].zero_()
    assert set(policy.spec.images) == {"base", "wrist"}
    assert (
        act(policy, policy.prepare(observed), temperature=0.0).log_prob - log_prob
    ).abs().max() > 1e-3


def test_the_regression_head_imitates_but_has_no_distribution(tmp_path: Path) -> None:
    policy = small(tmp_path / "small", head="l1")
    assert policy.action_head is not None
    policy.action_head.model.fc2.weight.data /= 4  # within [-1, 1], to which targets are clipped
    inputs = policy.prepare(observations(policy, 3))
    sample = act(policy, inputs)
    assert torch.equal(sample.actions, act(policy, inputs, temperature=0.0).actions)
    loss = policy.supervised_loss(inputs, sample.actions, noise(torch.arange(3)))
    assert loss.shape == (3,) and loss.abs().max() < 1e-6
    with pytest.raises(UserError, match="head=discrete"):
        policy.evaluate(inputs, {}, 1.0)


def test_the_regression_head_learns_finite_targets_also_of_outliers_and_constant_dimensions(
    tmp_path: Path,
) -> None:
    directory = smaller_directory(
        tmp_path / "small", smaller_config() | {"oft": {"chunk": 2, "head": "l1"}}
    )
    statistics = json.loads((directory / "dataset_statistics.json").read_text())
    for values in statistics.values():
        values["action"]["q99"][1] = values["action"]["q01"][1]
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))
    policy = OpenVLAOFTPolicy.load(directory, OpenVLAOFTOptions(random_weights=True))
    inputs = policy.prepare(observations(policy, 2))
    least = torch.full((2, 2, 4), -1.0)
    losses = [
        policy.supervised_loss(inputs, actions, noise(torch.arange(2)))
        for actions in (least, least * 50)
    ]
    assert losses[0].isfinite().all() and torch.equal(*losses)


def test_statistics_of_aloha_are_named_and_stored(tmp_path: Path) -> None:
    directory = smaller_directory(
        tmp_path / "small", smaller_config() | {"oft": {"chunk": 2, "proprio": True}}
    )
    statistics = json.loads((directory / "dataset_statistics.json").read_text())
    for values in statistics.values():
        for part in (values["action"], values["proprio"]):
            part |= {"min": [-4.0] * len(part["q01"]), "max": [4.0] * len(part["q01"])}
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))
    policy = OpenVLAOFTPolicy.load(
        directory, OpenVLAOFTOptions(random_weights=True, bounds="min_max")
    )
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    again = OpenVLAOFTPolicy.load(tmp_path / "saved", OpenVLAOFTOptions())
    for each in (policy, again):
        assert each.action_tokens.denormalise(torch.full((4,), 0.5)).tolist() == [2.0] * 4
        assert (
            each.proprio is not None
            and each.proprio(torch.full((each.spec.state_dim,), 2.0)).tolist()
            == [0.5] * each.spec.state_dim
        )
    with pytest.raises(UserError, match="bounds=minmax: choose q99 or min_max"):
        OpenVLAOFTPolicy.load(directory, OpenVLAOFTOptions(random_weights=True, bounds="minmax"))


def test_parts_are_read_from_the_official_files(tmp_path: Path) -> None:
    source = small(tmp_path / "small", proprio=True, head="l1")
    published = tmp_path / "published"
    smaller_directory(published)
    source.save(published)
    (published / "action_head.safetensors").unlink()
    weights = {
        name: value
        for name, value in source.backbone.state_dict().items()
        if not name.startswith("proprio_projector.")
    }
    save_file(weights, published / "model.safetensors")
    assert source.action_head is not None
    for step in ("50000", "150000"):
        factor = 1 if step == "150000" else 0  # the newer one counts
        for name, part in (
            ("action_head", source.action_head),
            ("proprio_projector", source.backbone.proprio_projector),
        ):
            state = {f"module.{key}": value * factor for key, value in part.state_dict().items()}
            torch.save(state, published / f"{name}--{step}_checkpoint.pt")
    loaded = OpenVLAOFTPolicy.load(published, OpenVLAOFTOptions())
    inputs = source.prepare(observations(source, 2))
    torch.testing.assert_close(act(loaded, inputs).actions, act(source, inputs).actions)
    (published / "action_head--150000_checkpoint.pt").write_bytes(b"not a pickle")
    with pytest.raises(UserError, match="cannot be read as tensors"):
        OpenVLAOFTPolicy.load(published, OpenVLAOFTOptions())
    for path in published.glob("action_head--*"):
        path.unlink()
    with pytest.raises(UserError, match="has no action_head"):
        OpenVLAOFTPolicy.load(published, OpenVLAOFTOptions())


def of_ones_own(directory: Path, steps: Mapping[str, str]) -> OpenVLAOFTPolicy:
    """Write what the official script leaves of a data set of one's own: parts of these steps, and nothing that names the model.

    Return the policy that it is.
    """
    source = small(directory.with_name("source"), proprio=True, head="l1")
    smaller_directory(directory)
    source.save(directory)
    (directory / "action_head.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name not in ("oft", "chunk")})
    )
    weights = {
        name: value
        for name, value in source.backbone.state_dict().items()
        if not name.startswith("proprio_projector.")
    }
    save_file(weights, directory / "model.safetensors")
    for name, module in {
        "action_head": source.action_head,
        "proprio_projector": source.backbone.proprio_projector,
    }.items():
        assert module is not None
        state = {f"module.{key}": value for key, value in module.state_dict().items()}
        if name in steps:
            torch.save(state, directory / f"{name}--{steps[name]}_checkpoint.pt")
    return source


def test_parts_tell_which_policy_a_directory_of_ones_own_has(tmp_path: Path) -> None:
    directory = tmp_path / "openvla-7b+my_task+b8"
    source = of_ones_own(directory, {"action_head": "5000", "proprio_projector": "5000"})
    loaded = OpenVLAOFTPolicy.load(directory, OpenVLAOFTOptions(chunk=2))
    assert (loaded.options.head, loaded.options.proprio, loaded.options.film) == ("l1", True, False)
    inputs = source.prepare(observations(source, 2))
    torch.testing.assert_close(act(loaded, inputs).actions, act(source, inputs).actions)
    assumed = (
        "the files of an OpenVLA-OFT do not state its cameras or chunk, assumed: model.options."
    )
    assert loaded.spec.remarks == (
        "model.options.card: none, null options are defaults",
        f"{assumed}images=['base']",
    )
    assert (
        OpenVLAOFTPolicy.without_weights(directory, OpenVLAOFTOptions(chunk=2)).spec == loaded.spec
    )
    both = OpenVLAOFTPolicy.without_weights(directory, OpenVLAOFTOptions()).spec
    assert both.remarks[-1] == f"{assumed}images=['base'], model.options.chunk=8"
    chosen = OpenVLAOFTPolicy.load(
        directory, OpenVLAOFTOptions(chunk=2, images=["base"], head="discrete", proprio=False)
    )
    assert chosen.action_head is None and not chosen.options.proprio
    (line,) = (line for line in chosen.spec.remarks if "not used" in line)
    assert (
        "action_head--5000_checkpoint.pt" in line
        and "proprio_projector--5000_checkpoint.pt" in line
    )
    assert not OpenVLAOFTPolicy.is_described(directory), "its description alone does not tell"
    with pytest.raises(
        UserError,
        match=r"holds a part of an OpenVLA-OFT \(.*--5000_checkpoint\.pt\): set model=openvla_oft",
    ):
        OpenVLAPolicy.load(directory, OpenVLAOptions())


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            {"action_head": "5000", "proprio_projector": "4000"},
            "has parts of step 5000, but proprio_projector only of 4000: keep",
        ),
        (
            {"action_head": "5000", "proprio_projector": "latest"},
            "has parts of step latest, but action_head only of 5000",
        ),
        (
            {"action_head": "5000", "noisy_action_projector": "5000"},
            "noisy_action_projector--5000_checkpoint.pt is a part of another head",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, steps: dict[str, str], words: str
) -> None:
    directory = tmp_path / "mine"
    of_ones_own(directory, steps)
    for name, step in steps.items():
        (directory / f"{name}--{step}_checkpoint.pt").touch()
    with pytest.raises(UserError, match=words) as caught:
        OpenVLAOFTPolicy.load(directory, OpenVLAOFTOptions())
    assert "\n" not in str(caught.value)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    source = small(tmp_path / "small", head="l1")
    published = tmp_path / "published"
    smaller_directory(published)
    source.save(published)
    (published / "action_head.safetensors").unlink()
    torch.save({"fc1": Hostile()}, published / "action_head--latest_checkpoint.pt")
    with pytest.raises(UserError, match="holds code"):
        OpenVLAOFTPolicy.load(published, OpenVLAOFTOptions())
    assert not (tmp_path / "touched").exists()


def test_the_switches_are_stored_in_the_checkpoint(tmp_path: Path) -> None:
    small(tmp_path / "small", options={"chunk": 3, "stop_token": False}).save(
        smaller_directory(tmp_path / "saved")
    )
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["oft"]
    assert stored == {
        "head": "discrete",
        "chunk": 3,
        "proprio": False,
        "film": False,
        "stop_token": False,
    }


def test_an_unknown_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose discrete or l1"):
        small(tmp_path / "small", options={"head": "diffusion"})

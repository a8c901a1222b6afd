"""The gripper's number of an action: a dataset's 0 to 1, and an environment's sign."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.gripper import to_dataset, to_environment
from rlinf_vla.models.options import GRIPPERS
from rlinf_vla.models.pi0.policy import Pi0Options, Pi0Policy
from rlinf_vla.testing.policy_calls import act, noise, observations
from tests.models.test_pi0 import directory


@pytest.mark.parametrize(
    ("gripper", "open_", "closed"), [("open_positive", 1.0, -1.0), ("close_positive", -1.0, 1.0)]
)
def test_above_one_half_opens(gripper: str, open_: float, closed: float) -> None:
    dataset = torch.tensor(
        [[0.3, -0.2, 0.51], [0.3, -0.2, 1.4], [0.3, -0.2, 0.49], [0.3, -0.2, -0.2]]
    )
    expected = torch.tensor([open_, open_, closed, closed])
    found = to_environment(dataset, GRIPPERS[gripper])
    assert torch.equal(found[:, -1], expected) and torch.equal(found[:, :-1], dataset[:, :-1])


@given(st.sampled_from(sorted(GRIPPERS)), st.lists(st.booleans(), min_size=1))
def test_a_dataset_s_numbers_return(gripper: str, opens: list[bool]) -> None:
    dataset = torch.stack([torch.zeros(len(opens)), torch.tensor(opens).float()], dim=1)
    assert torch.equal(
        to_dataset(to_environment(dataset, GRIPPERS[gripper]), GRIPPERS[gripper]), dataset
    )


def flow(path: Path, gripper: str | None) -> Pi0Policy:
    """A π₀ whose dataset has grippers around one half."""
    statistics = json.loads((directory(path) / "norm_stats.json").read_text())
    statistics["norm_stats"]["actions"]["mean"] = [0.1, 0.1, 0.1, 0.5]
    (path / "norm_stats.json").write_text(json.dumps(statistics))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = Pi0Options(
            random_weights=True, denoise_steps=2, prompt_length=32, gripper=gripper
        )
        return Pi0Policy.load(path, options)


def test_signs_are_not_taken_for_numbers_from_0_to_1(tmp_path: Path) -> None:
    """LIBERO's data are ±1 already, and the message of a gripper of the opposite sign names this option."""
    path = directory(tmp_path)
    options = Pi0Options(
        random_weights=True, card="pi0_libero", gripper="open_positive", chunk=4, delta_mask=[]
    )
    with pytest.raises(
        UserError,
        match=r"model\.options\.gripper=open_positive: .* are signs already \(close_positive\), not from 0 to 1",
    ):
        Pi0Policy.load(path, options)
    assert (
        Pi0Policy.load(path, replace(options, gripper="raw")).spec.convention.gripper
        == "close_positive"
    )


@pytest.mark.parametrize(("gripper", "sign"), [("open_positive", 1), ("close_positive", -1)])
def test_a_flow_policy_opens_above_one_half_and_learns_from_signs(
    tmp_path: Path, gripper: str, sign: int
) -> None:
    plain = flow(tmp_path / "plain", None)
    signed = flow(tmp_path / "signed", gripper)
    assert plain.spec.convention.gripper is None and signed.spec.convention.gripper == gripper
    inputs = plain.prepare(observations(plain, 6))
    dataset, acted = (act(policy, inputs, 1.0).actions for policy in (plain, signed))
    assert torch.equal(acted[..., :-1], dataset[..., :-1])
    assert torch.equal(acted[..., -1], sign * torch.where(dataset[..., -1] > 0.5, 1.0, -1.0))
    assert set(acted[..., -1].flatten().tolist()) == {1.0, -1.0}, "both happen"
    demonstrated = dataset.clone()
    demonstrated[..., -1] = (dataset[..., -1] > 0.5).float()
    learnt = ((plain, demonstrated), (signed, to_environment(demonstrated, sign)))
    losses = [
        policy.supervised_loss(inputs, actions, noise(torch.arange(6)))
        for policy, actions in learnt
    ]
    torch.testing.assert_close(*losses)

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.cluster import SPLITS
from rlinf_vla.config.errors import UserError
from rlinf_vla.planner.plan import PLACEMENTS, Plan

PLANS = st.builds(
    Plan,
    st.just("ray"),
    st.sampled_from(PLACEMENTS),
    st.integers(1, 64),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 4096),
    st.booleans(),
    st.sampled_from(SPLITS),
    st.booleans(),
)


@given(PLANS)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.of(json.loads(json.dumps(plan.document()))) == plan


def test_a_plan_as_recipe_keys() -> None:
    plan = Plan("ray", "disaggregated", 4, 1, 2, 3, 2, 64, False, "head", True)
    assert set(plan.overrides()) == {
        "cluster.runtime=ray",
        "cluster.rollout_workers=4",
        "cluster.reward_workers=1",
        "cluster.reference_workers=2",
        "cluster.trainer_ranks=3",
        "cluster.streaming=false",
        "cluster.offload=true",
        "cluster.micro_batch_size=64",
        "rollout.pipeline_depth=2",
        "rollout.split=head",
    }


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"runtime": "slurm"}, "in_process, ray"),
        ({"placement": "anywhere"}, "collocated"),
        ({"split": "body"}, "head"),
        ({"pipeline_depth": 0}, "pipeline_depth=0"),
        ({"rollout_workers": 2.0}, "rollout_workers=2.0"),
        ({"trainer_ranks": True}, "trainer_ranks=True"),
        ({"streaming": 1}, "streaming=1"),
        ({"rollout_workers": 2}, "use runtime=ray"),
    ],
)
def test_a_plan_that_is_none(change: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        replace(Plan(), **change)  # type: ignore[arg-type]


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_another_document_is_refused(document: object) -> None:
    with pytest.raises(UserError):
        Plan.of(document)


@given(st.sampled_from(sorted(Plan().document())), st.none() | st.text() | st.integers(max_value=-1) | st.lists(st.integers()))
def test_a_wrong_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(UserError):
        Plan.of({**Plan().document(), key: value})


def test_a_plan_in_words() -> None:
    assert str(Plan(pipeline_depth=2)) == "in process, 2 environment groups taking turns, micro-batches of 320"
    words = str(Plan("ray", "hybrid", 4, 1, 2, 2, 1, 64, True, "head", True))
    for part in ("hybrid", "4 rollout workers of 1 environment group,", "1 reward worker,", "2 reference workers", "2 trainer ranks"):
        assert part in words
    assert "backbone with the trainer" in words and "off-loaded" in words

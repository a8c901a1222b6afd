from __future__ import annotations

from rlinf_vla.features.planner.plan import Plan


def test_a_plan_as_recipe_keys() -> None:
    plan = Plan("ray", "disaggregated", 4, 1, 2, 3, 2, 64, False, "head", True)
    assert set(plan.overrides()) == {
        "cluster.plan=given",
        "cluster.runtime=ray",
        "cluster.placement=disaggregated",
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


def test_the_description_of_a_plan() -> None:
    assert (
        str(Plan(pipeline_depth=2))
        == "in process, 2 environment groups taking turns, micro-batches of 320"
    )
    words = str(Plan("ray", "hybrid", 4, 1, 2, 2, 1, 64, True, "head", True))
    for part in (
        "hybrid",
        "4 rollout workers of 1 environment group,",
        "1 reward worker,",
        "2 reference workers",
        "2 trainer ranks",
    ):
        assert part in words
    assert "backbone with the trainer" in words and "off-loaded" in words

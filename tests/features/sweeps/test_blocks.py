from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.features.sweeps.blocks import EvalPolicy, eval_policies, split_into_blocks

names = st.lists(
    st.sampled_from(
        ["start", "expert", "random", "a", "a/b", "c/b", "d/checkpoints/b", "/a/b", "./start"]
    ),
    unique=True,
)


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(1, 25),
)
def test_every_episode_is_in_one_block(
    policies: int, tasks: list[int], episodes: int, size: int
) -> None:
    blocks = split_into_blocks(policies, tasks, episodes, size)
    found = [
        (block.policy, block.suite, block.task, seed) for block in blocks for seed in block.seeds
    ]
    wanted = {
        (policy, part, task, seed)
        for policy in range(policies)
        for part, count in enumerate(tasks)
        for task in range(count)
        for seed in EVALUATION_SEEDS[:episodes]
    }
    assert len(found) == len(wanted) and set(found) == wanted
    assert len({block.name for block in blocks}) == len(blocks), "each has a separate file"
    assert all(0 < len(block.seeds) <= size for block in blocks)
    assert [block.suite for block in blocks] == sorted(block.suite for block in blocks), (
        "simulators are started once"
    )


def test_there_are_not_more_episodes_than_seeds() -> None:
    with pytest.raises(UserError, match="episodes="):
        split_into_blocks(1, [1], len(EVALUATION_SEEDS) + 1, 10**6)


@given(names, st.sampled_from([["greedy"], ["sampled", "greedy"]]))
def test_policies_have_unique_names(policies: list[str], modes: list[str]) -> None:
    """One directory in two spellings is refused."""
    places = {
        each if each in ("start", "expert", "random") else str(Path(each).expanduser().resolve())
        for each in policies
    }
    if len(places) < len(policies):
        with pytest.raises(UserError, match="twice"):
            eval_policies(policies, modes)
        return
    found = eval_policies(policies, modes)
    assert len({each.name for each in found}) == len(found)
    assert list(dict.fromkeys(each.source for each in found)) == policies
    assert all((each.mode is None) == (each.source in ("expert", "random")) for each in found)


def test_names_are_as_short_as_possible() -> None:
    assert eval_policies(["start", "expert"], ["sampled", "greedy"]) == [
        EvalPolicy("start sampled", "start", "sampled"),
        EvalPolicy("start greedy", "start", "greedy"),
        EvalPolicy("expert", "expert", None),
    ]
    runs = ["runs/ppo/one/checkpoints/step_000014", "runs/ppo/two/checkpoints/step_000014"]
    assert [each.name for each in eval_policies(runs, ["greedy"])] == [
        "one/step_000014",
        "two/step_000014",
    ]
    assert [each.name for each in eval_policies(runs[:1], ["greedy"])] == ["step_000014"]

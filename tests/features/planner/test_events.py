from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.features.planner.events import Resource, Task, run_events

WORK = st.floats(0.01, 10.0)


def task(resource: str, work: float, *after: int, width: float = 1.0) -> Task:
    return Task("task", "track", resource, work, width, after)


@st.composite
def tasks(draw: st.DrawFn) -> list[Task]:
    found: list[Task] = []
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        found.append(
            task(
                draw(st.sampled_from(["", "a", "b"])),
                draw(WORK),
                *sorted(after),
                width=draw(st.floats(0.5, 3.0)),
            )
        )
    return found


RESOURCES = {"a": Resource(1.0), "b": Resource(2.0)}


def test_a_single_task_takes_the_time_of_its_work() -> None:
    played = run_events([task("a", 3.0), task("", 1.0, 0), task("b", 4.0, 1, width=2.0)], RESOURCES)
    assert played.end == pytest.approx([3.0, 4.0, 6.0]) and played.cause == [-1, 0, 1]


def test_two_tasks_share_one_unit() -> None:
    played = run_events([task("a", 1.0), task("a", 2.0)], RESOURCES)
    assert played.end == pytest.approx([2.0, 3.0]) and played.busy["a"] == pytest.approx(3.0)


def test_cores_are_shared_up_to_what_each_task_can_use() -> None:
    """Two units; one task that can use both and one that can use one: 4/3 and 2/3 of a unit until the first of them has ended."""
    played = run_events([task("b", 4.0, width=2.0), task("b", 1.0)], RESOURCES)
    assert played.end == pytest.approx([2.5, 1.5])


def test_crowding_is_slower() -> None:
    crowded = {"a": Resource(2.0, lambda busy: 1.0 + 0.5 * (busy > 1))}
    assert run_events([task("a", 1.0), task("a", 1.0)], crowded).end == pytest.approx([1.5, 1.5])
    assert run_events([task("a", 1.0), task("a", 1.0, 0)], crowded).end == pytest.approx([1.0, 2.0])


@given(tasks())
def test_nothing_is_lost_and_nothing_is_overbooked(listed: list[Task]) -> None:
    played = run_events(listed, RESOURCES)
    wall = max(played.end)
    for name, resource in RESOURCES.items():
        assert played.busy[name] <= resource.capacity * wall + 1e-6
        work = sum(each.work for each in listed if each.resource == name)
        assert played.busy[name] == pytest.approx(work, abs=1e-6), "no unit is slower than another"
    for number, each in enumerate(listed):
        assert played.start[number] == pytest.approx(
            max((played.end[earlier] for earlier in each.after), default=0.0)
        )
        assert (
            played.end[number] - played.start[number]
            >= each.work / (each.width if each.resource else 1.0) - 1e-6
        )


def least(listed: list[Task]) -> float:
    """The longest chain without shared resources."""
    end: list[float] = []
    for each in listed:
        alone = each.work / (
            min(each.width, RESOURCES[each.resource].capacity) if each.resource else 1.0
        )
        end.append(max((end[earlier] for earlier in each.after), default=0.0) + alone)
    return max(end)


@given(tasks())
def test_no_faster_than_the_longest_chain_and_no_slower_than_one_after_the_other(
    listed: list[Task],
) -> None:
    wall = max(run_events(listed, RESOURCES).end)
    serial = sum(
        each.work / (min(each.width, RESOURCES[each.resource].capacity) if each.resource else 1.0)
        for each in listed
    )
    assert least(listed) - 1e-6 <= wall <= serial + 1e-6


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), WORK), min_size=1, max_size=8),
    st.floats(1.0, 4.0),
    st.data(),
)
def test_a_chain_is_never_slower_for_less_work_or_faster_resources(
    parts: list[tuple[str, float]], factor: float, data: st.DataObject
) -> None:
    chain = [
        task(name, work, *([number - 1] if number else []))
        for number, (name, work) in enumerate(parts)
    ]
    wall = max(run_events(chain, RESOURCES).end)
    index = data.draw(st.integers(0, len(chain) - 1))
    lighter = [
        each._replace(work=each.work / factor) if number == index else each
        for number, each in enumerate(chain)
    ]
    assert max(run_events(lighter, RESOURCES).end) <= wall + 1e-9
    faster = [
        each._replace(work=each.work / factor) if each.resource == "a" else each for each in chain
    ]
    assert max(run_events(faster, RESOURCES).end) <= wall + 1e-9

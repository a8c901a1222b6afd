from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise
from rlinf_vla.core.types import MAX_ATTEMPTS, MAX_TASKS, Episodes
from rlinf_vla.rollout.actor import noise_task
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.rollout.noise import CounterNoise, imitation_noise, philox

word = st.integers(0, 2**32 - 1)


def tensors(words: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (torch.tensor([each]) for each in words)
    return a, b, c, d


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    # Random123's known-answer file, philox4x32-10.
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(
    counter: list[int], key: tuple[int, int], expected: list[int]
) -> None:
    assert [int(w) for w in philox(tensors(counter), key)] == expected


@given(st.lists(word, min_size=4, max_size=4), st.tuples(word, word))
def test_philox_against_big_integers(counter: list[int], key: tuple[int, int]) -> None:
    """The rounds of the paper, in integers without overflow."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    assert [int(w) for w in philox(tensors(counter), key)] == [c0, c1, c2, c3]


def noise(
    run_seed: int = 7, task: int = 0, seeds: Tensor | None = None, step: int = 0, stream: int = 0
) -> CounterNoise:
    seeds = torch.arange(5) if seeds is None else seeds
    return CounterNoise(
        run_seed, torch.full_like(seeds, task), seeds, torch.full_like(seeds, step), stream
    )


def test_noise_follows_the_protocol() -> None:
    assert isinstance(noise(), Noise)
    assert noise().uniform(3, 2).shape == (5, 3, 2) and noise().normal(4).shape == (5, 4)
    assert noise().uniform(3).dtype == noise().normal(3).dtype == torch.float32


@given(
    st.lists(st.tuples(st.integers(0, 5), word, st.integers(0, 300)), min_size=1, max_size=9),
    st.integers(0, 2**64 - 1),
    st.integers(1, 11),
    st.data(),
)
def test_a_row_depends_only_on_its_own_episode_and_step(
    rows: list[tuple[int, int, int]], run_seed: int, count: int, data: st.DataObject
) -> None:
    """For any order and size of the batch."""
    task, seed, step = (torch.tensor(each) for each in zip(*rows, strict=True))

    def draw(index: Tensor) -> tuple[Tensor, Tensor]:
        source = CounterNoise(run_seed, task[index], seed[index], step[index])
        return source.uniform(count, 2), source.normal(count)

    whole = draw(torch.arange(len(rows)))
    index = torch.tensor(
        data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=12))
    )
    for part, all_rows in zip(draw(index), whole, strict=True):
        assert torch.equal(part, all_rows[index])


def test_everything_in_the_key_matters() -> None:
    base = noise().uniform(8)
    others = [
        noise(run_seed=8),
        noise(run_seed=7 + 2**32),
        noise(task=1),
        noise(step=1),
        noise(stream=1),
    ]
    draws = [
        base,
        *(each.uniform(8) for each in others),
        noise(seeds=torch.arange(5) + 5).uniform(8),
    ]
    assert len(torch.cat(draws).unique()) == len(draws) * 5 * 8


def test_no_two_episodes_or_steps_share_their_noise() -> None:
    bits = torch.tensor([0, *(1 << i for i in range(32))])
    zero = torch.zeros_like(bits)
    tasks = torch.arange(1, 100)
    steps = torch.arange(1, 1000)
    counters = [(zero, bits, zero), (tasks, tasks * 0, tasks * 0), (steps * 0, steps * 0, steps)]
    draws = torch.cat([CounterNoise(7, *each).uniform(4) for each in counters])
    assert len(draws.unique(dim=0)) == len(draws)


def test_attempts_share_no_noise_in_episodes_of_any_length() -> None:
    steps = torch.tensor([0, 1, 1 << 16, 1 << 17, (1 << 32) - 1])
    rows = [
        (task, attempt, step)
        for task in (0, 1, MAX_TASKS - 1)
        for attempt in (0, 1, 2, MAX_ATTEMPTS - 1)
        for step in steps.tolist()
    ]
    task, attempt, step = (torch.tensor(each) for each in zip(*rows, strict=True))
    seed = torch.full_like(step, 5)
    draws = CounterNoise(7, noise_task(Episodes(task, seed, attempt)), seed, step).uniform(4)
    assert len(draws.unique(dim=0)) == len(rows)
    with pytest.raises(ValueError, match="at most 65536"):
        Episodes.first_attempts(task, seed).repeat(MAX_ATTEMPTS + 1)
    with pytest.raises(UserError, match="65537 tasks: at most 65536"):
        numbered_episodes(range(10), 0, 3, MAX_TASKS + 1)


@given(st.lists(st.integers(0, 2**62), min_size=2, max_size=50, unique=True))
def test_every_draw_of_an_imitation_loss_has_separate_numbers(draws: list[int]) -> None:
    """Their numbers pass 2**32 after 128 iterations of 32 demonstrations per minibatch."""
    found = imitation_noise(7, torch.tensor([*draws, draws[0] ^ (1 << 40)])).uniform(4)
    assert len(found.unique(dim=0)) == len({*draws, draws[0] ^ (1 << 40)})


def test_consecutive_draws_differ_and_repeat() -> None:
    source = noise()
    first, second, third = source.uniform(6), source.uniform(6), source.normal(6)
    assert len(torch.cat([first, second]).unique()) == 2 * 5 * 6
    again = noise()
    assert (
        torch.equal(again.uniform(6), first)
        and torch.equal(again.uniform(6), second)
        and torch.equal(again.normal(6), third)
    )


def test_streams_do_not_overlap() -> None:
    """A long draw of one stream does not run into the next stream."""
    long = noise(seeds=torch.tensor([3])).uniform(40_000)
    other = noise(seeds=torch.tensor([3]), stream=1).uniform(64)
    assert not (long[:, :, None] == other[:, None, :]).all(1).any()
    windows = long[0].unfold(0, 8, 1)
    assert not (windows == other[0, :8]).all(1).any()


def test_uniform_moments_and_ends() -> None:
    draws = noise(seeds=torch.arange(200)).uniform(1000).double().flatten()
    assert draws.min() > 0 and draws.max() < 1
    n = len(draws)
    for power in (1, 2, 3):
        mean = 1 / (power + 1)
        variance = 1 / (2 * power + 1) - 1 / (power + 1) ** 2
        assert abs(float((draws**power).mean()) - mean) < 4.5 * math.sqrt(variance / n)
    counts = torch.histc(draws, bins=64, min=0, max=1)
    assert float(((counts - n / 64) ** 2 / (n / 64)).sum()) < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("extreme", [0, 2**32 - 1])
def test_uniform_never_reaches_its_ends(extreme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """log(-log u) must be finite for every output of the generator."""
    monkeypatch.setattr(CounterNoise, "words", lambda self, count: torch.full((5, count), extreme))
    u = noise().uniform(2)
    assert (
        ((u > 0) & (u < 1)).all()
        and torch.log(-torch.log(u)).isfinite().all()
        and noise().normal(2).isfinite().all()
    )


def test_normal_moments() -> None:
    draws = noise(seeds=torch.arange(200)).normal(1000).double().flatten()
    n = len(draws)
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((draws**power).mean()) - mean) < 4.5 * math.sqrt(variance / n)
    first, second = noise(seeds=torch.arange(2000)).normal(2).double().unbind(1)
    assert abs(float((first * second).mean())) < 4.5 / math.sqrt(2000)


def test_neighbouring_episodes_and_steps_are_uncorrelated() -> None:
    seeds = torch.arange(20_000)
    here = noise(seeds=seeds).normal(1)[:, 0].double()
    for other in (
        noise(seeds=seeds + 1),
        noise(seeds=seeds, step=1),
        noise(seeds=seeds, stream=1),
        noise(seeds=seeds, task=1),
    ):
        assert abs(float((here * other.normal(1)[:, 0].double()).mean())) < 4.5 / math.sqrt(
            len(seeds)
        )

"""SAC's updates in its flow: frequency of actor updates, and share of demonstrations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.core.transitions import Transitions
from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.off_policy import OffPolicyFlow
from rlinf_vla.training.trainer import Trainer
from tests.rollout.walk import Walk, tabular
from tests.runtime.here import off_policy_flow, replays_of, trainer_of

CONFIG = SACConfig(critics=2, hidden=8, shift=0, batch_size=8)


def flow(
    directory: Path, config: SACConfig = CONFIG, iteration: int = 0, run_seed: int = 0
) -> OffPolicyFlow:
    """With two episodes of four calls in the replay."""
    policy = tabular(3, 2, config)
    settings = Settings(run_seed, 1.0, 2)
    found = off_policy_flow(
        policy,
        [Walk([1.0, 2.0, 3.0], 8)],
        Trainer(policy, SAC(config), 64),
        settings,
        SAC(config),
        directory,
        {},
    )
    found.begin(iteration)
    seeds = torch.arange(2)
    found.collect_transitions(Episodes.first_attempts(torch.zeros_like(seeds), seeds))
    return found


@pytest.mark.parametrize(
    ("every", "updates", "of_the_actor"), [(1, 5, 5), (2, 5, 3), (3, 7, 3), (4, 4, 1)]
)
def test_the_actor_learns_in_the_first_of_every_actor_every_updates(
    tmp_path: Path, every: int, updates: int, of_the_actor: int
) -> None:
    subject = flow(tmp_path, replace(CONFIG, actor_every=every))
    subject.update_from_replay(updates, SAC(replace(CONFIG, actor_every=every)))
    state = trainer_of(subject).state()
    assert state["actor.0.weight.step"] == state["log_alpha.step"] == of_the_actor
    assert {
        value.item()
        for name, value in state.items()
        if name.startswith("value_head.") and name.endswith(".step")
    } == {updates}
    assert subject.metrics["actor/updates"] == updates


class Watched(SAC):
    """An algorithm that only records its batches."""

    def __init__(self, config: SACConfig) -> None:
        super().__init__(config)
        self.batches: list[Transitions] = []
        self.shown: list[Transitions | None] = []
        self.draws: list[float] = []

    def step(
        self,
        trainer: Any,
        batch: Transitions,
        generator: torch.Generator,
        iteration: int,
        index: int,
        shown: Any,
    ) -> dict[str, float]:
        with_actor = index % self.config.actor_every == 0
        self.batches.append(batch)
        self.shown.append(shown() if self.config.sft_coef and with_actor else None)
        self.draws.append(torch.rand(1, generator=generator).item())
        return {"loss": float(len(self.batches))} | (
            {"actor": 10.0 * len(self.batches)} if with_actor else {}
        )


def watched(subject: OffPolicyFlow, updates: int, config: SACConfig = CONFIG) -> Watched:
    found = Watched(config)
    subject.trainers.worker.algorithm = found
    subject.update_from_replay(updates, found)
    return found


def test_metrics_are_means_over_the_updates_that_have_them(tmp_path: Path) -> None:
    subject = flow(tmp_path)
    watched(subject, 5)
    assert subject.metrics["loss"] == pytest.approx(3) and subject.metrics[
        "actor"
    ] == pytest.approx(30)
    assert subject.metrics["replay/size"] == 8, (
        "the final observations of truncated episodes are no transitions"
    )


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_every_batch_has_its_share_of_demonstrations(tmp_path: Path, share: float) -> None:
    config = replace(CONFIG, demonstration_share=share, demonstrations=1, sft_coef=0.1)
    subject = flow(tmp_path, config)
    records = replays_of(subject)[0].sample(5, torch.Generator().manual_seed(0)).now
    subject.demonstrations.append(records | {"reward": torch.full((5,), 50.0)})
    found = watched(subject, 4, config)
    for batch in found.batches:
        assert (
            int((batch.now["reward"] == 50).sum()) == round(share * 8)
            and len(batch.now["reward"]) == 8
        )
    assert [each is not None for each in found.shown] == [True, False] * 2, (
        "demonstrations for imitation come with the actor's updates"
    )
    assert all(bool((each.now["reward"] == 50).all()) for each in found.shown if each is not None)


def test_every_update_draws_another_batch_and_a_resumed_run_the_same_ones(tmp_path: Path) -> None:
    def draws(iteration: int, run_seed: int = 0) -> list[float]:
        return watched(
            flow(tmp_path / f"{iteration}-{run_seed}", iteration=iteration, run_seed=run_seed), 6
        ).draws

    first = draws(0)
    again = draws(0)
    later = draws(1)
    other = draws(0, run_seed=1)
    assert first == again and len({*first, *later, *other}) == 18

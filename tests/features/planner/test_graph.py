from __future__ import annotations

from typing import Any

import pytest

from rlinf_vla.algorithms.cal_ql import CalQL, CalQLConfig
from rlinf_vla.algorithms.classifier import ClassifierConfig, ClassifierTraining
from rlinf_vla.algorithms.dagger import DAgger, DAggerConfig
from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig
from rlinf_vla.algorithms.on_policy import OnPolicyConfig
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.algorithms.sft import SFT, SFTConfig
from rlinf_vla.core.types import gather
from rlinf_vla.features.planner.graph import Edge, Graph, trace
from tests.algorithms.variants import VARIANTS


def edges(graph: Graph) -> dict[tuple[str, str], str]:
    return {(edge.source, edge.target): edge.kind for edge in graph.edges}


def test_ppo_waits_for_all_rollouts_before_its_update() -> None:
    graph = trace(PPO(PPOConfig(), 1.0))
    assert [(each.name, each.role) for each in graph.operations] == [
        ("collect", "rollout"),
        ("score", "reward"),
        ("update", "trainer"),
        ("publish", "trainer"),
    ]
    assert edges(graph) == {
        ("collect", "score"): "stream",
        ("score", "update"): "barrier",
        ("update", "publish"): "barrier",
        ("publish", "collect"): "barrier",
    }
    assert not graph.streams_into("update") and graph.streams_into("score")


def test_the_reference_policy_is_in_the_graph_if_it_is_used() -> None:
    graph = trace(PPO(PPOConfig(kl_coef=0.1), 1.0))
    assert "reference" in graph and "reference" not in trace(PPO(PPOConfig(), 1.0))
    assert (
        edges(graph)["score", "reference"] == "stream"
        and edges(graph)["reference", "update"] == "barrier"
    )


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_new_weights_reach_the_rollouts_that_staleness_allows(staleness: int) -> None:
    graph = trace(PPO(PPOConfig(staleness=staleness, decoupled=True), 1.0))
    assert Edge("publish", "collect", "barrier", staleness + 1) in graph.edges


@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_variants_of_grpo(name: str) -> None:
    graph = trace(GRPO(VARIANTS[name], 1.0))
    assert edges(graph)["collect_groups", "score"] == "stream"
    assert not graph.streams_into("update")
    assert ("reference" in graph) == (VARIANTS[name].kl_coef > 0)


def test_grpo_with_groups_per_step_updates_during_rollouts() -> None:
    graph = trace(GRPO(GRPOConfig(groups_per_step=2), 1.0))
    assert edges(graph)["score", "update"] == "stream" and graph.streams_into("update")
    assert not trace(GRPO(GRPOConfig(), 1.0)).streams_into("update")


def test_streaming_is_observed_and_not_declared() -> None:
    """One algorithm reads its shards one by one, and another after it has all of them."""

    class OneByOne(PPO):
        def iteration(self, flow: Any) -> None:
            for shard in flow.score(flow.collect(4)):
                flow.update(self.advantages(shard)[0], self)

    class AllAtOnce(PPO):
        def iteration(self, flow: Any) -> None:
            for shard in [gather(flow.score(flow.collect(4)))]:
                flow.update(self.advantages(shard)[0], self)

    assert trace(OneByOne(PPOConfig(), 1.0)).streams_into("update")
    assert not trace(AllAtOnce(PPOConfig(), 1.0)).streams_into("update")


def test_sac() -> None:
    graph = trace(SAC(SACConfig(demonstrations=2), 1.0))
    assert edges(graph) == {
        ("demonstrate", "update_from_replay"): "barrier",
        ("collect_transitions", "update_from_replay"): "barrier",
        ("update_from_replay", "publish"): "barrier",
        ("publish", "collect_transitions"): "barrier",
    }
    assert [each.name for each in graph.operations if each.once] == ["demonstrate"]


def test_cal_ql_has_the_graph_of_its_online_iterations() -> None:
    graph = trace(CalQL(CalQLConfig(demonstrations=2, offline_iterations=3), 1.0))
    assert edges(graph) == edges(trace(SAC(SACConfig(demonstrations=2), 1.0)))


def test_dagger() -> None:
    assert edges(trace(DAgger(DAggerConfig(), 1.0))) == {
        ("visit", "update_from_replay"): "barrier",
        ("update_from_replay", "publish"): "barrier",
        ("publish", "visit"): "barrier",
    }


@pytest.mark.parametrize(
    ("algorithm", "pair"),
    [
        (SFT(SFTConfig(), 10), ("demonstrate", "fit")),
        (ClassifierTraining(ClassifierConfig(), 10), ("label", "fit")),
    ],
)
def test_the_graph_shows_the_inputs_of_each_operation(
    algorithm: Any, pair: tuple[str, str]
) -> None:
    assert edges(trace(algorithm)) == {pair: "barrier"}


def test_a_graph_is_read_line_by_line() -> None:
    lines = (
        trace(PPO(PPOConfig(kl_coef=0.1, staleness=1, decoupled=True), 1.0)).render().splitlines()
    )
    assert lines[0].startswith("macro flow of ppo")
    assert lines[1].split() == ["collect", "rollout", "~>", "score"]
    assert lines[3].split() == ["reference", "reference", "=>", "update"]
    assert lines[5].endswith("=> collect 2 iterations later")


def test_tracing_does_not_change_the_algorithm() -> None:
    algorithm = PPO(PPOConfig(), 1.0)
    trace(algorithm)
    assert isinstance(algorithm.config, OnPolicyConfig) and trace(algorithm) == trace(algorithm)

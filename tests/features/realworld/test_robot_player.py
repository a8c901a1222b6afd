from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vla.benchmarks.synthetic_cell import REST
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.robot import BY_SCRIPT
from rlinf_vla.core.protocols import Convention
from rlinf_vla.core.transitions import ACTED, ACTION, DISCOUNT, REWARD
from rlinf_vla.core.types import Observation, StepResult, Tensors
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.episode import (
    DEMONSTRATION,
    EVALUATION,
    TRAINING,
    Job,
    RobotEpisode,
    episode_inputs,
)
from rlinf_vla.features.realworld.operator_session import CONSENT_S, CONSENTS, OperatorLeft
from rlinf_vla.features.realworld.records import RecordForm, operator_records, to_records
from rlinf_vla.features.realworld.robot import (
    ACKNOWLEDGE,
    FAILURE,
    PAUSE,
    QUIT,
    RESUME,
    SUCCESS,
    CameraError,
    Intervention,
    RobotError,
    Target,
    Vector,
)
from rlinf_vla.robots.operators.device_reader import DeviceReader, Event
from tests.features.realworld.control import MS
from tests.features.realworld.toy_cell import NEAR_M, Toy

TRAIN = Job(TRAINING, 3, seed=7)
SHOW = Job(DEMONSTRATION, 0, seed=8, scripted=True)
GAMMA = 0.9
FORM = RecordForm(1, ArmConvention(Convention()), False, GAMMA)


class Silent:
    name = "silent"

    def events(self) -> Iterator[Event]:
        yield from ()

    def close(self) -> None: ...


def towards(toy: Toy) -> None:
    toy.acts = lambda position, goal: [*np.clip((goal - position) / 0.05, -1, 1).tolist(), 1.0]


def played(toy: Toy, job: Job = TRAIN) -> RobotEpisode:
    toy.player.play(job, toy.keep, weights=2)
    return toy.episodes[-1]


def inputs_of(episode: RobotEpisode) -> Tensors:
    return episode_inputs(episode, lambda seen: {"state": seen.state, **seen.images})


def test_success_ends_an_episode_with_a_reward_of_one() -> None:
    toy = Toy()
    towards(toy)
    episode = played(toy)
    assert (
        episode.success
        and episode.terminated
        and episode.ended == "success"
        and not episode.human.any()
    )
    assert (
        toy.scene.laid_out == [7]
        and episode.weights == 2
        and episode.instruction == "touch the point"
    )
    away = np.linalg.norm(episode.state[:, :3].numpy() - toy.scene.goal, axis=1)
    assert away[-1] < NEAR_M <= away[-2]
    assert episode.reward.tolist() == [0.0] * (len(episode) - 1) + [1.0]
    records = to_records(episode, inputs_of(episode), FORM, 0, len(episode)).records
    assert len(records[REWARD]) == len(episode) and records[DISCOUNT].tolist()[-1] == 0
    assert records[ACTED].all() and records[ACTION].shape == (len(episode), 1, 4)
    assert (records["state"] == episode.state[:-1]).all()


def test_actions_lead_from_one_observation_to_the_next() -> None:
    toy = Toy()
    episode = played(toy, Job(TRAINING, 0, 1))
    moved = episode.state[1:, :3] - episode.state[:-1, :3]
    torch.testing.assert_close(moved, 0.05 * episode.action[:, :3])
    assert not episode.terminated and episode.ended == "time is up" and len(episode) == 20
    records = to_records(episode, inputs_of(episode), FORM, 0, len(episode)).records
    assert records[ACTED].tolist() == [True] * 20 + [False] and len(records["state"]) == 21
    torch.testing.assert_close(records[DISCOUNT], torch.tensor([GAMMA] * 20 + [0.0]))


def test_time_in_which_the_arm_was_held_is_discounted() -> None:
    toy = Toy()
    slow = iter([20.0] * 3 + [230.0] + [20.0] * 30)
    toy.delay = lambda request: next(slow) / 1024
    episode = played(toy)
    waited = torch.diff(episode.tick)
    assert waited.max() == 3 and episode.tick[-1] == 20 and len(episode) == 18
    records = to_records(episode, inputs_of(episode), FORM, 0, len(episode)).records
    torch.testing.assert_close(records[DISCOUNT][:-1], GAMMA ** waited.float())


def test_a_scripted_operator_demonstrates() -> None:
    toy = Toy()
    episode = played(toy, SHOW)
    assert episode.success and episode.human.all()
    (shown,) = operator_records(episode, inputs_of(episode), FORM)
    whole = to_records(episode, inputs_of(episode), FORM, 0, len(episode))
    assert shown.success and all(
        (shown.records[name] == value).all() for name, value in whole.records.items()
    )


def test_the_policy_never_acts_in_a_demonstration() -> None:
    toy = Toy()
    toy.scene.has_expert = False
    episode = played(toy, SHOW)
    assert episode.human.all() and (episode.state == episode.state[0]).all() and len(episode) == 20


def test_an_object_that_the_operator_holds_stays_held() -> None:
    toy = Toy()
    hands = DeviceReader(Silent(), 4)
    toy.operator.acts = hands.action
    toy.clock.at(0.65, lambda: hands.hear(Event(toggles=True)))
    toy.clock.at(1.25, lambda: hands.hear(Event(motion=(1.0,) * 6)))
    toy.clock.at(1.55, lambda: hands.hear(Event(motion=(0.0,) * 6)))
    episode = played(toy, Job(DEMONSTRATION, 0, 8))
    moved = episode.action[:, 0]
    gripper = episode.action[:, -1]
    closed = int((gripper < 0).int().argmax())
    assert (
        2 <= closed <= 5
        and (gripper[:closed] == 1).all()
        and (gripper[closed:] == -1).all()
        and moved.sum() in (2, 3, 4)
    )


def test_an_operator_who_takes_over_holds_what_the_policy_holds() -> None:
    """Until the operator moves the hand; the operator's button counts only in an episode."""
    toy = Toy()
    hands = DeviceReader(Silent(), 4)
    toy.acts = lambda position, goal: [0.0, 0.0, 0.0, -0.5]
    toy.operator.acts = hands.action
    toy.clock.at(0.1, lambda: hands.hear(Event(toggles=True)))
    toy.clock.at(1.0, lambda: hands.hear(Event(motion=(0.0, 1.0) + (0.0,) * 4)))
    toy.clock.at(1.45, lambda: hands.hear(Event(toggles=True)))
    episode = played(toy)
    hand = episode.action[episode.human][:, -1].tolist()
    assert (
        episode.human.any()
        and not episode.human[0]
        and (episode.action[~episode.human][:, -1] == -0.5).all()
    )
    assert sorted(set(hand)) == [-0.5, 1.0] and hand == sorted(hand), (
        "unchanged, and open from then on"
    )


def test_the_operator_has_priority_over_the_script() -> None:
    toy = Toy()
    by_hand = np.array([0.0, 1.0, 0.0, 1.0], np.float32)
    toy.operator.acts = lambda hand: by_hand if len(toy.robot.commands) < 3 else None
    episode = played(toy, SHOW)
    assert (
        (episode.action[:3] == torch.from_numpy(by_hand)).all()
        and episode.success
        and episode.human.all()
    )


def test_steps_of_the_operator_are_flagged_and_extracted() -> None:
    toy = Toy()
    by_hand = np.array([0.0, 1.0, 0.0, 1.0], np.float32)
    toy.operator.acts = lambda hand: by_hand if len(toy.robot.commands) in (3, 4, 5, 9) else None
    episode = played(toy)
    assert torch.nonzero(episode.human)[:, 0].tolist() == [3, 4, 5, 9]
    assert (episode.action[episode.human] == torch.from_numpy(by_hand)).all()
    first, second = operator_records(episode, inputs_of(episode), FORM)
    assert first.records[ACTED].tolist() == [True, True, True, False] and second.records[
        ACTED
    ].tolist() == [True, False]
    assert (first.records["state"] == episode.state[3:7]).all() and not first.success


def test_the_scripted_operator_takes_over_after_its_patience() -> None:
    toy = Toy(limit=40, patience_s=1.0)
    episode = played(toy)
    first = int(episode.human.int().argmax())
    assert episode.success and 9 <= first <= 11 and episode.human[first:].all()
    assert not played(toy, Job(EVALUATION, 0, 7, temperature=0.0)).human.any(), (
        "only the policy acts in an evaluation"
    )


def test_an_evaluation_with_a_takeover_has_failed() -> None:
    toy = Toy()
    toy.operator.acts = lambda hand: (
        np.zeros(4, np.float32) if len(toy.robot.commands) == 5 else None
    )
    episode = played(toy, Job(EVALUATION, 0, 7))
    assert not episode.success and episode.ended == "Ada took over" and len(episode) == 5


@pytest.mark.parametrize(("word", "success"), [(SUCCESS, True), (FAILURE, False)])
def test_the_operator_judges_success(word: str, success: bool) -> None:
    toy = Toy()
    toy.scene.can_tell = False
    toy.operator.plan = {900: word}
    episode = played(toy)
    assert (episode.success, episode.terminated, episode.ended) == (success, True, word)
    assert episode.reward[-1] == float(success) and len(episode) < 10


def test_a_classifier_judges_success_without_a_predicate() -> None:
    def sees(before: Observation, action: torch.Tensor, result: StepResult) -> StepResult:
        assert before.instruction == ["touch the point"] and action.shape == (1, 1, 4)
        there = result.observation.state[:, :1] > REST.position[0] + 0.22
        return replace(result, reward=there.float(), terminated=result.terminated | there)

    toy = Toy(score=sees)
    toy.scene.can_tell = False
    for job in (TRAIN, Job(EVALUATION, 0, 7)):
        episode = played(toy, job)
        assert (
            episode.success and episode.terminated and len(episode) == 5 and episode.reward[-1] == 1
        )
    toy.scene.can_tell = True
    assert not played(toy, Job(EVALUATION, 1, 7)).success, (
        "the scene's predicate counts in an evaluation"
    )


@pytest.mark.parametrize(("word", "worth"), [(SUCCESS, 1.0), (FAILURE, 0.0)])
def test_the_operator_overrides_a_classifier(word: str, worth: float) -> None:
    toy = Toy(
        score=lambda before, action, result: replace(result, reward=torch.full((1, 1), 1 - worth))
    )
    toy.scene.can_tell = False
    toy.operator.plan = {900: word}
    for job in (TRAIN, Job(DEMONSTRATION, 0, 7)):
        episode = played(toy, job)
        assert episode.terminated and episode.success == bool(worth) and episode.reward[-1] == worth
        toy.operator.plan = {toy.clock.now() / MS + 900: word}


def test_a_reward_is_told_of_truncation() -> None:
    told: list[bool] = []

    def reward(before: Observation, action: torch.Tensor, result: StepResult) -> StepResult:
        told.append(bool(result.truncated))
        return result

    episode = played(Toy(score=reward))
    assert told == [False] * (len(episode) - 1) + [True] and not episode.terminated


def test_a_pause_at_the_moment_of_success_counts() -> None:
    toy = Toy()
    toy.scene.can_tell = False
    toy.operator.plan = {900: SUCCESS, 900.5: PAUSE, 30_000: RESUME}
    episode = played(toy)
    assert episode.success and episode.ended == "success" and toy.clock.now() > 29
    toy.operator.plan = {toy.clock.now() / MS + 900: SUCCESS, toy.clock.now() / MS + 900.5: QUIT}
    assert played(toy).success
    with pytest.raises(OperatorLeft, match="Ada said quit"):
        toy.player.rest()


@pytest.mark.parametrize(
    ("word", "why"),
    [(PAUSE, "paused by Ada"), (QUIT, "Ada said quit"), (None, "the session is over")],
)
def test_a_pause_or_an_end_of_the_session_stops_the_arm_on_its_way_home(
    word: str | None, why: str
) -> None:
    toy = Toy()
    homed: list[float] = []

    def home(timeout_s: float, objection: Callable[[], str | None]) -> None:
        while toy.clock.now() < 5:
            toy.clock.sleep_until(toy.clock.now() + 0.01)
            homed[:] = [toy.clock.now()]
            if (said := objection()) is not None:
                toy.robot.stop(said)
                raise RobotError(said)

    toy.robot.home = home  # type: ignore[method-assign]
    toy.operator.plan = {1_000: word, 20_000: ACKNOWLEDGE} if word else {}
    if word is None:
        toy.clock.at(1.0, lambda: toy.player.leave(why))
    if word == PAUSE:
        assert (
            len(played(toy)) == 20
            and toy.robot.commands[0][0] > 20_000 * MS
            and {"waiting": why, "for": ACKNOWLEDGE} in toy.told
        )
    else:
        with pytest.raises(OperatorLeft, match=why):
            played(toy)
        assert toy.robot.state.fault is None and not toy.robot.commands, (
            "a regular end latches nothing"
        )
    assert 0.9 < homed[0] < 1.1


def test_a_waiting_player_sends_heartbeats() -> None:
    toy = Toy()
    for _ in range(30):
        toy.clock.sleep_until(toy.clock.now() + 0.1)
        toy.player.rest()
    assert toy.said == [{}] * 2


def test_a_slow_clock_is_reported_once_a_minute() -> None:
    toy = Toy(limit=900)
    toy.robot.state = replace(toy.robot.state, pace=0.43)
    played(toy)
    told = [message["slow"] for message in toy.told if "slow" in message]
    assert set(told) == {"the arm's clock runs at 0.43 of real time"} and len(told) == 1 + int(
        toy.clock.now() // 60
    )
    toy.robot.state = replace(toy.robot.state, pace=0.91)
    before = len(toy.told)
    played(toy)
    assert not any("slow" in message for message in toy.told[before:])


def test_a_pause_truncates_and_waits() -> None:
    toy = Toy()
    toy.operator.plan = {900: PAUSE, 30_000: RESUME}
    episode = played(toy)
    assert episode.ended == PAUSE and not episode.terminated and 0 < len(episode) < 10
    assert (
        toy.clock.now() > 29 and [*toy.told[0]] == ["waiting", "for"] and "going_on" in toy.told[-1]
    )
    toy.operator.plan = {30_900: PAUSE, 40_000: RESUME}
    assert played(toy, Job(EVALUATION, 0, 7)).ended == "time is up", "an evaluation is repeated"


def test_a_word_before_it_is_awaited_does_not_count() -> None:
    toy = Toy()
    toy.scene.by_hand = True
    toy.scene.can_tell = False
    toy.operator.plan = {0: RESUME, 10_000: RESUME, 10_001: SUCCESS}
    episode = played(toy)
    assert episode.ended == "time is up" and len(episode) == 20 and not episode.success, (
        "it was sent while the arm went home"
    )
    assert toy.robot.commands[0][0] > 10_000 * MS


def test_an_acknowledgement_is_for_one_fault() -> None:
    toy = Toy()
    toy.robot.stop("reflex")

    def home(timeout_s: float, objection: object) -> None:
        toy.clock.sleep_until(toy.clock.now() + 3)
        if toy.clock.now() < 10:
            toy.robot.stop("another reflex")
            raise RobotError("another reflex")

    toy.robot.home = home  # type: ignore[method-assign]
    toy.operator.plan = {5_000: ACKNOWLEDGE, 6_000: ACKNOWLEDGE, 20_000: ACKNOWLEDGE}
    assert played(toy).ended == "time is up" and toy.robot.commands[0][0] > 20_000 * MS, (
        "the second was for the first fault, too"
    )


@pytest.mark.parametrize("early", [0, 308])
def test_a_pause_counts_at_any_time(early: int) -> None:
    toy = Toy()
    toy.operator.plan = {early: PAUSE, 10_000: RESUME}
    assert (
        len(played(toy)) == 20
        and len(toy.episodes) == 1
        and toy.robot.commands[-20][0] > 10_000 * MS
    )
    toy.operator.plan = {0: PAUSE}
    toy.clock.at(toy.clock.now() + 5, lambda: toy.operator.plan.update({0: RESUME}))
    before = toy.clock.now()
    toy.player.rest()
    assert toy.clock.now() >= before + 5


def test_an_early_quit_ends_before_the_arm_moves() -> None:
    for call in (lambda toy: toy.player.play(TRAIN, toy.keep), lambda toy: toy.player.rest()):
        toy = Toy()
        toy.operator.plan = {0: QUIT}
        with pytest.raises(OperatorLeft, match="Ada said quit"):
            call(toy)
        assert not toy.robot.commands and not toy.scene.laid_out


@pytest.mark.parametrize("kind", [TRAINING, DEMONSTRATION])
def test_an_episode_without_an_action_is_repeated(kind: str) -> None:
    toy = Toy(limit=1)
    toy.operator.acts = lambda hand: None if toy.clock.now() < 10 else np.zeros(4, np.float32)
    toy.delay = lambda request: 1.0
    if kind == DEMONSTRATION:  # here only lateness leaves a step without an action
        still = np.zeros(4, np.float32)
        toy.scene.expert = lambda state: (
            toy.clock.sleep_until(toy.clock.now() + 0.3 * (toy.clock.now() < 10)) or still
        )  # type: ignore[method-assign, func-returns-value]
    toy.operator.plan = {20_000: ACKNOWLEDGE}
    assert (
        len(played(toy, Job(kind, 0, 7, scripted=kind == DEMONSTRATION))) == 1
        and len(toy.episodes) == 1
    )
    assert {
        "waiting": "no action was executed in the episode: time is up",
        "for": ACKNOWLEDGE,
    } in toy.told


def test_immediate_success_still_takes_an_action() -> None:
    toy = Toy()
    toy.scene.succeeded = lambda state: True  # type: ignore[method-assign]
    for job in (TRAIN, SHOW, Job(EVALUATION, 0, 7)):
        episode = played(toy, job)
        assert episode.success and len(episode) == 1 and episode.reward.tolist() == [1.0]


def test_quit_ends_with_the_finished_episodes() -> None:
    toy = Toy()
    toy.operator.plan = {900: QUIT}
    assert not played(toy).terminated
    with pytest.raises(OperatorLeft, match="Ada said quit"):
        toy.player.play(TRAIN, toy.keep)
    assert len(toy.episodes) == 1


@pytest.mark.parametrize("kind", [TRAINING, EVALUATION, DEMONSTRATION])
def test_a_fault_waits_for_an_acknowledgement(kind: str) -> None:
    toy = Toy()
    move = toy.robot.command

    def reflex(target: object, valid_until: float) -> None:
        if len(toy.robot.commands) == 4:
            toy.robot.state = replace(toy.robot.state, fault="reflex")
        move(target, valid_until)  # type: ignore[arg-type]

    toy.robot.command = reflex  # type: ignore[method-assign]
    toy.operator.plan = {5_000: SUCCESS, 20_000: ACKNOWLEDGE}
    job = Job(kind, 0, 7)
    first = played(toy, job)
    if kind == DEMONSTRATION:
        second = first
    else:
        assert (
            first.fault
            and first.ended == "reflex"
            and 0 < len(first) <= 5
            and not first.terminated
            and not first.success
        )
        assert toy.robot.state.fault == "reflex", "nothing was cleared without the operator"
        second = played(toy, job)
    assert toy.clock.now() >= 20_000 / 1024 and len(second) == 20 and not second.fault
    assert {"waiting": "reflex", "for": ACKNOWLEDGE} in toy.told


@pytest.mark.parametrize(
    ("fault", "terminal"),
    [
        *(
            (f"{name}: 51.2 measured, 40 allowed", True)
            for name in ("max_force_n", "max_torque_n_m", "max_deviation", "reflex")
        ),
        ("network: the connection to the arm is lost", False),
        ("policy: late", False),
    ],
)
def test_a_fault_that_pressing_causes_ends_an_episode_as_a_failure(
    fault: str, terminal: bool
) -> None:
    """Otherwise the value of what would follow is learnt for a place to which the arm must not press."""
    toy = Toy()
    move = toy.robot.command

    def press(target: object, valid_until: float) -> None:
        if len(toy.robot.commands) == 4:
            toy.robot.state = replace(toy.robot.state, fault=fault)
        move(target, valid_until)  # type: ignore[arg-type]

    toy.robot.command = press  # type: ignore[method-assign]
    episode = played(toy, Job(TRAINING, 0, 7))
    assert (
        episode.fault
        and episode.ended == fault
        and episode.terminated == terminal
        and not episode.success
    )
    rows = torch.arange(len(episode) + 1)
    records = to_records(
        episode,
        {"row": rows},
        RecordForm(1, ArmConvention(Convention()), False, 0.9),
        0,
        len(episode),
    ).records
    last = records[DISCOUNT][records[ACTED]][-1] if not terminal else records[DISCOUNT][-1]
    assert (last == 0) == terminal and len(records["row"]) == len(episode) + (not terminal)


class Pressing:
    """Moves by 0.1, 0.2, ...; the fifth command is changed by a limit and ends in a fault, which the next observation shows."""

    def __init__(self, toy: Toy, fault: str) -> None:
        self.toy = toy
        self.fault = fault
        self.move = toy.robot.command
        self.reported: list[Intervention] = []
        toy.acts = lambda position, goal: [0.1 * (len(toy.robot.commands) + 1), 0.0, 0.0, 1.0]
        toy.robot.command = self.command  # type: ignore[method-assign]
        toy.robot.interventions = self.interventions

    def command(self, target: Target, valid_until: float) -> None:
        self.move(target, valid_until)
        if len(self.toy.robot.commands) == 5:
            self.toy.robot.state = replace(self.toy.robot.state, fault=self.fault)
            self.toy.clock.at(
                self.toy.clock.now() + 0.01,
                lambda: self.reported.append(Intervention(0.0, "max_lead_m", 1.0, 0.5)),
            )

    def interventions(self) -> list[Intervention]:
        found = [*self.reported]
        self.reported[:] = []
        return found


@pytest.mark.parametrize(
    ("fault", "terminal"),
    [("max_force_n: 51.2 measured, 40 allowed", True), ("network: lost", False)],
)
def test_a_fault_is_the_outcome_of_the_last_action(fault: str, terminal: bool) -> None:
    """And what a limit changed then is its cost, not one of the next episode."""
    toy = Toy()
    Pressing(toy, fault)
    first = played(toy)
    assert (
        first.action[:, 0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
        and first.terminated == terminal
    )
    torch.testing.assert_close(
        first.state[-1, 0], torch.tensor(toy.robot.state.pose.position[0], dtype=torch.float32)
    )
    assert first.interventions == {"max_lead_m": 1} and first.cost.tolist() == [0, 0, 0, 0, 1]
    toy.operator.plan = {5_000: ACKNOWLEDGE}
    assert played(toy).interventions == {}


def test_what_a_limit_changed_between_two_episodes_belongs_to_neither() -> None:
    toy = Toy()
    pressing = Pressing(toy, "reflex: of the arm")
    home = toy.robot.home

    def limited(*arguments: Any) -> None:
        pressing.reported.append(Intervention(0.0, "max_speed_m_s", 1.0, 0.5))
        home(*arguments)

    toy.robot.home = limited  # type: ignore[method-assign]
    assert played(toy).interventions == {"max_lead_m": 1}
    assert toy.player.accounting.document()["interventions"] == {
        "max_lead_m": 1,
        "max_speed_m_s": 1,
    }


def test_a_fault_before_the_first_step_is_no_failure_of_the_policy() -> None:
    toy = Toy()
    home = toy.robot.home

    def bumped(*arguments: Any) -> None:
        home(*arguments)
        if toy.clock.now() < 1:
            toy.clock.at(
                toy.clock.now() + 0.2,
                lambda: toy.robot.stop("max_force_n: 51.2 measured, 40 allowed"),
            )

    toy.robot.home = bumped  # type: ignore[method-assign]
    toy.operator.plan = {5_000: ACKNOWLEDGE}
    assert played(toy, Job(EVALUATION, 0, 7)).ended == "time is up"


@pytest.mark.parametrize("fault", ["stopped by Bob", "policy: paused by Ada"])
def test_what_a_person_stopped_no_script_releases(fault: str) -> None:
    toy = Toy(acknowledge=BY_SCRIPT)
    toy.robot.stop(fault)
    toy.clock.at(30.0, lambda: toy.robot.acknowledge("Bob"))
    assert len(played(toy)) == 20 and toy.robot.commands[0][0] > 30
    assert toy.told == [{"waiting": fault, "for": ACKNOWLEDGE}, {"going_on": fault}]


def test_a_script_releases_no_stop_that_comes_after_a_fault() -> None:
    """Bob stops the arm while the script waits; the fault that it waits for was acknowledged by another person."""
    toy = Toy(acknowledge=BY_SCRIPT)
    toy.robot.stop("reflex")

    def acknowledged_and_stopped() -> None:
        toy.robot.acknowledge("Eve")
        toy.robot.stop("stopped by Bob")

    toy.clock.at(CONSENT_S - 0.05, acknowledged_and_stopped)
    toy.clock.at(30.0, lambda: toy.robot.acknowledge("Bob"))
    assert len(played(toy)) == 20 and toy.robot.commands[0][0] > 30
    assert {"waiting": "stopped by Bob", "for": ACKNOWLEDGE} in toy.told


def test_a_script_releases_no_stop_that_it_finds_after_reconnecting() -> None:
    toy = Toy(acknowledge=BY_SCRIPT)
    observe = toy.robot.observe
    connected = []

    def gone() -> object:
        if not connected:
            raise RobotError("the arm's process is gone")
        return observe()

    def connect(timeout_s: float) -> None:
        connected.append(timeout_s)
        toy.robot.stop("stopped by Bob")
        toy.clock.at(30.0, lambda: toy.robot.acknowledge("Bob"))

    toy.robot.observe = gone  # type: ignore[method-assign, assignment]
    toy.robot.connect = connect
    assert len(played(toy)) == 20 and toy.robot.commands[0][0] > 30


def test_a_pause_is_ended_by_the_operator_not_by_a_script() -> None:
    toy = Toy(acknowledge=BY_SCRIPT)
    toy.operator.plan = {900: PAUSE, 30_000: RESUME}
    assert played(toy).ended == PAUSE and toy.clock.now() > 29


def loses_its_server(toy: Toy, lost: float, back: float, silent: bool = False) -> str:
    """From ``lost`` to ``back``, in seconds, there are no answers, or they take three seconds."""
    why = "the policy server ws://it does not answer: the connection was closed"
    acts = toy.acts
    delay = toy.delay

    def gone() -> bool:
        return lost <= toy.clock.now() < back

    def infer(position: Vector, goal: Vector) -> list[float]:
        if gone() and not silent:
            raise Failure(why)
        return acts(position, goal)

    toy.acts = infer
    toy.delay = lambda request: 3.0 if silent and gone() else delay(request)
    return why


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_lost_policy_server_stops_the_arm_and_the_session_goes_on_when_it_is_back(
    warmup: int,
) -> None:
    toy = Toy(warmup=warmup)
    why = loses_its_server(toy, 1.0, 10.0)
    episode = played(toy)
    assert (
        episode.fault and not episode.terminated and episode.ended == why and 3 <= len(episode) < 10
    )
    assert toy.robot.state.fault == why and toy.robot.commands[-1][0] < 1.3
    toy.operator.plan = {5_000: ACKNOWLEDGE, 12_000: ACKNOWLEDGE}
    moved = len(toy.robot.commands)
    again = played(toy)
    assert (
        again.ended == "time is up"
        and not again.fault
        and toy.robot.commands[moved][0] > 12_000 * MS
    )
    waits = [message["waiting"] for message in toy.told if message.get("for") == ACKNOWLEDGE]
    assert waits == [why, why], "acknowledged too early, it is asked for again"


def test_a_silent_policy_server_stops_the_arm_and_its_late_answer_harms_nothing() -> None:
    toy = Toy(warmup=1)
    loses_its_server(toy, 1.0, 2.5, silent=True)
    episode = played(toy)
    assert episode.fault and re.fullmatch(
        r"5 control steps in a row without a command(; the policy .*)?", episode.ended
    ), episode.ended
    assert toy.robot.commands[-1][0] < 1.3
    toy.operator.plan = {2_600: ACKNOWLEDGE}
    again = played(toy)
    assert again.ended == "time is up" and not again.fault
    assert toy.robot.commands[len(episode)][0] > 4.0, "the answer under way is waited for"


def test_acknowledgements_by_script_are_limited() -> None:
    toy = Toy(acknowledge=BY_SCRIPT)

    def blind() -> None:
        raise CameraError("front: no picture for 2 s")

    toy.camera.latest = blind  # type: ignore[method-assign, assignment]
    with pytest.raises(RobotError, match=f"{CONSENTS} times in a row"):
        toy.player.play(Job(EVALUATION, 0, 7), toy.keep)
    assert toy.episodes == []


def test_a_lost_robot_is_connected_again() -> None:
    toy = Toy(acknowledge=BY_SCRIPT)
    observe = toy.robot.observe
    connected = []

    def gone() -> object:
        if len(toy.robot.commands) == 6 and not connected:
            raise RobotError("the arm's process is gone")
        return observe()

    toy.robot.observe = gone  # type: ignore[method-assign, assignment]
    toy.robot.connect = connected.append  # type: ignore[method-assign]
    assert played(toy).ended == "the arm's process is gone"
    assert len(played(toy)) == 20 and len(connected) == 1


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_lost_camera_is_started_again(warmup: int) -> None:
    toy = Toy(acknowledge=BY_SCRIPT, warmup=warmup)
    camera = toy.camera
    latest = camera.latest
    started = list[None]()

    def unplugged() -> object:
        if not started:
            raise CameraError("front: unplugged")
        return latest()

    camera.latest = unplugged  # type: ignore[method-assign, assignment]
    camera.start = lambda: started.append(None)  # type: ignore[method-assign]
    assert len(played(toy)) == 20 and len(started) == 1


def test_a_policy_failure_keeps_the_recorded_steps() -> None:
    toy = Toy()

    def fail(position: object, goal: object) -> list[float]:
        if len(toy.robot.commands) == 5:
            raise FloatingPointError("not finite")
        return [1.0, 0.0, 0.0, 1.0]

    toy.acts = fail
    with pytest.raises(FloatingPointError):
        toy.player.play(TRAIN, toy.keep)
    assert (
        len(toy.episodes[0]) == 4
        and toy.episodes[0].fault
        and toy.robot.state.fault == "FloatingPointError: not finite"
    )


def test_leaving_truncates_the_episode_and_stops() -> None:
    toy = Toy()
    toy.clock.at(0.9, lambda: toy.player.leave("the learner is gone"))
    assert played(toy).ended == "the learner is gone"
    with pytest.raises(OperatorLeft):
        toy.player.play(TRAIN, toy.keep)


def test_an_episode_is_stored_in_a_file(tmp_path: Path) -> None:
    toy = Toy()
    episode = played(toy)
    path = episode.write(tmp_path / "episodes")
    found = RobotEpisode.read(path)
    assert [each.name for each in path.parent.iterdir()] == ["training_000003.safetensors"]
    tensors = ("state", "tick", "action", "human", "begins", "chosen", "reward", "cost")
    for name in tensors:
        assert (getattr(found, name) == getattr(episode, name)).all()
    assert (found.images["front"] == episode.images["front"]).all()
    without = dict.fromkeys(("images", *tensors))
    assert replace(found, **without) == replace(episode, **without)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="is not a valid robot episode file"):
        RobotEpisode.read(path)

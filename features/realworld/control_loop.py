"""Drive a robot with a policy at a fixed rate, while inference runs in the background.

Each tick observes, selects the action of this step, moves the target and sends a command. Ticks are
due at absolute times, so lateness does not accumulate. A period that is over before its tick could
begin is skipped and counted. See the diagram in docs/control_loop.md.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rlinf_vla.config.robot import ControlConfig, timing
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.inference import (
    SUPERSEDED,
    Actions,
    Chosen,
    ChunkQueue,
    InferenceWorker,
    Request,
    Unanswered,
)
from rlinf_vla.features.realworld.loop_statistics import (
    ACCEPTED,
    HELD,
    HUMAN,
    POLICY,
    SKIPPED,
    STARTING,
    LoopStatistics,
)
from rlinf_vla.features.realworld.robot import (
    Camera,
    CameraError,
    Intervention,
    Robot,
    RobotError,
    Target,
    Timed,
)
from rlinf_vla.features.realworld.sensing import Reading, Sensors
from rlinf_vla.features.realworld.tool_target import tracked_target

FINISHED = "finished"
MISSED = "missed deadlines"
FAULT = "fault"
CAMERA = "camera"
ROBOT = "robot"
INVALID = "invalid action"
UNANSWERED = "no answer"


@dataclass(frozen=True)
class Step:
    """One control step.

    by: whose action was executed, ``policy`` or ``human``; ``held`` and ``starting`` sent no
    command. time: its end, in clock seconds. chosen: source of the policy's action. action: ``[D]``
    as executed, from policy or operator. interventions: reported since the step before.
    """

    tick: int
    time: float
    seen: Reading
    by: str = HELD
    chosen: Chosen | None = None
    action: Actions | None = None
    target: Target | None = None
    interventions: list[Intervention] = field(default_factory=list)

    @property
    def human(self) -> bool:
        return self.by == HUMAN


@dataclass(frozen=True)
class Ended:
    """Why a run ended. kind: FINISHED or the failure; after a failure the robot stands until an
    operator acknowledges it. last: the last reading, which shows what the last action led to, and
    the interventions since the last step; None if nothing was read."""

    kind: str
    detail: str
    last: Step | None = field(default=None, compare=False)


COMMAND_GRACE_PERIODS = 0.5
"""Periods beyond the next tick for which a command stays valid, so that a slightly late tick does
not slow the arm down."""
WARMUP_TIMEOUT = 600.0
"""Seconds; the first inference of a policy compiles or loads kernels."""
IDLE_S = 0.1
"""Seconds between two calls of ``idle`` during a warm-up."""


class ControlLoop:
    """Run one policy on one robot; call ``run`` once per episode."""

    def __init__(
        self,
        robot: Robot,
        cameras: Sequence[Camera],
        background: InferenceWorker,
        chunk: int,
        config: ControlConfig,
        clock: Clock,
        takeover: Callable[[], Actions | None] = lambda: None,
    ) -> None:
        """Prepare a loop; the robot must be connected and the cameras started.

        ``chunk``: actions per inference. ``takeover``: the operator's action of this step, or None.
        Raises UserError if ``config`` does not fit.
        """
        self._robot = robot
        self._background = background
        self._clock = clock
        self._takeover = takeover
        self._config = config
        self._timing = timing(config, robot.spec.control_hz, chunk)
        self._sensors = Sensors(robot, cameras, clock)
        self._chunks = ChunkQueue(self._timing.max_age)
        self._target = tracked_target(robot.spec)
        self.accounting = LoopStatistics(robot.spec.control_hz)
        if (
            not gc.get_freeze_count()
        ):  # a full collection of torch's objects alone takes 110 ms, in which no thread runs
            gc.collect()
            gc.freeze()
        self._executed = self._misses = 0
        self._queued: float = -math.inf
        self._commanded: float | None = None
        self._last: Step | None = None
        self._restart()

    def warm_up(self, instruction: str, idle: Callable[[], None] = lambda: None) -> None:
        """Run ``control.warmup`` inferences without moving the robot; call ``idle`` meanwhile.

        Raises TimeoutError, and Unanswered.
        """
        untimed = LoopStatistics(self.accounting.control_hz)
        self._background.take()  # of an earlier run
        for _ in range(self._config.warmup):
            seen = self._sensors.read(untimed.took, untimed.age)
            began = self._clock.now()
            self._background.submit(Request(seen, instruction, self._executed, 0))
            while True:
                self._background.wait(min(self._clock.now() + IDLE_S, began + WARMUP_TIMEOUT))
                if chunks := self._background.take():
                    break
                if self._clock.now() >= began + WARMUP_TIMEOUT:
                    raise TimeoutError(
                        f"the policy's first inference took more than {WARMUP_TIMEOUT:g} s"
                    )
                idle()
            if isinstance(chunks[-1], Unanswered):
                raise chunks[-1]
            took = self._clock.now() - began
            self.accounting.warmup.append(took)
        if self._config.warmup:
            self._chunks.took(math.ceil(took / self._timing.period))

    def run(
        self, instruction: str, after_step: Callable[[Step], str | None] = lambda step: None
    ) -> Ended:
        """Run until ``after_step``, called after every step, returns a reason, or until a failure.

        Raises what the policy or ``after_step`` raises, after stopping the robot.
        """
        self._restart()
        origin = self._clock.now()
        try:
            ended = self._ticks(origin, instruction, after_step)
        except CameraError as error:
            ended = self._failed(CAMERA, str(error))
        except RobotError as error:
            ended = self._failed(ROBOT, str(error))
        except Unanswered as error:
            ended = self._failed(UNANSWERED, str(error))
        except BaseException as error:
            self._failed("", f"{type(error).__name__}: {error}")
            raise
        finally:
            self._background.withdraw()
            self.accounting.seconds += self._clock.now() - origin
        interventions = list[Intervention]()
        with suppress(RobotError):  # the robot is lost, and its report with it
            interventions = self._interventions()
        return replace(ended, last=self._last and replace(self._last, interventions=interventions))

    def _ticks(
        self, origin: float, instruction: str, after_step: Callable[[Step], str | None]
    ) -> Ended:
        period = self._timing.period
        account = self.accounting
        tick = 0
        self._interventions()  # of the way home: no action here caused them
        while True:
            due = origin + tick * period
            self._clock.sleep_until(due)
            account.took("lateness", self._clock.now() - due)
            outcome = self._tick(tick, due, instruction)
            if isinstance(outcome, Ended):
                return outcome
            if reason := after_step(outcome):
                return Ended(FINISHED, reason)
            account.took("tick", self._clock.now() - due)
            skipped = max(0, math.floor((self._clock.now() - origin) / period) - tick - 1)
            account.steps[SKIPPED] += skipped
            self._misses += skipped
            if self._misses >= self._config.max_misses:
                return self._failed(
                    MISSED,
                    f"{self._misses} control steps in a row without a command{self._silence()}",
                )
            tick += 1 + skipped

    def _tick(self, tick: int, due: float, instruction: str) -> Step | Ended:
        account = self.accounting
        end = due + self._timing.period
        seen = self._sensors.read(account.took, account.age)
        self._last = Step(tick, self._clock.now(), seen)
        if seen.state.fault is not None:
            return Ended(FAULT, seen.state.fault)
        self._collect(tick)
        # a step that is over asks for no action: it executes none, and a replay would lose one
        human = self._takeover() if self._clock.now() < end else None
        if human is not None:
            self._forget_plan()
        elif self._wants():
            committed = (
                self._chunks.committed(self._executed) if self._config.real_time_chunking else None
            )
            self._background.submit(Request(seen, instruction, self._executed, tick, committed))
            self._queued = self._executed
        if human is None and not self._timing.asynchronous:
            self._await(tick, end - self._timing.reserve)
        now = self._clock.now()
        human = human if now < end else None
        chosen = (
            self._chunks.next(now, self._executed) if now < end else None
        )  # None if a plan was forgotten
        action = human if human is not None else chosen.action if chosen is not None else None
        if action is not None and not self._robot.spec.space.accepts(action):
            return self._failed(
                INVALID,
                f"{'the operator' if human is not None else 'the policy'} asked for {action.tolist()}",
            )
        target = self._target.move(action, seen.state) if action is not None else None
        if target is not None:
            self._command(target, due, chosen)
        # it has not acted yet, or not since a takeover, and may be on time
        starting = (
            self._commanded is None
            and self._clock.now() - self._standing_since <= self._timing.max_age
        )
        by = (
            HUMAN
            if human is not None
            else POLICY
            if chosen is not None
            else STARTING
            if starting
            else HELD
        )
        account.steps[by] += 1
        self._misses += by == HELD
        return Step(
            tick, self._clock.now(), seen, by, chosen, action, target, self._interventions()
        )

    def _collect(self, tick: int) -> bool:
        """Offer finished chunks for execution; return whether any was accepted.

        Raises Unanswered.
        """
        accepted = False
        for chunk in self._background.take():
            if isinstance(chunk, Unanswered):
                if self._chunks.supersedes(chunk.request):
                    continue
                raise chunk
            for section, seconds in chunk.sections.items():
                self.accounting.took(section, seconds)
            rejected = self._chunks.offer(chunk, self._clock.now(), self._executed, tick)
            if rejected != SUPERSEDED:  # which may be of an earlier run
                self.accounting.delays[tick - chunk.request.tick] += 1
            self.accounting.chunks[rejected or ACCEPTED] += 1
            accepted |= rejected is None
        return accepted

    def _silence(self) -> str:
        """Return how long the policy has been asked without an answer, to end a message."""
        running, _ = self._background.pending()
        waits = 0.0 if running is None else self._clock.now() - running.seen.time
        return (
            f"; the policy has not answered for {waits:.1f} s"
            if waits > self._timing.max_age
            else ""
        )

    def _wants(self) -> bool:
        """Return whether to request an inference for this observation."""
        running, waiting = self._background.pending()
        if waiting is not None or self._executed - self._queued >= self._timing.horizon:
            return True
        now = self._clock.now()
        too_late = running is None or now - running.seen.time > self._timing.max_age
        return too_late and self._chunks.next(now, self._executed) is None

    def _await(self, tick: int, deadline: float) -> None:
        """Wait until a chunk is accepted, none is pending, or ``deadline``."""
        while True:
            journal_path = any(self._background.pending())
            if self._collect(tick) or not journal_path or self._clock.now() >= deadline:
                return
            self._background.wait(deadline)

    def _command(self, target: Target, due: float, chosen: Chosen | None) -> None:
        began = self._clock.now()
        self._robot.command(target, due + (1 + COMMAND_GRACE_PERIODS) * self._timing.period)
        now = self._clock.now()
        account = self.accounting
        account.took("command", now - began)
        account.left(now - due)
        if self._commanded is not None and self._misses == 0:
            account.took("jitter", abs(now - self._commanded - self._timing.period))
        if chosen is not None:
            account.age("action", chosen.age)
        self._commanded = None if chosen is None else now
        self._misses = 0
        self._executed += 1

    def _interventions(self) -> list[Intervention]:
        interventions = self._robot.interventions()
        self.accounting.interventions.update(intervention.rule for intervention in interventions)
        if isinstance(self._robot, Timed):
            for section, samples in self._robot.timings().items():
                for seconds in samples:
                    self.accounting.took(section, seconds)
        return interventions

    def _restart(self) -> None:
        """Begin anew; the arm stands, possibly moved meanwhile."""
        self._forget_plan()
        self._target.restart()
        self._misses = 0
        self._last = None

    def _forget_plan(self) -> None:
        """Discard all observations so far: the policy did not cause what happened since."""
        self._background.withdraw()
        self._chunks.forget(self._sensors.count)
        self._standing_since = self._clock.now()
        self._queued = -math.inf
        self._commanded = None

    def _failed(self, kind: str, detail: str) -> Ended:
        try:
            self._robot.stop(detail)
        except (
            RobotError
        ) as error:  # report the first error; the robot's own watchdog stops the arm
            detail += f"; stopping the robot failed, too: {error}"
        return Ended(kind, detail)

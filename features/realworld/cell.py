"""Open a recipe's robot cell: robot, cameras, scene, operator and policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import INTERACTIVE, Recipe, RewardConfig
from rlinf_vla.config.robot import BY_SCRIPT, NO_OPERATOR, ROBOT, ControlConfig
from rlinf_vla.core import plugins
from rlinf_vla.core.devices import threads
from rlinf_vla.core.images import blank
from rlinf_vla.core.observation_features import require_colours
from rlinf_vla.core.protocols import EnvSpec, Policy, PolicySpec, ToolUnits
from rlinf_vla.core.types import Episodes, Observation
from rlinf_vla.features.realworld.action_space import ActionSpace, ToolSpace
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_actor import ControlActor, require_fit
from rlinf_vla.features.realworld.episode import Job
from rlinf_vla.features.realworld.inference import Chunk, InferenceWorker, Request
from rlinf_vla.features.realworld.operator_session import Cell, Tell
from rlinf_vla.features.realworld.player import RobotPlayer
from rlinf_vla.features.realworld.robot import (
    Action,
    Camera,
    CellError,
    Operator,
    Robot,
    RobotSpec,
    Scene,
)
from rlinf_vla.features.realworld.sensing import ResizedCamera
from rlinf_vla.rollout.reward_shaping import env_reward
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.fit import check_meaning
from rlinf_vla.training.lora import copy_all

WARMUP = 3
_SOMEBODY = "session.operator=keyboard, gamepad or spacemouse"


class WordsAlone:
    """Operator that never takes over; ``device`` gives the words, None: nobody does."""

    def __init__(self, device: Operator | None = None) -> None:
        self._device = device

    @property
    def name(self) -> str:
        return NO_OPERATOR if self._device is None else self._device.name

    def action(self, hand: float) -> Action | None:
        return None

    def words(self) -> list[str]:
        return [] if self._device is None else self._device.words()

    def close(self) -> None:
        if self._device is not None:
            self._device.close()


class Inference:
    """Policy of the robot process, called by the control loop; weights change between episodes."""

    def __init__(self, recipe: Recipe, policy: Policy) -> None:
        self._recipe = recipe
        self._policy = policy
        self._clock = Clock()
        self._actors: dict[float, ControlActor] = {}
        self._actor = self._of(0.0)
        self.version = -1

    def __call__(self, request: Request) -> Chunk:
        return self._actor(request)

    def begin(self, job: Job) -> None:
        self._actor = self._of(job.temperature)
        task = torch.zeros(1, dtype=torch.int64)
        seed = torch.tensor([job.seed])
        self._actor.episode = Episodes.first_attempts(task, seed)

    def pull(self, published: Path) -> int:
        """Load the learner's newest weights if there are any; return their version, else -1."""
        if published.exists():
            with safe_open(published, "pt") as file:
                version = int(file.metadata()["version"])
                if version != self.version:
                    stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
                    own = dict(self._policy.named_parameters())
                    with torch.no_grad():
                        copy_all(stored, {name: own[name] for name in stored}, published)
                    self.version = version
        return self.version

    def warm_up(self, state_size: int) -> None:
        """Run the policy on zeros, so that kernels are loaded before the robot is connected."""
        spec = self._policy.spec
        empty = Observation(blank(spec.images, 1), torch.zeros(1, state_size), ["nothing"])
        inputs = self._actor.prepare(empty)
        for _ in range(WARMUP):
            self._actor.act(inputs, self._actor.episode, torch.zeros(1, dtype=torch.int64))

    def _of(self, temperature: float) -> ControlActor:
        if temperature not in self._actors:
            self._actors[temperature] = ControlActor(
                self._policy, builders.actor_settings(self._recipe, temperature), self._clock
            )
        return self._actors[temperature]


@dataclass(frozen=True)
class RobotCell:
    """An opened robot with its cameras, episode player, policy and spec."""

    robot: Robot
    cameras: Sequence[Camera]
    player: RobotPlayer
    inference: Inference
    spec: EnvSpec


def require_robot(recipe: Recipe, verb: str) -> None:
    """Raise UserError if the recipe is for simulators."""
    if recipe.env.name != ROBOT:
        raise UserError(
            f"robot {verb} needs a recipe for a robot, recipe={recipe.name} has env={recipe.env.name}: use recipe=franka_rlpd"
        )


def check(recipe: Recipe) -> None:
    """Raise UserError if the session's settings do not fit the robot or the installed plug-ins."""
    plugin = plugins.choose("robot", recipe.robot.name, plugins.robots())
    settings = recipe.session
    by_script = settings.acknowledge == BY_SCRIPT
    if (by_script or settings.patience_s is not None) and not plugin.simulated:
        key = "session.acknowledge=script" if by_script else "session.patience_s"
        raise UserError(
            f"{key} is for simulated robots, robot={recipe.robot.name} can hurt people: leave it out"
        )
    if settings.operator != NO_OPERATOR:
        plugins.choose("session.operator", settings.operator, plugins.operators())
    elif plugin.scene(recipe.robot).by_hand and not by_script:
        raise UserError(
            f"robot={recipe.robot.name}: an operator must lay out its episodes and confirm the layout: set {_SOMEBODY}"
        )


def require_demonstrator(recipe: Recipe) -> None:
    """Raise UserError if nobody can give the recipe's demonstrations or corrections."""
    plugin = plugins.choose("robot", recipe.robot.name, plugins.robots())
    demonstrations = recipe.algorithm.demonstrations
    session = recipe.session
    count = demonstrations if isinstance(demonstrations, int) else 0
    nobody = session.operator == NO_OPERATOR
    corrects = recipe.algorithm.family == INTERACTIVE and session.patience_s is None
    expert = plugin.scene(recipe.robot).has_expert
    if not corrects and (not count or (nobody and expert)):
        return  # no person has to move the arm
    if not isinstance(plugin.make(recipe.robot).spec.space, ToolSpace):
        raise UserError(
            f"no operator's device moves the joints of robot={recipe.robot.name}: set algorithm=sft for a dataset of lerobot-record and "
            "a leader arm, or algorithm=sac algorithm.demonstrations=0; with a simulated expert session.operator=none session.patience_s=3"
        )
    if count and nobody:
        raise UserError(
            f"algorithm.demonstrations={count}: robot={recipe.robot.name} has no expert that could give them: set {_SOMEBODY}, "
            "or algorithm.demonstrations=0"
        )


def require_whole_chunks(control: ControlConfig, chunk: int) -> None:
    """Raise UserError if learning from chunks of this many actions would see them cut short."""
    if chunk > 1 and (
        control.asynchronous is not False or control.execution_horizon not in (None, chunk)
    ):
        raise UserError(
            f"learning from chunks of {chunk} actions needs each of them executed to its end: "
            "set control.asynchronous=false control.execution_horizon=null"
        )


@contextmanager
def open_cell(
    recipe: Recipe,
    tell: Tell,
    staged: Callable[[Scene], Scene] = lambda scene: scene,
    journal_path: Path | None = None,
) -> Iterator[RobotCell]:
    """Connect the robot, start its cameras and load the policy; close everything at the end.

    ``staged``: wraps or replaces the robot's scene. ``journal_path``: file of the running episode,
    see :class:`RobotPlayer`. Raises UserError, CellError and RobotError.
    """
    plugin = plugins.choose("robot", recipe.robot.name, plugins.robots())
    settings = recipe.session
    check(recipe)
    policy = builders.build_initial(recipe)
    assert isinstance(policy, Policy)
    require_colours(policy.spec.images, "a robot's camera")
    robot = plugin.make(recipe.robot)
    cameras = plugin.cameras(recipe.robot)
    scene = plugin.scene(recipe.robot)
    require_fit(policy, robot.spec.space, [camera.name for camera in cameras], recipe.control)
    policy.fit_instructions(scene.instructions)
    sizes = policy.spec.images
    cameras = [
        ResizedCamera(camera, sizes[camera.name], policy.spec.bars)
        for camera in cameras
        if camera.name in sizes
    ]
    inference = Inference(recipe, policy)
    clock = Clock()
    with ExitStack() as stack:
        stack.enter_context(threads(recipe.cluster.rollout_threads))
        inference.warm_up(robot.spec.space.state_size)
        operator = _operator(recipe, robot.spec.space, policy.spec.action_dim)
        stack.callback(operator.close)
        stack.callback(robot.close)
        robot.connect(settings.connect_s)
        for camera in cameras:
            stack.callback(camera.close)
            camera.start()
        stack.callback(robot.close)  # before the cameras, which may take long to close
        background = InferenceWorker(inference, clock, recipe.control.requests_in_flight)
        stack.callback(background.close)
        spec = env_spec(recipe, robot.spec, scene, policy.spec)
        score = (
            env_reward
            if recipe.reward == RewardConfig()
            else builders.build_reward_shaper(recipe, spec)
        )
        cell = Cell(robot, cameras, staged(scene), operator)
        limits = recipe.env.episode_limit, (policy.spec.chunk, policy.spec.action_dim)
        player = RobotPlayer(
            cell, background, recipe.control, settings, *limits, clock, score, tell, journal_path
        )
        yield RobotCell(robot, cameras, player, inference, spec)


def env_spec(recipe: Recipe, spec: RobotSpec, scene: Scene, policy: PolicySpec) -> EnvSpec:
    """Describe a robot as an environment, for rewards and reports.

    Raises UserError if it would misunderstand the policy.
    """
    space = spec.space
    tool = (
        ToolUnits(space.translation_m, space.rotation_rad) if isinstance(space, ToolSpace) else None
    )
    described = EnvSpec(
        num_envs=1,
        action_dim=policy.action_dim,
        state_dim=space.state_size,
        control_hz=spec.control_hz,
        episode_limit=recipe.env.episode_limit,
        images=dict(policy.images),
        tasks=(spec.name,),
        device=torch.device("cpu"),
        tool=tool,
        stack={"robot": spec.name},
        native=replace(ArmConvention(policy.convention).native, tool=tool),
        instructions=scene.instructions,
    )
    check_meaning(policy, described)
    return described


def spec_of(recipe: Recipe, policy: PolicySpec) -> EnvSpec:
    """Return the robot's ``env_spec`` without connecting. Raises UserError."""
    plugin = plugins.choose("robot", recipe.robot.name, plugins.robots())
    try:
        return env_spec(recipe, plugin.make(recipe.robot).spec, plugin.scene(recipe.robot), policy)
    except CellError as error:
        raise UserError(str(error)) from None


def _operator(recipe: Recipe, space: ActionSpace, dimensions: int) -> Operator:
    settings = recipe.session
    if settings.operator == NO_OPERATOR:
        return WordsAlone()
    device = plugins.operators()[settings.operator](settings.device, dimensions)
    return (
        device if isinstance(space, ToolSpace) else WordsAlone(device)
    )  # which moves a tool, and so no joints

"""A recipe's robot with all that plays beside it: policy, cameras, scene, person."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from rlinf_vla import plugins
from rlinf_vla.commands import session
from rlinf_vla.protocols import EnvSpec, Policy, ToolUnits
from rlinf_vla.recipe import Recipe, RewardConfig
from rlinf_vla.recipe.robot import BY_SCRIPT, NOBODY, ROBOT
from rlinf_vla.robot import Action, CellError, Person, Robot, RobotSpec, Scene
from rlinf_vla.rollout.background import Threaded
from rlinf_vla.rollout.chunks import Chunk, Request
from rlinf_vla.rollout.clock import MonotonicClock
from rlinf_vla.rollout.control_actor import ControlActor, require_fit
from rlinf_vla.rollout.rewarded import own_reward
from rlinf_vla.rollout.robot_attendant import Cell, Rules, Tell
from rlinf_vla.rollout.robot_episode import Job
from rlinf_vla.rollout.robot_player import RobotPlayer
from rlinf_vla.rollout.sensing import STATE, ResizedCamera
from rlinf_vla.training.lora import copy_all
from rlinf_vla.types import Episodes, Observation, UserError

WARMUP = 3
_SOMEBODY = "session.person=keyboard, gamepad or spacemouse"


class Nobody:
    """Leaves everything to the policy, and says nothing."""

    name = NOBODY

    def action(self, hand: float) -> Action | None:
        return None

    def words(self) -> list[str]:
        return []

    def close(self) -> None: ...


class Inference:
    """The policy of the robot's side, as the control loop asks it; its weights follow the learner's between episodes."""

    def __init__(self, recipe: Recipe, policy: Policy) -> None:
        self._recipe, self._policy, self._clock = recipe, policy, MonotonicClock()
        self._actors: dict[float, ControlActor] = {}
        self._actor = self._of(0.0)
        self.version = -1

    def __call__(self, request: Request) -> Chunk:
        return self._actor(request)

    def begin(self, job: Job) -> None:
        self._actor = self._of(job.temperature)
        task, seed = torch.zeros(1, dtype=torch.int64), torch.tensor([job.seed])
        self._actor.episode = Episodes.first_attempts(task, seed)

    def pull(self, published: Path) -> int:
        """The newest weights that the learner has published; returns their version."""
        if published.exists():
            with safe_open(published, "pt") as file:
                version = int(file.metadata()["version"])
                if version != self.version:
                    stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
                    own = dict(self._policy.named_parameters())
                    with torch.no_grad():
                        copy_all(stored, {name: own[name] for name in stored}, published)
                    self.version = version
        return self.version

    def warm_up(self) -> None:
        """Kernels are loaded before the robot is there."""
        spec = self._policy.spec
        device = next(self._policy.parameters()).device
        images = {name: torch.zeros(1, *size, 3, dtype=torch.uint8, device=device) for name, size in spec.images.items()}
        inputs = self._policy.prepare(Observation(images, torch.zeros(1, STATE, device=device), ["nothing"]))
        for _ in range(WARMUP):
            self._actor.act(inputs, self._actor.episode, torch.zeros(1, dtype=torch.int64))

    def _of(self, temperature: float) -> ControlActor:
        if temperature not in self._actors:
            self._actors[temperature] = ControlActor(self._policy, session.actor_settings(self._recipe, temperature), self._clock)
        return self._actors[temperature]


@dataclass(frozen=True)
class RobotCell:
    robot: Robot
    player: RobotPlayer
    inference: Inference
    spec: EnvSpec


def require_robot(recipe: Recipe, verb: str) -> None:
    """Raises UserError where the recipe is for simulators."""
    if recipe.env.name != ROBOT:
        raise UserError(f"robot {verb} wants a recipe for a robot, recipe={recipe.name} has env={recipe.env.name}: recipe=franka_rlpd")


def check(recipe: Recipe) -> None:
    """Raises UserError where the session's settings do not fit the robot or what is installed."""
    plugin, settings = plugins.choose("robot", recipe.robot.name, plugins.robots()), recipe.session
    by_script = settings.acknowledge == BY_SCRIPT
    if (by_script or settings.patience_s is not None) and not plugin.simulated:
        key = "session.acknowledge=script" if by_script else "session.patience_s"
        raise UserError(f"{key} is for simulated robots, robot={recipe.robot.name} can hurt people: leave it out")
    if settings.person != NOBODY:
        plugins.choose("session.person", settings.person, dict(plugins.people()))
    elif plugin.scene(recipe.robot).by_hand and not by_script:
        raise UserError(f"robot={recipe.robot.name}: a person lays out its episodes, and says when that is done: {_SOMEBODY}")


def require_shown(recipe: Recipe) -> None:
    """Raises UserError where nobody could show the recipe's demonstrations."""
    scene, count = plugins.choose("robot", recipe.robot.name, plugins.robots()).scene(recipe.robot), recipe.algorithm.demonstrations
    if count and recipe.session.person == NOBODY and not scene.has_expert:
        raise UserError(
            f"algorithm.demonstrations={count}: robot={recipe.robot.name} has no expert that could show them: {_SOMEBODY}, "
            "or algorithm.demonstrations=0"
        )


def build_policy(recipe: Recipe) -> Policy:
    """The recipe's, where it can drive a robot whose episodes SAC learns from. Raises UserError."""
    policy = session.build_policy(recipe)
    if policy.spec.chunk != 1:
        raise UserError(f"a robot's records are single actions, the policy's chunks have {policy.spec.chunk}: use a policy with chunk 1")
    return policy


@contextmanager
def opened(
    recipe: Recipe, tell: Tell, staged: Callable[[Scene], Scene] = lambda scene: scene, under_way: Path | None = None
) -> Iterator[RobotCell]:
    """Connected, everything started. ``staged``: what is played instead of the robot's scene. ``under_way``: see :class:`RobotPlayer`.

    Raises UserError, CellError and RobotError.
    """
    plugin, settings = plugins.choose("robot", recipe.robot.name, plugins.robots()), recipe.session
    check(recipe)
    policy = build_policy(recipe)
    robot, cameras, scene = plugin.make(recipe.robot), plugin.cameras(recipe.robot), plugin.scene(recipe.robot)
    require_fit(policy, [camera.name for camera in cameras], recipe.control)
    sizes = policy.spec.images
    cameras = [ResizedCamera(camera, sizes[camera.name]) for camera in cameras if camera.name in sizes]
    rules = Rules(
        limit=recipe.env.episode_limit,
        dimensions=policy.spec.action_dim,
        patience_s=settings.patience_s,
        scripted_consent=settings.acknowledge == BY_SCRIPT,
        connect_s=settings.connect_s,
        home_s=settings.home_s,
    )
    inference, clock = Inference(recipe, policy), MonotonicClock()
    with ExitStack() as stack:
        stack.enter_context(session.threads(recipe.cluster.rollout_threads))
        inference.warm_up()
        person = _person(recipe, policy.spec.action_dim)
        stack.callback(person.close)
        stack.callback(robot.close)
        robot.connect(settings.connect_s)
        for camera in cameras:
            stack.callback(camera.close)
            camera.start()
        stack.callback(robot.close)  # before cameras are closed, which may take long
        background = Threaded(inference, clock)
        stack.callback(background.close)
        spec = env_spec(recipe, robot.spec, policy)
        score = own_reward if recipe.reward == RewardConfig() else session.build_worth(recipe, spec)
        cell = Cell(robot, cameras, staged(scene), person)
        player = RobotPlayer(cell, background, recipe.control, rules, clock, score, tell, under_way)
        yield RobotCell(robot, player, inference, spec)


def env_spec(recipe: Recipe, spec: RobotSpec, policy: Policy) -> EnvSpec:
    """A robot as an environment: what rewards and reports want to know."""
    return EnvSpec(
        num_envs=1,
        action_dim=policy.spec.action_dim,
        state_dim=STATE,
        control_hz=spec.control_hz,
        episode_limit=recipe.env.episode_limit,
        images=dict(policy.spec.images),
        tasks=(spec.name,),
        device=torch.device("cpu"),
        tool=ToolUnits(spec.translation_m, spec.rotation_rad),
        stack={"robot": spec.name},
    )


def spec_of(recipe: Recipe, policy: Policy) -> EnvSpec:
    """Without connecting. Raises UserError."""
    plugin = plugins.choose("robot", recipe.robot.name, plugins.robots())
    try:
        return env_spec(recipe, plugin.make(recipe.robot).spec, policy)
    except CellError as error:
        raise UserError(str(error)) from None


def _person(recipe: Recipe, dimensions: int) -> Person:
    settings = recipe.session
    if settings.person == NOBODY:
        return Nobody()
    return plugins.people()[settings.person](settings.device, dimensions)

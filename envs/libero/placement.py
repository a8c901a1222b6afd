"""Where LIBERO's objects and fixtures are at the beginning of an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from .perturbations import Draw

JOINT_RAD = 0.1
"""Distance of the arm's joints from their usual initial positions, per severity (2-norm)."""
DISPLACEMENT_M = {"libero_object": 0.03}
"""Largest displacement of an object along x and y, per severity; 1 cm in the other suites."""
ATTEMPTS = 100
DEEP_M = 0.005
"""Bodies that overlap by more throw each other away when the simulation begins."""

DEEPER_M = 0.0005
"""Bodies that already touch may overlap by so much more in a perturbed initial state."""

LOWERED_M = 0.002
LOWERED_STEPS = 100
"""Step (m) in which objects are lowered to where they will stand, and the most such steps."""

T = TypeVar("T")


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, which LIBERO draws from, and restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def until_placed(attempt: Callable[[], T]) -> T:
    """Repeat ``attempt`` while LIBERO's random placement does not fit.

    LIBERO's own loop swallows every error and never ends. Raises RuntimeError after ``ATTEMPTS``.
    """
    from robosuite.utils.errors import RandomizationError

    for _ in range(ATTEMPTS):
        try:
            return attempt()
        except RandomizationError:
            continue
    raise RuntimeError(f"LIBERO found no place for its objects in {ATTEMPTS} attempts")


def deep_contacts(env: Any) -> set[tuple[int, int]]:
    """Return the pairs of geometries of robosuite's ``env`` that overlap by over ``DEEP_M``."""
    env.sim.forward()
    contacts = env.sim.data.contact[: env.sim.data.ncon]
    return {
        (int(contact.geom1), int(contact.geom2)) for contact in contacts if contact.dist < -DEEP_M
    }


def draw(env: Any, seed: int, allowed: set[tuple[int, int]]) -> None:
    """Reset robosuite's ``env`` to an initial state that is drawn as the stored ones were.

    ``allowed``: pairs of geometries that may overlap deeply, as they do in stored states.
    """
    from robosuite.utils.errors import RandomizationError

    def attempt() -> None:
        with _fixtures_in_place(env):
            env.reset()
        if deep_contacts(env) - allowed:
            raise RandomizationError("objects overlap")

    with drawn_from(seed):
        until_placed(attempt)


def move_arm(env: Any, drawn: Draw) -> None:
    """Move the arm of robosuite's ``env`` by ``JOINT_RAD`` per severity, in a random direction.

    The controller's null space tends to the moved position, as after a reset to it. Raises
    RuntimeError if the arm touches something in each of ``ATTEMPTS`` directions.
    """
    robot = env.robots[0]
    data = env.sim.data
    joints = robot._ref_joint_pos_indexes
    rest = _depths(env)
    usual = data.qpos[robot._ref_joint_pos_indexes].copy()
    for _ in range(ATTEMPTS):
        direction = drawn.random.normal(size=len(joints))
        noise = JOINT_RAD * drawn.severity * direction / np.linalg.norm(direction)
        data.qpos[joints] = usual + noise
        if _free(env, rest):
            robot.controller.update_initial_joints(robot.controller.initial_joint + noise)
            return
    raise RuntimeError(f"the arm found no free initial position in {ATTEMPTS} attempts")


def displace(env: Any, drawn: Draw, suite: str) -> None:
    """Move each object that stands on the workspace, with what stands on it, to a place nearby.

    The offset is uniform in a square that grows with the severity. An object stays where it is if
    it would touch something new in each of ``ATTEMPTS`` places. Fixtures stay.
    """
    reach = DISPLACEMENT_M.get(suite, 0.01) * drawn.severity
    data = env.sim.data
    groups = _groups(env)
    starts = [
        [env.sim.model.get_joint_qpos_addr(env.objects_dict[name].joints[-1])[0] for name in loads]
        for loads in groups
    ]
    # Objects begin in the air. Whether a place is free is decided where they will stand.
    heights = [_lower(env, loads, joints) for loads, joints in zip(groups, starts, strict=True)]
    objects = {env.obj_body_id[name] for name in env.objects_dict}
    for loads, joints in zip(groups, starts, strict=True):
        own = {env.obj_body_id[name] for name in loads}
        # Stored states may have objects that overlap. A displaced object overlaps no other one.
        rest = {
            pair: depth
            for pair, depth in _depths(env).items()
            if len(own & {*pair}) != 1 or {*pair} - objects
        }
        before = [data.qpos[start : start + 2].copy() for start in joints]
        for _ in range(ATTEMPTS):
            offset = drawn.random.uniform(-reach, reach, 2)
            for start, position in zip(joints, before, strict=True):
                data.qpos[start : start + 2] = position + offset
            if _free(env, rest):
                break
        else:
            for start, position in zip(joints, before, strict=True):
                data.qpos[start : start + 2] = position
    for joints, before in zip(starts, heights, strict=True):
        data.qpos[[start + 2 for start in joints]] = before


def _groups(env: Any) -> list[list[str]]:
    """Return the objects on the workspace, each followed by the objects that stand on it."""
    regions = env.parsed_problem["regions"]
    names = sorted(env.objects_dict)
    placed = [state for state in env.parsed_problem["initial_state"] if len(state) == 3]
    stands = {
        thing: regions[where]["target"] if where in regions else where for _, thing, where in placed
    }
    return [
        [name, *(load for load in names if stands.get(load) == name)]
        for name in names
        if stands.get(name) == env.workspace_name
    ]


def _lower(env: Any, loads: list[str], joints: list[int]) -> list[float]:
    """Lower objects until one touches something that is not an object, if that is near.

    Returns their heights before (m).
    """
    qpos = env.sim.data.qpos
    heights = [start + 2 for start in joints]
    before = qpos[heights].copy()
    own = {env.obj_body_id[name] for name in loads}
    objects = {env.obj_body_id[name] for name in env.objects_dict}
    for step in range(LOWERED_STEPS):
        qpos[heights] = before - step * LOWERED_M
        if any(own & {*pair} and {*pair} - objects for pair in _depths(env)):
            return list(before)
    qpos[heights] = before
    return list(before)


def _depths(env: Any) -> dict[tuple[int, int], float]:
    """Return how deep MuJoCo's kinematic trees, the world among them, overlap (m), pair by pair."""
    env.sim.forward()
    body = env.sim.model.geom_bodyid
    root = env.sim.model.body_rootid
    depths = dict[tuple[int, int], float]()
    for contact in env.sim.data.contact[: env.sim.data.ncon]:
        one, other = sorted((int(root[body[contact.geom1]]), int(root[body[contact.geom2]])))
        depths[one, other] = max(depths.get((one, other), 0.0), -float(contact.dist))
    return depths


def _free(env: Any, rest: dict[tuple[int, int], float]) -> bool:
    """Whether nothing touches that did not in ``rest``, and nothing overlaps deeper than there."""
    return all(depth <= rest.get(pair, 0.0) + DEEPER_M for pair, depth in _depths(env).items())


@contextmanager
def _fixtures_in_place(env: Any) -> Iterator[None]:
    """Let the reset of robosuite's ``env`` draw objects around the fixtures as they are.

    Fixtures belong to the model, which all episodes of a scene share. LIBERO adds the position of
    a fixture's site to that of the fixture, as if its body were still where the task's model has
    it, so it is put there for the draw; the reset then places it.
    """
    model = env.sim.model
    fixed = []
    for sampler in env.placement_initializer.samplers.values():
        fixtures = {
            fixture.name: fixture
            for fixture in sampler.mujoco_objects
            if fixture.name in env.fixtures_dict
        }
        if len(fixtures) < len(sampler.mujoco_objects):
            continue
        placed = {}
        for name, fixture in fixtures.items():
            body = model.body_name2id(fixture.root_body)
            element = fixture.get_obj()
            placed[name] = tuple(model.body_pos[body]), model.body_quat[body].copy(), fixture
            model.body_pos[body] = np.array(element.get("pos", "0 0 0").split(), float)
            model.body_quat[body] = np.array(element.get("quat", "1 0 0 0").split(), float)
        sampler.sample = lambda fixtures=None, placed=placed, **_: (fixtures or {}) | placed
        fixed.append(sampler)
    try:
        yield
    finally:
        for sampler in fixed:
            del sampler.sample

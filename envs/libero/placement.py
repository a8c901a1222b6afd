"""Where LIBERO's objects and fixtures are at the beginning of an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

DEEP_M = 0.005
"""Bodies that overlap by more throw each other away when the simulation begins."""

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

    LIBERO's own loop swallows every error and never ends. Raises RuntimeError after 100 attempts.
    """
    from robosuite.utils.errors import RandomizationError

    for _ in range(100):
        try:
            return attempt()
        except RandomizationError:
            continue
    raise RuntimeError("LIBERO found no place for its objects in 100 attempts")


def deep_contacts(env: Any) -> set[tuple[int, int]]:
    """Return the pairs of geometries of robosuite's ``env`` that overlap by over ``DEEP_M``."""
    env.sim.forward()
    contacts = env.sim.data.contact[: env.sim.data.ncon]
    return {(int(each.geom1), int(each.geom2)) for each in contacts if each.dist < -DEEP_M}


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


@contextmanager
def _fixtures_in_place(env: Any) -> Iterator[None]:
    """Let the reset of robosuite's ``env`` draw objects around the fixtures as they are.

    Fixtures belong to the model, which all episodes of a scene share. LIBERO adds the position of
    a fixture's site to that of the fixture, as if its body were still where the task's model has
    it, so it is put there for the draw; the reset then places it.
    """
    model, fixed = env.sim.model, []
    for sampler in env.placement_initializer.samplers.values():
        fixtures = {each.name: each for each in sampler.mujoco_objects if each.name in env.fixtures_dict}
        if len(fixtures) < len(sampler.mujoco_objects):
            continue
        placed = {}
        for name, fixture in fixtures.items():
            body, element = model.body_name2id(fixture.root_body), fixture.get_obj()
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

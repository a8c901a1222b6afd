"""Objects that are not part of a task, as in LIBERO-Plus' layout dimension (arXiv 2510.13626).

A task with distractors has a model of its own, which holds every object that may be drawn; those
that an episode does not show are parked: invisible, without contacts, at rest. Tasks without
distractors so keep LIBERO's model, whose numbers do not change, and a reset compiles nothing.
(With a model per draw, each of the episodes under way in a process would take 0.4 to 0.9 GB.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .perturbations import CAMERA, Draw
from .placement import ATTEMPTS, drawn_from

Rectangles = NDArray[np.float64]

GROCERIES = (
    *(
        "alphabet_soup",
        "bbq_sauce",
        "butter",
        "chocolate_pudding",
        "cookies",
        "cream_cheese",
        "ketchup",
        "macaroni_and_cheese",
    ),
    *("milk", "orange_juice", "popcorn", "salad_dressing", "tomato_sauce"),
)
"""LIBERO's packaged food, the kind of objects that LIBERO-Plus adds."""
PREFIX = "distractor_"
FIELDS = ("geom_contype", "geom_conaffinity", "geom_group", "dof_damping")
"""Fields of MuJoCo's model that differ between a parked object and one that is shown."""
PARKED_M = -2.0
"""Height of parked objects (m): below everything that the scripted expert looks at."""
PARKED_DAMPING = 1e9
"""Damping that holds a parked object (N s/m): it falls by 1e-8 m in an episode."""
HIDDEN_GROUP = 0
"""Group of geometries that is not rendered."""
AREA_M = (-0.4, -0.4), (0.3, 0.4)
"""Where distractors stand, from the centre of the workspace: least and largest x, y.

LIBERO-Plus' stand between (-0.45, -0.3) and (0.3, 0.4).
"""
GAP_M = 0.03
"""Least horizontal distance to the task's objects, fixtures and regions."""
PLACES = 1000
"""Places that are drawn for an object; those with room are tried, up to ``placement.ATTEMPTS``."""
LIFTS_M = 0.0, 0.02, 0.04
"""An object that overlaps the workspace where LIBERO's sampler puts it begins so much higher."""
OPENINGS = 4
"""Positions of each door and drawer, between its limits, that a distractor leaves free."""


def choices(held: list[str], instruction: str) -> list[str]:
    """Return the objects that the scene does not hold and the instruction does not name.

    held: categories of the scene's objects. An object counts as named if the instruction has any
    word of its name.
    """
    named = _words(instruction)
    held = [name.removeprefix("new_") for name in held]
    return [grocery for grocery in GROCERIES if grocery not in held and not named & _words(grocery)]


def _words(text: str) -> set[str]:
    return {word.removesuffix("s") for word in re.split(r"[\W_]+", text.lower())} - {"and", ""}


@contextmanager
def added(instruction: str | None) -> Iterator[None]:
    """Let LIBERO read task files as if they held all ``choices``; None: as they are.

    The files give the added objects no region: LIBERO's own draws stay the same.
    """
    import libero.libero.envs.bddl_utils as bddl

    parse = bddl.robosuite_parse_problem

    def with_choices(path: str) -> dict[str, Any]:
        problem: dict[str, Any] = parse(path)
        for name in choices([*problem["objects"]], instruction or ""):
            problem["objects"][name] = [PREFIX + name]
        return problem

    if instruction is not None:
        bddl.robosuite_parse_problem = with_choices
    try:
        yield
    finally:
        bddl.robosuite_parse_problem = parse


def _box(model: Any, data: Any, root: int) -> Rectangles:
    """Return the horizontal bounds ``[2, 2]`` of a tree of bodies: least and largest x, y (m)."""
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    corners = [
        data.geom_xpos[geom]
        + (model.geom_aabb[geom, :3] + signs * model.geom_aabb[geom, 3:])
        @ data.geom_xmat[geom].reshape(3, 3).T
        for geom in np.flatnonzero(model.body_rootid[model.geom_bodyid] == root)
    ]
    return np.stack([np.concatenate(corners).min(0), np.concatenate(corners).max(0)])[:, :2]


class Distractors:
    """The distractors of robosuite's ``env``, which was built while they were ``added``."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._model = env.sim.model._model
        self._objects = {
            name: env.objects_dict[name]
            for name in sorted(env.objects_dict)
            if name.startswith(PREFIX)
        }
        roots = self._model.body_rootid[self._model.geom_bodyid]
        self._geoms = {
            name: np.flatnonzero(roots == env.obj_body_id[name]) for name in self._objects
        }
        self._positions = {
            name: self._slice(env.sim.model.get_joint_qpos_addr, name) for name in self._objects
        }
        self._speeds = {
            name: self._slice(env.sim.model.get_joint_qvel_addr, name) for name in self._objects
        }
        self._own = {field: getattr(self._model, field).copy() for field in FIELDS}
        for name, position in self._positions.items():
            self._park(name)
            self._model.qpos0[position] = 0, 0, PARKED_M, 1, 0, 0, 0

    def with_parked(self, states: NDArray[np.float64]) -> NDArray[np.float64]:
        """Add parked distractors to states ``[K, 1 + nq + nv]`` of the scene without them."""
        rest = np.concatenate([[0.0], self._model.qpos0, np.zeros(self._model.nv)])
        task = np.ones(len(rest), bool)
        for name in self._objects:
            task[1:][self._positions[name]] = task[1 + self._model.nq :][self._speeds[name]] = False
        full_states = np.tile(rest, (len(states), 1))
        full_states[:, task] = states
        return full_states

    def place(self, drawn: Draw) -> dict[str, NDArray[Any]]:
        """Place as many distractors as the severity says, in the environment's present state.

        There are fewer where no more have room. Returns the model's fields of this episode, by
        name.
        """
        env = self._env
        places = self._regions()
        task = [
            name for name in (*env.objects_dict, *env.fixtures_dict) if name not in self._objects
        ]
        env.sim.forward()
        boxes = [_box(self._model, env.sim.data, env.obj_body_id[name]) for name in task]
        room = np.stack([*places, *boxes])
        count = 0
        for index in drawn.random.permutation(len(self._objects)):
            box = (
                self._placed([*self._objects][index], room, drawn.random)
                if count < drawn.severity
                else None
            )
            if box is not None:
                room = np.concatenate([room, box[None]])
                count = count + 1
        return {field: getattr(self._model, field).copy() for field in FIELDS}

    def _placed(
        self, name: str, occupied: Rectangles, random: np.random.RandomState
    ) -> Rectangles | None:
        """Put an object where it has room, and let it be seen and touched.

        occupied: rectangles ``[K, 2, 2]`` to keep away from. Returns the object's own, or None
        without room: then the object stays parked.
        """
        env = self._env
        position = self._positions[name]
        qpos = self._env.sim.data.qpos
        for field in FIELDS:
            where = self._speeds[name] if field == "dof_damping" else self._geoms[name]
            getattr(self._model, field)[where] = self._own[field][where]
        qpos[position] = *random.uniform(*AREA_M) + env.workspace_offset[:2], *self._posture(name)
        env.sim.forward()
        around = _box(self._model, env.sim.data, env.obj_body_id[name]) - qpos[position][:2]
        places = random.uniform(*AREA_M, (PLACES, 2)) + env.workspace_offset[:2]
        low, high = places[:, None] + around[0], places[:, None] + around[1]
        aside = np.maximum(np.maximum(occupied[:, 0] - high, low - occupied[:, 1]), 0)
        height = qpos[position][2]
        for point in places[(np.linalg.norm(aside, axis=2) > GAP_M).all(1)][:ATTEMPTS]:
            for lift in LIFTS_M:
                qpos[position][:3] = *point, height + lift
                env.sim.forward()
                if not self._touches(name):
                    break
            else:
                continue
            if self._visible(name) and not self._hinders(name):
                return np.asarray(around + point)
        qpos[position] = self._model.qpos0[position]
        self._park(name)
        return None

    def _park(self, name: str) -> None:
        model = self._model
        geoms = self._geoms[name]
        model.geom_contype[geoms] = model.geom_conaffinity[geoms] = 0
        model.geom_group[geoms] = HIDDEN_GROUP
        model.dof_damping[self._speeds[name]] = PARKED_DAMPING

    def _posture(self, name: str) -> tuple[float, ...]:
        """Return height and quaternion that LIBERO's sampler gives an object on the workspace."""
        from libero.libero.envs.regions import REGION_SAMPLERS

        (sampler,) = REGION_SAMPLERS[self._env.parsed_problem["problem_name"]].values()
        thing = self._objects[name]
        somewhere = [(-1.0, 1.0)]
        keywords = {
            "rotation": thing.rotation,
            "rotation_axis": thing.rotation_axis,
            "reference_pos": self._env.workspace_offset,
        }
        with drawn_from(0):
            (((_, _, z), quaternion, _),) = (
                sampler(name, thing, x_ranges=somewhere, y_ranges=somewhere, **keywords)
                .sample()
                .values()
            )
        return z, *quaternion

    def _regions(self) -> list[Rectangles]:
        """Return the task's regions of the workspace ``[2, 2]``: least and largest x, y (m)."""
        env = self._env
        own = [
            region
            for region in env.parsed_problem["regions"].values()
            if region["target"] == env.workspace_name
        ]
        return [
            np.reshape(bounds, (2, 2)) + env.workspace_offset[:2]
            for region in own
            for bounds in region["ranges"]
        ]

    def _touches(self, name: str) -> bool:
        data = self._env.sim.data
        return any(
            np.isin([contact.geom1, contact.geom2], self._geoms[name]).any()
            for contact in data.contact[: data.ncon]
        )

    def _hinders(self, name: str) -> bool:
        """Whether the object is in the way of a door or a drawer."""
        env = self._env
        model = self._env.sim.model
        joints = [
            model.joint_name2id(joint)
            for fixture in env.fixtures_dict.values()
            for joint in fixture.joints
        ]
        before = env.sim.data.qpos.copy()
        hinders = False
        for joint in joints:
            for share in np.linspace(0, 1, OPENINGS):
                env.sim.data.qpos[model.jnt_qposadr[joint]] = model.jnt_range[joint] @ [
                    1 - share,
                    share,
                ]
                env.sim.forward()
                hinders |= self._touches(name)
            env.sim.data.qpos[:] = before
        env.sim.forward()
        return hinders

    def _visible(self, name: str) -> bool:
        """Whether the line from the camera to the object's centre ends at the object."""
        import mujoco

        data = self._env.sim.data._data
        model = self._model
        camera = self._env.sim.model.camera_name2id(CAMERA)
        geoms = [geom for geom in self._geoms[name] if model.geom_group[geom] != HIDDEN_GROUP]
        line = data.geom_xpos[geoms[0]] - data.cam_xpos[camera]
        x, y, z = data.cam_xmat[camera].reshape(3, 3).T @ line
        if max(abs(x), abs(y)) > -z * np.tan(np.deg2rad(model.cam_fovy[camera]) / 2):
            return False
        groups = np.array([group != HIDDEN_GROUP for group in range(6)], np.uint8)
        hit = np.zeros(1, np.int32)
        mujoco.mj_ray(model, data, data.cam_xpos[camera], line, groups, True, -1, hit)
        return int(hit[0]) in geoms

    def _slice(self, address: Any, name: str) -> slice:
        return slice(*address(self._objects[name].joints[-1]))

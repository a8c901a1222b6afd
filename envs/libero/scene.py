"""Run one LIBERO task in robosuite, with any number of episodes under way in one environment.

robosuite keeps one episode per environment, which takes a second to build and some hundred
megabytes. Here episodes share an environment: each has its own MuJoCo state and its own copy of the
Python state that robosuite keeps, and both are swapped in for its turn.
"""

from __future__ import annotations

import os
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.config.errors import UserError

from . import placement
from .background import Background
from .distractors import FIELDS, Distractors, added
from .episode import CONTROL_HZ, PERIOD, TIMESTEP, Episode
from .perturbations import CAMERA, VISUAL, Draw, look
from .placement import deep_contacts, drawn_from, until_placed

SUBSTEPS = int(PERIOD / TIMESTEP)
WAIT = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""No-op action at the start of an episode, gripper open."""
HOLD = np.zeros(7)
"""The same, but the gripper stays as it is."""

LOOKED_AT = [
    *("qpos", "xpos", "xquat", "xmat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
    *("cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
]
"""MjData fields that determine images and proprioception."""


def import_libero() -> Any:
    """Import LIBERO's ``ControlEnv`` without log output or files outside our folders."""
    spec = find_spec("robosuite")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("robosuite is not installed: pip install 'rlinf-vla[libero]'")
    settings = types.ModuleType(
        "robosuite.macros_private"
    )  # user settings, whose absence robosuite reports
    settings.CONSOLE_LOGGING_LEVEL = "ERROR"  # type: ignore[attr-defined]
    settings.FILE_LOGGING_LEVEL = None  # type: ignore[attr-defined]  # one robosuite.log for all users of the machine
    settings.MUJOCO_GPU_RENDERING = False  # type: ignore[attr-defined]  # would overrule MUJOCO_GL
    # Otherwise numba writes to the user's home directory.
    settings.CACHE_NUMBA = os.access(Path(spec.submodule_search_locations[0], "utils"), os.W_OK)  # type: ignore[attr-defined]
    sys.modules[settings.__name__] = settings
    os.environ.setdefault(
        "MPLCONFIGDIR", str(Path(sys.prefix, "share", "rlinf-vla", "matplotlib"))
    )  # LIBERO imports it, unused
    from libero.libero.envs.env_wrapper import ControlEnv

    return ControlEnv


class Scene:
    """A task's robosuite environment, shared by its episodes. OpenGL starts with the first image.

    cameras: name -> LIBERO's name. seed: seed of LIBERO's random draws (fixture placement).
    instruction: the scene has distractors, which this instruction does not name; None: it has none.
    """

    def __init__(
        self,
        bddl: str,
        init_states: str,
        *,
        seed: int,
        cameras: dict[str, str],
        size: int,
        rendering: str,
        instruction: str | None = None,
    ) -> None:
        import mujoco

        self._mujoco = mujoco
        self.seed = seed
        self._cameras = cameras
        self._size = size
        self.exact = rendering == "exact"
        self._plain = rendering == "fast"
        """Render every control step; render without antialiasing and reflections."""
        self._context: Any = None
        with np.load(init_states, allow_pickle=False) as stored:
            self.init_states: NDArray[np.float64] = stored["states"]
        make = import_libero()
        keywords = {
            "use_camera_obs": False,
            "has_offscreen_renderer": False,
            "hard_reset": False,
            "ignore_done": True,
        }
        with drawn_from(seed), added(instruction):
            self.env = until_placed(
                lambda: make(bddl_file_name=bddl, control_freq=CONTROL_HZ, **keywords)
            ).env
        self._robot = self.env.robots[0]
        self._model = self.env.sim.model._model
        self._site = self._robot.eef_site_id
        self._body = self.env.sim.model.body_name2id(self._robot.robot_model.eef_name)
        self._fingers = self._robot._ref_gripper_joint_pos_indexes
        self._playing: Episode | None = None
        self._overlapping: set[tuple[int, int]] | None = None
        self._distractors = None if instruction is None else Distractors(self.env)
        if self._distractors is not None:
            self.init_states = self._distractors.with_parked(self.init_states)
        changing = VISUAL if self._distractors is None else (*VISUAL, *FIELDS)
        self._own_look = {name: getattr(self._model, name).copy() for name in changing}
        self._background: Background | None = None
        unknown = [
            camera for camera in cameras.values() if camera not in self.env.sim.model.camera_names
        ]
        if unknown:
            names = ", ".join(sorted(self.env.sim.model.camera_names))
            raise UserError(
                f"env.cameras: {unknown[0]} is not a camera of this scene: use base, wrist, or one of {names}"
            )

    def begin(
        self,
        number: int,
        wait_steps: int,
        again: Episode | None = None,
        drawn: bool = False,
        perturbed: Draw | None = None,
        suite: str = "",
        wait_gripper: str = "open",
    ) -> Episode:
        """Begin an episode from the stored initial state ``number``, or one ``drawn`` by this seed.

        again: a finished episode whose memory is reused. perturbed: what is perturbed besides
        instruction and images. suite: the suite that the task is from, for ``perturbed``.
        """
        mujoco, env = self._mujoco, self.env
        data, seen = (
            (mujoco.MjData(self._model), mujoco.MjData(self._model))
            if again is None
            else (again.data, again.seen)
        )
        episode = Episode(data, seen)
        if perturbed is not None:
            self._perturb_look(episode, perturbed)
        self._put_in_place(episode)
        self._robot.gripper.current_action = np.zeros(
            self._robot.gripper.dof
        )  # robosuite's soft reset omits it
        if drawn:
            placement.draw(env, number, self._overlaps())
        else:
            with drawn_from(self.seed):
                until_placed(env.reset)
            env.sim.set_state_from_flattened(self.init_states[number])
        if perturbed is not None and perturbed.dimension == "initial_state":
            placement.move_arm(env, perturbed)
        elif perturbed is not None and perturbed.dimension == "layout":
            placement.displace(env, perturbed, suite)
        elif perturbed is not None and self._distractors is not None:
            episode.look = self._distractors.place(perturbed)
        env.sim.forward()
        env._check_success()
        env._post_process()
        self._look(episode)
        for _ in range(wait_steps):
            self.step(episode, WAIT if wait_gripper == "open" else HOLD)
        return episode

    def _perturb_look(self, episode: Episode, perturbed: Draw) -> None:
        if perturbed.dimension == "background":
            episode.textures = self._backgrounds().choose(perturbed)
            return
        model = self.env.sim.model
        self._show({})
        episode.look = look(
            self._model, perturbed, model.camera_name2id(CAMERA), self.env.workspace_offset
        )

    def _backgrounds(self) -> Background:
        if self._background is None:
            self._background = Background(self._model)
        return self._background

    def _show(self, look: dict[str, NDArray[Any]]) -> None:
        """Give the model the visual fields of an episode, and its own where ``look`` has none."""
        for name, own in self._own_look.items():
            getattr(self._model, name)[:] = look.get(name, own)

    def _overlaps(self) -> set[tuple[int, int]]:
        """Return the pairs of geometries that overlap deeply in a stored initial state."""
        if self._overlapping is None:
            self._overlapping = set()
            for state in self.init_states:
                self.env.sim.set_state_from_flattened(state)
                self._overlapping |= deep_contacts(self.env)
        return self._overlapping

    def step(self, episode: Episode, action: NDArray[Any]) -> bool:
        """Execute one control step, ``action`` ``[7]`` as in robosuite. Returns the task's success.

        Bit-identical to ``env.step``, without the forty observables that it updates in each
        substep, and with one evaluation of the dynamics instead of three: robosuite's environment
        and controller call ``mj_forward`` where only positions and velocities are needed, and
        ``mj_step`` then starts over.
        """
        self._put_in_place(episode)
        env = self.env
        model = self._model
        data = episode.data
        mujoco = self._mujoco
        env.sim.forward = lambda: mujoco.mj_step1(model, data)
        for substep in range(SUBSTEPS):
            env._pre_action(action, substep == 0)
            mujoco.mj_step2(model, data)
            if episode.clock.tick():
                self._look(episode)
        del env.sim.forward
        episode.steps += 1
        env._post_process()
        return bool(env._check_success())

    def proprioception(self, episode: Episode) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Proprioception at robosuite's last sample.

        Returns tool centre point ``[3]`` (m), quaternion ``[4]`` (w x y z) and finger joints
        ``[2]`` (m).
        """
        seen = episode.seen
        return (
            seen.site_xpos[self._site].copy(),
            seen.xquat[self._body].copy(),
            seen.qpos[self._fingers],
        )

    def images(self, episode: Episode) -> dict[str, NDArray[np.uint8]]:
        """Images at robosuite's last sample: name -> uint8 ``[H, W, 3]``, the bottom row first."""
        if episode.images is not None:
            return episode.images
        views = [
            self._rendered(episode, episode.seen, episode.seen_sites, camera, self._size)
            for camera in self._cameras.values()
        ]
        return dict(zip(self._cameras, views, strict=True))

    def picture(self, episode: Episode, size: int) -> NDArray[np.uint8]:
        """Image of the present for display: uint8 ``[size, size, 3]``, the bottom row first."""
        self._put_in_place(episode)
        return self._rendered(
            episode, episode.data, self._model.site_rgba.copy(), "agentview", size
        )

    def at(self, episode: Episode) -> Any:
        """Return robosuite's environment with this episode swapped in."""
        self._put_in_place(episode)
        return self.env

    def close(self) -> None:
        """Free everything now, not at garbage collection.

        Freeing OpenGL objects while another scene's context is current would free that scene's
        objects.
        """
        if self._context is not None:
            self._context.gl_ctx.make_current()
            del self._context
        self._playing = None
        self.env.close()
        del self.env, self._robot, self._model

    def _put_in_place(self, episode: Episode) -> None:
        if self._playing is episode:
            return
        if self._playing is not None:
            last = self._playing
            last.robot = dict(vars(self._robot))
            last.grip = self._robot.gripper.current_action
            last.sites = self._model.site_rgba.copy()
        self.env.sim.data._data = episode.data
        self._show(episode.look)
        if episode.sites is not None:
            vars(self._robot).update(episode.robot)
            self._robot.gripper.current_action = episode.grip
            self._model.site_rgba[:] = episode.sites
        self._playing = episode

    def _look(self, episode: Episode) -> None:
        for name in LOOKED_AT:  # (mj_copyData is not in MuJoCo 2.3.7's Python)
            getattr(episode.seen, name)[:] = getattr(episode.data, name)
        episode.seen_sites = self._model.site_rgba.copy()
        if self.exact and self._cameras:
            episode.images = None
            episode.images = self.images(episode)

    def _rendered(
        self, episode: Episode, data: Any, sites: NDArray[Any], camera: str, size: int
    ) -> NDArray[np.uint8]:
        self._put_in_place(episode)
        if self._context is None:
            self._begin_drawing()
        sim = self.env.sim
        now = self._model.site_rgba.copy()
        self._model.site_rgba[:] = sites
        sim.data._data = data
        self._context.gl_ctx.make_current()  # robosuite assumes one environment per process
        if self._background is not None:
            self._background.paint(self._context, episode.textures)
        try:
            image: NDArray[np.uint8] = sim.render(camera_name=camera, width=size, height=size)
        finally:
            sim.data._data = episode.data
            self._model.site_rgba[:] = now
        return image

    def _begin_drawing(self) -> None:
        """Start OpenGL as robosuite does, without ``mj_forward``, which would change results."""
        from robosuite.utils.binding_utils import MjRenderContextOffscreen

        if os.environ.get("MUJOCO_GL") == "disable":
            raise UserError(
                "no OpenGL that renders without a screen: see `rlinf-vla doctor`, or disable videos: evaluation.filmed=0"
            )
        sim = self.env.sim
        mujoco = self._mujoco
        sim.forward = lambda: None
        try:
            context = MjRenderContextOffscreen(sim, device_id=-1)
        finally:
            del sim.forward
        # visual geoms, not collision geoms
        context.vopt.geomgroup[0] = 0
        context.vopt.geomgroup[1] = 1
        if self._plain:
            context.con.free()
            self._model.vis.quality.offsamples = 0
            self._model.vis.global_.offwidth = self._model.vis.global_.offheight = max(
                self._size, 256
            )
            context._set_mujoco_context_and_buffers()
            context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._context = context

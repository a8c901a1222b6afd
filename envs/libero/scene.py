"""One LIBERO task as robosuite runs it, and any number of episodes of it under way at once.

robosuite keeps one episode per environment, and an environment takes a second to build and some hundred megabytes. Here episodes share
it: each has its own MuJoCo state and its own of the few things that robosuite remembers in Python, and they are put in place for its turn.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..serving import Unusable

T = TypeVar("T")

CONTROL_HZ = 20
TIMESTEP, PERIOD = 0.002, 1.0 / CONTROL_HZ
SUBSTEPS = int(PERIOD / TIMESTEP)
WAIT = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""What an episode begins with: nothing, gripper open."""

LOOKED_AT = [
    *("qpos", "xpos", "xquat", "xmat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
    *("cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
]
"""Of MjData: what decides about images and proprioception."""


def import_libero() -> Any:
    """LIBERO's ``ControlEnv``. Imported quietly, and without files in places that are not ours."""
    spec = find_spec("robosuite")
    if spec is None or not spec.submodule_search_locations:
        raise Unusable("robosuite is not installed: pip install 'rlinf-vla[libero]'")
    settings = types.ModuleType("robosuite.macros_private")  # where robosuite looks for a user's settings, and grumbles if there are none
    settings.CONSOLE_LOGGING_LEVEL = "ERROR"  # type: ignore[attr-defined]
    settings.FILE_LOGGING_LEVEL = None  # type: ignore[attr-defined]  # one robosuite.log for all users of the machine
    settings.MUJOCO_GPU_RENDERING = False  # type: ignore[attr-defined]  # would overrule MUJOCO_GL
    # Else numba would take the user's home.
    settings.CACHE_NUMBA = os.access(Path(spec.submodule_search_locations[0], "utils"), os.W_OK)  # type: ignore[attr-defined]
    sys.modules[settings.__name__] = settings
    os.environ.setdefault("MPLCONFIGDIR", str(Path(sys.prefix, "share", "rlinf-vla", "matplotlib")))  # LIBERO imports it for nothing
    from libero.libero.envs.env_wrapper import ControlEnv

    return ControlEnv


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """LIBERO draws from numpy's global generator: lend it ``seed``, then put everything back."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def until_placed(attempt: Callable[[], T]) -> T:
    """What LIBERO draws may not fit; it then draws again. (Its own loop swallows every error and never ends.)"""
    from robosuite.utils.errors import RandomizationError

    for _ in range(100):
        try:
            return attempt()
        except RandomizationError:
            continue
    raise RuntimeError("LIBERO found no place for its objects in 100 attempts")


class SamplingClock:
    """When robosuite looks at the world: once in a control step, but not at its end.

    The same arithmetic as ``robosuite.utils.observables.Observable``, in the same floating point, because published results have what it
    gives: after a reset two looks are forced, so that from then on it looks at the second last of the 25 substeps.
    """

    def __init__(self) -> None:
        self._time, self._looked = 0.0, False
        for _ in range(2):  # robosuite's reset, then LIBERO's initial state
            self._time += TIMESTEP
        self._looked = True

    def tick(self) -> bool:
        """A substep is over. Is it time to look?"""
        self._time += TIMESTEP
        look = not self._looked and self._time <= PERIOD
        self._looked |= look
        if self._time >= PERIOD:
            look |= not self._looked
            self._time %= PERIOD
            self._looked = False
        return look


@dataclass
class Episode:
    """One episode under way in a :class:`Scene`."""

    data: Any
    """MjData: now."""
    seen: Any
    """MjData: when robosuite last looked."""
    clock: SamplingClock = field(default_factory=SamplingClock)
    robot: dict[str, Any] = field(default_factory=dict)
    """Attributes of robosuite's robot: its controller and what it remembers."""
    grip: Any = None
    """What the gripper's integrator has come to."""
    sites: Any = None
    """Colours of the model's sites, now: the flame of a stove is one."""
    seen_sites: Any = None
    images: dict[str, NDArray[np.uint8]] | None = None
    """Where they are rendered at every control step: those of the last."""


class Scene:
    """cameras: name -> LIBERO's name. seed: of what LIBERO draws (where fixtures stand). OpenGL is begun with the first picture."""

    def __init__(self, bddl: str, init_states: str, *, seed: int, cameras: dict[str, str], size: int, rendering: str) -> None:
        import mujoco

        self._mujoco = mujoco
        self.seed, self._cameras, self._size = seed, cameras, size
        self.exact, self._plain = rendering == "exact", rendering == "fast"
        """Render at every control step; without antialiasing and reflections."""
        self._context: Any = None
        with np.load(init_states, allow_pickle=False) as stored:
            self.init_states: NDArray[np.float64] = stored["states"]
        make = import_libero()
        keywords = {"use_camera_obs": False, "has_offscreen_renderer": False, "hard_reset": False, "ignore_done": True}
        with drawn_from(seed):
            self.env = until_placed(lambda: make(bddl_file_name=bddl, control_freq=CONTROL_HZ, **keywords)).env
        self._robot = self.env.robots[0]
        self._model = self.env.sim.model._model
        self._site = self._robot.eef_site_id
        self._body = self.env.sim.model.body_name2id(self._robot.robot_model.eef_name)
        self._fingers = self._robot._ref_gripper_joint_pos_indexes
        self._playing: Episode | None = None
        unknown = [camera for camera in cameras.values() if camera not in self.env.sim.model.camera_names]
        if unknown:
            known = ", ".join(sorted(self.env.sim.model.camera_names))
            raise Unusable(f"env.cameras: {unknown[0]} is no camera of this scene: base, wrist, or one of {known}")

    def begin(self, number: int, wait_steps: int, again: Episode | None = None) -> Episode:
        """An episode from the stored initial state ``number``. ``again``: one that is over, whose memory may be used."""
        mujoco, env = self._mujoco, self.env
        data, seen = (mujoco.MjData(self._model), mujoco.MjData(self._model)) if again is None else (again.data, again.seen)
        episode = Episode(data, seen)
        self._put_in_place(episode)
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)  # robosuite's soft reset forgets it
        with drawn_from(self.seed):
            until_placed(env.reset)
        env.sim.set_state_from_flattened(self.init_states[number])
        env.sim.forward()
        env._check_success()
        env._post_process()
        self._look(episode)
        for _ in range(wait_steps):
            self.step(episode, WAIT)
        return episode

    def step(self, episode: Episode, action: NDArray[Any]) -> bool:
        """One control step, ``action`` ``[7]`` in robosuite's own words. Returns whether the task is done.

        As ``env.step`` does it, bit for bit, without the forty observables that it would update in each substep, and with one evaluation
        of the dynamics for robosuite's three: its environment and its controller call ``mj_forward`` where positions and velocities
        are all they need, then ``mj_step`` begins again from there.
        """
        self._put_in_place(episode)
        env, model, data, mujoco = self.env, self._model, episode.data, self._mujoco
        env.sim.forward = lambda: mujoco.mj_step1(model, data)
        for substep in range(SUBSTEPS):
            env._pre_action(action, substep == 0)
            mujoco.mj_step2(model, data)
            if episode.clock.tick():
                self._look(episode)
        del env.sim.forward
        env._post_process()
        return bool(env._check_success())

    def proprioception(self, episode: Episode) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """When robosuite last looked: tool centre point ``[3]`` (m), its quaternion ``[4]`` (w x y z), finger joints ``[2]`` (m)."""
        seen = episode.seen
        return seen.site_xpos[self._site].copy(), seen.xquat[self._body].copy(), seen.qpos[self._fingers]

    def images(self, episode: Episode) -> dict[str, NDArray[np.uint8]]:
        """When robosuite last looked: name -> uint8 ``[H, W, 3]``, the first row at the bottom."""
        if episode.images is not None:
            return episode.images
        views = [self._rendered(episode, episode.seen, episode.seen_sites, camera, self._size) for camera in self._cameras.values()]
        return dict(zip(self._cameras, views, strict=True))

    def picture(self, episode: Episode, size: int) -> NDArray[np.uint8]:
        """Now, for people: uint8 ``[size, size, 3]``, the first row at the bottom."""
        self._put_in_place(episode)
        return self._rendered(episode, episode.data, self._model.site_rgba.copy(), "agentview", size)

    def at(self, episode: Episode) -> Any:
        """robosuite's environment, with this episode in place."""
        self._put_in_place(episode)
        return self.env

    def close(self) -> None:
        """At once, not when Python collects garbage: what is freed while another scene's OpenGL context is current is that scene's."""
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
            last.robot, last.grip, last.sites = dict(vars(self._robot)), self._robot.gripper.current_action, self._model.site_rgba.copy()
        self.env.sim.data._data = episode.data
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

    def _rendered(self, episode: Episode, data: Any, sites: NDArray[Any], camera: str, size: int) -> NDArray[np.uint8]:
        self._put_in_place(episode)
        if self._context is None:
            self._begin_drawing()
        sim, now = self.env.sim, self._model.site_rgba.copy()
        self._model.site_rgba[:] = sites
        sim.data._data = data
        self._context.gl_ctx.make_current()  # robosuite takes for granted that there is one environment in a process
        try:
            image: NDArray[np.uint8] = sim.render(camera_name=camera, width=size, height=size)
        finally:
            sim.data._data = episode.data
            self._model.site_rgba[:] = now
        return image

    def _begin_drawing(self) -> None:
        """As robosuite does it, without ``mj_forward``, which would move what comes after it by a bit."""
        from robosuite.utils.binding_utils import MjRenderContextOffscreen

        if os.environ.get("MUJOCO_GL") == "disable":
            raise Unusable("no OpenGL that renders without a screen: see `rlinf-vla doctor`, or do without films: evaluation.filmed=0")
        sim, mujoco = self.env.sim, self._mujoco
        sim.forward = lambda: None
        try:
            context = MjRenderContextOffscreen(sim, device_id=-1)
        finally:
            del sim.forward
        context.vopt.geomgroup[0], context.vopt.geomgroup[1] = 0, 1  # what is seen, not what collides
        if self._plain:
            context.con.free()
            self._model.vis.quality.offsamples = 0
            self._model.vis.global_.offwidth = self._model.vis.global_.offheight = max(self._size, 256)
            context._set_mujoco_context_and_buffers()
            context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._context = context

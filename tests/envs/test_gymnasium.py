"""Gymnasium environments: the applicable part of the conformance suite, and all mistakes in their settings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.envs.gymnasium.config import GymnasiumConfig
from rlinf_vla.envs.gymnasium.plugin import plugin
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance, episodes
from tests.skips import needs

pytestmark = needs("maniskill")

TINY: dict[str, Any] = {
    "id": "tests.envs.tiny_gym:Tiny-v0",
    "images": {"base": "rgb"},
    "state": ["position"],
    "success": "is_success",
    "instruction": "go to the middle",
}


@pytest.fixture(autouse=True, scope="module")
def here() -> Any:
    """``my_module:MyEnv-v0`` is imported from where the command runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        yield


def make(groups: int = 1, **config: Any) -> list[VectorEnv]:
    return plugin.create(
        GymnasiumConfig(
            **{"num_envs": groups * NUM_ENVS, "episode_limit": EPISODE_LIMIT, **config}
        ),
        groups,
    )


class TestTiny(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return make(groups=2, **TINY)

    def test_success_ends_the_episode(self, env: VectorEnv) -> None:
        state = env.reset(episodes(1, 2, 3)).state
        for _ in range(EPISODE_LIMIT):
            result = env.step((-state / 0.2).clamp(-1, 1)[:, None])
            state = result.observation.state
            if result.success.any():
                break
        won = result.success[:, 0]
        assert won.any()
        assert torch.equal(result.terminated[:, 0], won)

    def test_one_is_the_bound_of_the_action_space(self, env: VectorEnv) -> None:
        before = env.reset(episodes(1, 2, 3)).state
        after = env.step(torch.tensor([1.0, -3.0]).expand(NUM_ENVS, 1, 2)).observation.state
        assert torch.allclose(
            after - before, torch.tensor([0.2, -0.2]).expand(NUM_ENVS, 2), atol=1e-6
        )


class TestPendulum(VectorEnvConformance):
    """State only."""

    @classmethod
    def make(cls) -> list[VectorEnv]:
        return make(groups=2, id="Pendulum-v1")

    def test_a_seed_matters(self, env: VectorEnv) -> None:
        state = env.reset(episodes(31, 32, 31)).state
        assert torch.equal(state[0], state[2]) and not torch.equal(state[0], state[1])


@pytest.mark.simulator
@pytest.mark.skipif(
    find_spec("gymnasium_robotics") is None, reason="gymnasium-robotics is not installed"
)
class TestFetch(VectorEnvConformance):
    """docs/metaworld.md: tasks of gymnasium-robotics need no code."""

    @classmethod
    def make(cls) -> list[VectorEnv]:
        observed = {"state": ["observation", "desired_goal"], "success": "is_success"}
        return make(groups=2, id="gymnasium_robotics:FetchPush-v4", **observed)


def test_asynchronous_environments_are_the_same() -> None:
    envs = [make(**TINY, vectorization=mode)[0] for mode in ("sync", "async")]
    action = torch.full((NUM_ENVS, 2, 2), 0.3)
    seen = []
    for env in envs:
        env.reset(episodes(1, 2, 3))
        env.reset(episodes(4, 5, 6), torch.tensor([False, True, False]))
        seen.append(env.step(action).observation)
        env.close()
    assert torch.equal(seen[0].state, seen[1].state) and torch.equal(
        seen[0].images["base"], seen[1].images["base"]
    )


def test_a_rendered_frame_can_be_an_image() -> None:
    (env,) = make(**{**TINY, "images": {"base": "@render"}}, render=True)
    assert env.reset(episodes(1, 2, 3)).images["base"].eq(7).all()
    assert env.render(0).shape == (4, 4, 3)
    env.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "Pendulm-v1"}, "env.id=Pendulm-v1 cannot be made"),
        ({"id": "nowhere:Tiny-v0"}, "env.id=nowhere:Tiny-v0 cannot be made"),
        ({"id": "CartPole-v1"}, "only continuous vectors"),
        ({"kwargs": {"size": 3}}, "cannot be made"),
        ({"vectorization": "vector_entry_point"}, "cannot be made"),
        (
            {"vectorization": "asink"},
            "env.vectorization=asink is not known: use sync, async or vector_entry_point",
        ),
        ({"images": {"base": "rgbd"}}, "env.images.base=rgbd is unknown: did you mean rgb?"),
        (
            {"images": {"base": "depth"}},
            "env.images.base=depth is float32 [6, 8], not uint8 [height, width, 3]",
        ),
        ({"images": {"base": "@render"}}, "needs env.render=true"),
        ({"state": ["positon"]}, "env.state=positon is unknown: did you mean position?"),
        ({"images": {}, "state": []}, "observes depth, position, rgb: name some of it"),
        ({"id": "Pendulum-v1"}, "is one array, without keys"),
        ({"episode_limit": 0}, "env.episode_limit=0 is out of range"),
        ({"control_hz": 0.0}, "env.control_hz=0.0 is out of range"),
        ({"instruction": " "}, "env.instruction is empty"),
        ({"num_envs": 3, "processes": 2}, "=3 cannot be shared by 2 groups"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_values(GymnasiumConfig(**{**TINY, **config}), "env.")
        make(**{**TINY, **config})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_environment_that_truncates_episodes_itself() -> None:
    (env,) = make(**TINY, kwargs={"truncates": True})
    env.reset(episodes(1, 2, 3))
    result = env.step(torch.zeros(NUM_ENVS, 2, 2))
    assert result.truncated.tolist() == result.valid.tolist() == [[True, False]] * NUM_ENVS
    assert not result.terminated.any() and not result.success.any()
    assert result.fault is not None and not result.fault.any()
    env.reset(episodes(1, 2, 3))
    env.close()


def test_importing_the_plugin_imports_no_gymnasium() -> None:
    import subprocess
    import sys

    code = "import sys, rlinf_vla.envs.gymnasium.plugin; sys.exit('gymnasium' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Test a plug-in with pytest: inherit the conformance suite of its kind, and say how to make it.

::

    from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance

    class TestMyEnv(VectorEnvConformance):
        @classmethod
        def make(cls):
            config = MyConfig(num_envs=2 * NUM_ENVS, episode_limit=EPISODE_LIMIT)
            return plugin.create(config, groups=2)

``algorithm``, ``env``, ``policy``, ``reward`` and ``robot`` hold the suites, ``toy_env`` and
``toy_policy`` a small environment and policy. The suites need pytest: ``pip install
rlinf-vla[testing]``.
"""

import sys

SUITES = ("algorithm", "config", "env", "policy", "policy_calls", "reward", "robot", "robot_motion")

if (pytest := sys.modules.get("pytest")) is not None:  # so that failed assertions show their values
    pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))

from __future__ import annotations

import io

import pytest

from rlinf_vla.benchmarks.simulators.timed import timed
from rlinf_vla.core import plugins

MODULES = plugins.Installed("rlinf_vla.benchmarks")


@pytest.mark.parametrize("name", ["genesis", "libero", "maniskill", "metaworld"])
def test_variants_are_configurations_of_the_simulator(name: str) -> None:
    config = plugins.envs()[name].Config(num_envs=1, processes=1)
    found = MODULES[name].variants(config)
    assert len(found) > 3 and len({str(each) for each in found.values()}) == len(found)
    assert all(
        type(each) is type(config) and each.num_envs == 1 and each.processes is None
        for each in found.values()
    )


def test_the_first_episode_is_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    timed(lambda number: print(f"episode {number}"), 2)
    assert capsys.readouterr().out.split("\n") == [
        "episode 0",
        "begin",
        "episode 1",
        "episode 2",
        "end",
        "",
    ]

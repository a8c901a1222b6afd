"""A missing simulator is optional: ``rlinf-vla doctor`` reports it without an error."""

from __future__ import annotations

import pytest

from rlinf_vla.core import plugins
from rlinf_vla.envs import options
from rlinf_vla.envs.libero import suites

ASKS = dict.fromkeys(
    ("genesis", "gymnasium", "isaaclab", "maniskill", "metaworld", "newton"), options
) | {"libero": suites}
"""The module that looks for each plug-in's simulator."""


def test_all_but_text_have_a_simulator() -> None:
    assert plugins.envs().keys() - ASKS.keys() == {"dialogue"}


@pytest.mark.parametrize("name", sorted(ASKS))
def test_a_simulator_that_is_not_installed_is_optional(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ASKS[name], "find_spec", lambda module: None)
    suites.root.cache_clear()
    try:
        (check,) = plugins.envs()[name].diagnose()
    finally:
        suites.root.cache_clear()
    assert (
        not check.ok and check.detail.startswith("optional: ") and "not installed" in check.detail
    )
    assert check.fix.startswith("pip install")

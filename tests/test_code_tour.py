"""docs/code_tour.md lists the files of the engine that a training run executes until its first checkpoint."""

from __future__ import annotations

import re

import pytest

from tests.skips import needs
from tests.sources import ROOT
from tools.sizes import executed

pytestmark = [pytest.mark.machine, pytest.mark.nightly, needs("maniskill")]


def test_the_tour_passes_what_a_run_executes() -> None:
    page = (ROOT / "docs" / "code_tour.md").read_text()
    tour, _, _ = page.partition("By default the run first evaluates")
    listed = re.findall(r"\]\(\.\./(rlinf_vla/[\w/]+\.py)\)", tour)
    assert len(listed) == len(set(listed)), "no file twice"
    assert sorted(listed) == executed()

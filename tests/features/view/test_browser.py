"""The page in Chromium: curves, films and frames, while a run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data import episodes
from tests.features.view.conftest import Viewed, log
from tests.skips import needs, require

CHROMIUM = shutil.which("chromium")

pytestmark = [
    needs("serve"),
    needs("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require("browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab in which nothing may go wrong, and that asks for nothing elsewhere."""
    problems: list[str] = []
    tab = browser.new_page(viewport={"width": 1000, "height": 800})
    tab.set_default_timeout(15_000)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    tab.on(
        "request",
        lambda request: (
            problems.append(request.url)
            if not request.url.startswith(("http://127.0.0.1:", "data:"))
            else None
        ),
    )
    yield tab
    tab.close()  # before its server ends, if the test did not fail
    assert problems == []


def until(tab: Any, condition: str) -> None:
    """Wait for a condition in JavaScript; playwright's own way needs a page that may evaluate strings."""
    for _ in range(300):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(50)
    pytest.fail(f"never true: {condition}")


def test_a_run_in_progress(run_dir: Path, viewed: Viewed, tab: Any) -> None:
    """Its name and metrics are HTML, which must stay text."""
    with viewed(run_dir) as page:
        tab.goto(f"http://127.0.0.1:{page.port}/")
        tab.wait_for_selector("#curves canvas")
        assert tab.locator("#curves figure").count() == 2
        tab.locator("#more summary").click()
        tab.wait_for_selector("#more canvas")
        assert "own/</script><script>" in tab.locator("#more h3").inner_text()
        assert [each.inner_text().strip() for each in tab.locator("#films b").all()] == [
            "before.",
            "after.",
        ]
        until(tab, "document.querySelectorAll('#films video')[1].readyState >= 2")
        tab.locator("#films select").nth(2).select_option("step_000010")
        assert "step_000010" in (tab.locator("#films video").nth(1).get_attribute("src") or "")
        video = tab.locator("#films video").first.element_handle()
        log(run_dir, range(21, 23))
        tab.wait_for_selector("text=iteration 22 of 40")
        assert tab.locator("#curves canvas").count() == 2 and tab.evaluate(
            "v => v.isConnected", video
        ), "the film goes on"
        assert (
            tab.locator("#curves figure")
            .first.locator(".u-legend")
            .inner_text()
            .startswith("iteration")
        )
        assert tab.title() != "injected"
        tab.close()


def test_an_episode(tmp_path: Path, viewed: Viewed, tab: Any) -> None:
    episodes.write(tmp_path / "pushes", video=True)
    with viewed(tmp_path / "pushes") as page:
        tab.goto(f"http://127.0.0.1:{page.port}/")
        tab.locator("th a", has_text="2").click()
        until(tab, "document.querySelector('#frames img').naturalWidth === 48")
        tab.locator("#frames input").fill("5")
        until(tab, "document.querySelector('#frames img').src.endsWith('/episodes/2/0/5.jpg')")
        tab.wait_for_selector("text=frame 5, 0.50 s")
        tab.locator("#curves .u-over").first.hover(position={"x": 1, "y": 20})
        tab.wait_for_selector("text=frame 0, 0.00 s")
        tab.locator("text=Play").click()
        tab.wait_for_selector("text=frame 6, 0.60 s")
        tab.close()


def test_a_sweep_grows(sweep_dir: Path, viewed: Viewed, tab: Any) -> None:
    shutil.move(sweep_dir / "result.json", sweep_dir.parent / "result.json")
    with viewed(sweep_dir) as page:
        tab.goto(f"http://127.0.0.1:{page.port}/")
        tab.wait_for_selector("text=the sweep is not finished")
        assert tab.locator(".heat td").count() == 8
        assert tab.locator("#films video").count() == 2
        shutil.move(sweep_dir.parent / "result.json", sweep_dir / "result.json")
        tab.wait_for_selector("text=2 policies on 4 tasks")
        tab.close()

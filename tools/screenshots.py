"""Take the screenshots of docs/guides/view.md: ``make screenshots`` (needs Chromium)."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

WIDTH = 1000
MOST_BYTES = 200_000
VIEWS = {"view_run": ("run", "", 2900), "view_sweep": ("sweep", "", 1750), "view_episode": ("data", "episodes/2", 1400)}
"""Image -> directory, path in its view, and height in pixels."""


def main(runs: Path, images: Path) -> None:
    """Write the images of run, sweep and data in the folder ``runs``, and of the run's report."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots need Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (folder, path, height) in VIEWS.items():
            with viewed(runs / folder) as url:
                take(browser, url + path, images / f"{name}.webp", height)
        take(browser, (runs / "run" / "report.html").resolve().as_uri(), images / "report.webp", 1750)
        browser.close()


@contextmanager
def viewed(directory: Path) -> Iterator[str]:
    """Run ``rlinf-vla view`` and give its address."""
    command = [sys.executable, "-m", "rlinf_vla.cli.main", "view", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout.readline().removeprefix(f"{directory}: ").partition(" ")[0]
        finally:
            program.terminate()


def take(browser: Any, url: str, path: Path, height: int) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": height})
    page.goto(url)
    page.wait_for_timeout(3000)  # films have begun
    image = Image.open(io.BytesIO(page.screenshot()))
    page.close()
    image.save(path, quality=80)
    if path.stat().st_size > MOST_BYTES:
        sys.exit(f"{path} has {path.stat().st_size} bytes: lower its height")
    print(path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Take the screenshots of docs/images: ``make screenshots`` (needs Chromium)."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte
from PIL import Image
from rich.console import Console
from rich.style import Style
from rich.text import Text

WIDTH = 1000
COLUMNS, LINES = 80, 24
MOST_BYTES = 150_000
VIEWS = {
    "view_run": ("run", "", 2900),
    "view_sweep": ("sweep", "", 1750),
    "view_episode": ("data", "episodes/2", 1400),
}
"""Image -> directory, path in its view, and height in pixels."""
SITE = Path("site")
PROGRAM = (sys.executable, "-m", "rlinf_vla.cli.main")
TERMINALS = {
    "terminal_train": (
        (
            "train",
            "recipe=dialogue_grpo",
            "evaluation.before_and_after=false",
            "run_dir={runs}/live",
            "resume=never",
        ),
        " 20/",
    ),
    "terminal_runs": (("runs",), None),
}
"""Image -> words of a command line, and the text that ends it; None: it ends by itself."""

COLOURS = {name: name for name in ("black", "red", "green", "blue", "magenta", "cyan", "white")} | {
    "brown": "yellow",
    "default": "default",
}
"""pyte's names of colours -> rich's; others are hexadecimal."""


def main(runs: Path, images: Path) -> None:
    """Write the images of run, sweep and data in the folder ``runs``, of the run's report, of the
    documentation site and of a terminal."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots need Chromium: apt-get install chromium")
    shutil.rmtree(runs / "live", ignore_errors=True)
    for name, (words, end) in TERMINALS.items():
        draw(
            terminal([word.format(runs=runs) for word in words], end),
            words[0],
            images / f"{name}.svg",
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take(browser, (SITE / "index.html").resolve().as_uri(), images / "site.webp", 1000)
        for name, (folder, path, height) in VIEWS.items():
            with viewed(runs / folder) as url:
                take(browser, url + path, images / f"{name}.webp", height)
        take(
            browser, (runs / "run" / "report.html").resolve().as_uri(), images / "report.webp", 1750
        )
        browser.close()


@contextmanager
def viewed(directory: Path) -> Iterator[str]:
    """Run ``rlinf-vla view`` and give its address."""
    command = [*PROGRAM, "view", str(directory), "--port", "0"]
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
    check_size(path)


def check_size(path: Path) -> None:
    if path.stat().st_size > MOST_BYTES:
        sys.exit(f"{path} has {path.stat().st_size} bytes: lower its height")
    print(path)


def terminal(words: list[str], end: str | None) -> pyte.Screen:
    """Run the program in a terminal until ``end`` is on it, and return what the terminal shows."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    ours, its = pty.openpty()
    environment = os.environ | {
        "COLUMNS": str(COLUMNS),
        "LINES": str(LINES),
        "TERM": "xterm-256color",
    }
    with subprocess.Popen(
        [*PROGRAM, *words], stdin=its, stdout=its, stderr=subprocess.DEVNULL, env=environment
    ) as program:
        os.close(its)
        try:
            while end is None or not any(end in line for line in screen.display):
                stream.feed(os.read(ours, 65536))
        except OSError:  # the program has ended
            pass
        finally:
            program.terminate()
            os.close(ours)
    return screen


def draw(screen: pyte.Screen, verb: str, path: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    rows = [number for number, line in enumerate(screen.display) if line.strip()]
    for number in range(rows[0], rows[-1] + 1):
        line = Text()
        for column in range(COLUMNS):
            cell = screen.buffer[number][column]
            line.append(cell.data, Style(color=COLOURS.get(cell.fg, f"#{cell.fg}"), bold=cell.bold))
        console.print(line, no_wrap=True, crop=True, highlight=False)
    console.save_svg(str(path), title=f"rlinf-vla {verb}")
    check_size(path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

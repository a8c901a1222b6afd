"""Fill the templates of the HTML reports: self-contained pages, light or dark as the system is."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_vla.config.recipe import flat
from rlinf_vla.core.io import write_text

VIDEO_BYTES = 1_900_000
"""Limit on all videos together, before base64 adds a third; keeps the page under 3 MB."""


class Video(NamedTuple):
    """A video to embed. of: what it shows, first in its caption. source: URL with its content."""

    of: str
    title: str
    source: str


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Write ``templates/<template>`` filled with ``content`` atomically to ``path``; return it."""
    write_text(path, render(template, **content), errors="replace")
    return path


def render(template: str, folders: Sequence[Path] = (), **content: Any) -> str:
    """Return a template filled with ``content``; it is looked for in ``folders``, too."""
    import jinja2  # here: only the end of a run needs it

    loader = jinja2.FileSystemLoader([Path(__file__).parent / "templates", *folders])
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters["leaves"] = _leaves
    pages.policies["json.dumps_kwargs"] = {}  # keys stay in their order
    return pages.get_template(template).render(content)


def read_videos(
    groups: Iterable[Sequence[tuple[Path, str, str]]],
) -> tuple[list[list[Video]], int, list[str]]:
    """Read groups of videos while there is room: (path, what it shows, title if it has none).

    Returns the groups, the number of those without room, and what is wrong with unreadable videos.
    """
    room = VIDEO_BYTES
    left_out = 0
    result = list[list[Video]]()
    problems = list[str]()
    for group in groups:
        if sum(path.stat().st_size for path, *_ in group if path.exists()) > room:
            left_out += 1
            continue
        videos = []
        for path, of, otherwise in group:
            try:
                content = base64.b64encode(path.read_bytes()).decode("ascii")
                videos.append(
                    Video(of, title_of(path) or otherwise, f"data:video/mp4;base64,{content}")
                )
                room -= path.stat().st_size
            except (
                Exception
            ) as error:  # a partial or missing file must not prevent the rest of the page
                problems.append(f"videos/{path.name} could not be read: {error}")
        result += [videos] if videos else []
    return result, left_out, problems


def title_of(path: Path) -> str:
    """Return the title in a video's file, empty if it has none. Raises if it is no video."""
    import av  # only here: training needs it for no other purpose

    with av.open(
        str(path), format="mp4"
    ) as container:  # a playlist could name other files and machines
        if not container.streams.video:
            raise ValueError("no video in it")
        return container.metadata.get("title", "")


def machine_line(environment: dict[str, Any]) -> str:
    """Describe the machine of an ``environment.json`` in a line, empty if nothing is known."""
    gpus = Counter(str(gpu).partition(",")[0] for gpu in environment.get("gpus") or [])
    parts = [f"{count} × {name}" if count > 1 else name for name, count in gpus.items()]
    parts += [str(environment["cpu"])] if environment.get("cpu") else []
    parts += [f"{environment['cores']} cores"] if environment.get("cores") else []
    parts += [f"{environment['memory_gb']:.0f} GB"] if environment.get("memory_gb") else []
    return ", ".join(parts)


def _leaves(node: Any) -> list[tuple[str, str]]:
    """Return (dotted key, value) of every leaf; a value other than text is shown as JSON."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in flat(node).items()
    ]

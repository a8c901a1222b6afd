"""Add to the documentation site what is not a file below ``docs/``; a hook of mkdocs (mkdocs.yml).

* A link from a page to a file of the repository, such as ``../README.md`` or a source file, works
  on a forge. For the site, the file becomes a page under ``repository/``. A link to a file that
  does not exist ends the build.
* ``results/index.md`` lists the pages of measurements.
* ``reference/configuration/`` documents every key of a recipe (``configuration.py``).
* The pages of the API are made from ``build/sources``, where ``features/`` is in its package.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import configuration
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
DOCS = "docs"
COPIES = "repository"
"""Where the copies of the repository's files are on the site."""
RESULTS = "results"
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Files of the repository that are pages of the navigation."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[/#<])([^)#\s]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^(`{3,}).*?^\1`*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".sh": "bash",
    ".html": "html",
    ".xml": "xml",
}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_startup(command: str, dirty: bool) -> None:
    """Link the sources of the package."""
    sources = ROOT / "build" / "sources" / "rlinf_vla"
    sources.mkdir(parents=True, exist_ok=True)
    for path in (*(ROOT / "rlinf_vla").iterdir(), ROOT / "features"):
        link = sources / path.name
        if not link.is_symlink():
            link.symlink_to(path)


def on_config(config: Any) -> Any:
    """List the pages of measurements in the navigation."""
    pages = [f"{RESULTS}/{path.name}" for path in sorted((ROOT / DOCS / RESULTS).glob("*.md"))]
    for section in config.nav:
        if "Results" in section:
            section["Results"] = [f"{RESULTS}/index.md", *pages]
        if "Reference" in section:
            section["Reference"] += [
                {
                    "Configuration": [
                        f"{configuration.FOLDER}/{name}" for name in configuration.pages()
                    ]
                }
            ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, text in configuration.pages().items():
        files.append(File.generated(config, f"{configuration.FOLDER}/{name}", content=text))
    files.append(File.generated(config, f"{RESULTS}/index.md", content=results_index()))
    left = [
        *ALWAYS,
        *(
            target
            for page in list(files.documentation_pages())
            for target in outside(page.src_uri, page.content_string)
        ),
    ]
    added: set[str] = set()
    while left:
        if (target := left.pop()) in added:
            continue
        added.add(target)
        text = copy_of(target)
        level = InclusionLevel.INCLUDED if target in ALWAYS else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, address(target), content=text, inclusion=level))
        if target.endswith(".md"):
            left += outside(target, text, of_repository=True)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links out of ``docs/`` into links to the copies."""
    source = page.file.src_uri
    at = (
        source.removeprefix(f"{COPIES}/") if source.startswith(f"{COPIES}/") else f"{DOCS}/{source}"
    )

    def moved(link: re.Match[str]) -> str:
        target = resolved(at, link[1])
        uri = target.removeprefix(f"{DOCS}/") if target.startswith(f"{DOCS}/") else address(target)
        if (ROOT / target).is_dir() and target.startswith(f"{DOCS}/"):
            uri = f"{uri}/index.md"
        return posixpath.relpath(uri, posixpath.dirname(source)) + (link[2] or "")

    return outside_code(LINK, moved, markdown)


def outside_code(pattern: re.Pattern[str], change: Any, text: str) -> str:
    """Return ``text`` with ``change`` made of each match of ``pattern`` that is not in code."""
    parts = []
    start = 0
    for code in CODE.finditer(text):
        parts += [pattern.sub(change, text[start : code.start()]), code[0]]
        start = code.end()
    return "".join([*parts, pattern.sub(change, text[start:])])


def resolved(source: str, link: str) -> str:
    """Return the path below the repository of ``link`` in the file ``source``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def outside(page: str, text: str, of_repository: bool = False) -> Iterator[str]:
    """Yield the files outside ``docs/`` to which a page links.

    Raises PluginError for a link to nothing."""
    source = page if of_repository else f"{DOCS}/{page}"
    targets: list[str] = []

    def seen(link: re.Match[str]) -> str:
        targets.append(resolved(source, link[1]))
        return link[0]

    outside_code(LINK, seen, text)
    for target in targets:
        if target.startswith(f"{DOCS}/"):
            continue
        if target.startswith("..") or not (ROOT / target).exists():
            raise PluginError(f"{source} links to {target}, which does not exist")
        yield target


def address(target: str) -> str:
    """Return the page of the site that shows a file or folder of the repository."""
    return f"{COPIES}/{target}" if target.endswith(".md") else f"{COPIES}/{target.rstrip('/')}.md"


def copy_of(target: str) -> str:
    path = ROOT / target
    if target.endswith(".md"):
        return path.read_text()
    title = f"{UNSEARCHED}# `{target}`\n\n"
    if path.is_dir():
        names = sorted(
            child.name + "/" * child.is_dir()
            for child in path.iterdir()
            if not child.name.startswith((".", "__pycache__"))
        )
        return title + "".join(f"* `{name}`\n" for name in names)
    return f"{title}```` {{ .{LANGUAGES.get(path.suffix, 'text')} linenums=1 }}\n{path.read_text().rstrip()}\n````\n"


def results_index() -> str:
    """Return a table of the pages of measurements: title and first sentence."""
    rows = []
    for path in sorted((ROOT / DOCS / RESULTS).glob("*.md")):
        title, _, rest = path.read_text().partition("\n")
        sentence = re.split(r"(?<=[.:])\s", rest.strip().replace("\n", " "), maxsplit=1)[0].rstrip(
            ":"
        )
        rows.append(
            f"| [{title.removeprefix('# ')}]({path.name}) | {sentence if not sentence.startswith(('|', '#', '`')) else ''} |"
        )
    head = "# Results\n\nMeasurements, each with its command, machine and seeds.\n\n| page | about |\n|---|---|\n"
    return head + "\n".join(rows) + "\n"

"""Help texts of the command line: one form for all verbs, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from rlinf_vla.cli.verbs import verbs

WIDTH = 80
EVERY = (
    "--log-level LEVEL",
    "debug, info, warning or error: what is reported on stderr, by libraries too",
)
"""An option of all verbs."""


def help_of(verb: str) -> str:
    """Return purpose, usage, options and three examples of a verb."""
    described = verbs()[verb]
    page = described.help
    command = f"rlinf-vla {verb}"
    lines = [*textwrap.wrap(f"{command}: {described.purpose}", WIDTH), "", "Usage:"]
    lines += [f"  {command} {usage}".rstrip() for usage in page.usage]
    lines += ["", "Options:", *_pairs(dict((*page.options, EVERY)))]
    lines += ["", "Examples:", *(f"  {command} {example}".rstrip() for example in page.examples)]
    return "\n".join([*lines, *(["", *textwrap.wrap(page.note, WIDTH)] if page.note else [])])


def overview(version: str) -> str:
    """Return the help of the program: its verbs, each with its purpose, by use."""
    lines = [
        f"rlinf-vla {version}: fine-tune vision-language-action policies with",
        "reinforcement learning",
        "",
    ]
    lines += ["Usage: rlinf-vla VERB [recipe=NAME|run=RUN] [KEY=VALUE ...] [OPTIONS]"]
    known = verbs()
    for use in dict.fromkeys(verb.use for verb in known.values()):
        lines += [
            "",
            f"{use}:",
            *_pairs({name: verb.purpose for name, verb in known.items() if verb.use == use}, 11),
        ]
    return "\n".join([*lines, "", "rlinf-vla VERB --help: usage, options and examples of a verb."])


def _pairs(pairs: Mapping[str, str], width: int | None = None) -> list[str]:
    """Return two columns, the second wrapped."""
    width = width or max(map(len, pairs)) + 1
    lines = []
    for name, text in pairs.items():
        first, *others = textwrap.wrap(text, WIDTH - width - 3)
        lines += [f"  {name:{width}} {first}", *(f"  {'':{width}} {other}" for other in others)]
    return lines

"""The documentation: every key of a recipe has a meaning, every command in a page is one that the program accepts, pages are short."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.cli.verbs import verbs
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime import recipes

VERBS = verbs()

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GENERATED = {"libero_rewordings.md", "reproduction.md"}
"""Pages that a tool writes: tables, as long as what they list."""
WRITTEN = [page for page in PAGES if page.name not in GENERATED]


# the keys


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def configuration() -> ModuleType:
    return tool("configuration")


def test_every_key_of_a_recipe_is_in_the_reference(configuration: ModuleType) -> None:
    found = {key.path for keys in configuration.all_keys().values() for key in keys}
    assert found == set(recipes.keys())


def test_every_key_has_a_meaning(configuration: ModuleType) -> None:
    assert [
        f"{key.choice} {key.path}"
        for keys in configuration.all_keys().values()
        for key in keys
        if not key.meaning
    ] == []


def test_a_page_of_the_reference(configuration: ModuleType) -> None:
    text = configuration.pages()["algorithm.md"]
    entry = text[text.index("{ #ppo.algorithm.gae_lambda }") :]
    entry = entry[: entry.index("###")]
    assert (
        "Value: a number from 0 to 1. Default: `0.95`." in entry
        and "Decay of generalised advantage estimation" in entry
    )
    assert (
        "recipe=maniskill_grpo"
        not in text[text.index("#ppo.algorithm.epochs") : text.index("#sac.algorithm.name")]
    ), "it chooses GRPO"
    cluster = configuration.pages()["cluster.md"]
    assert "[gpu](../../gpu.md)" in cluster and "Taken only from the command line" in cluster


# the commands


def blocks(text: str) -> Iterator[str]:
    """Code blocks without a language or in a shell's."""
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        if found[2] in ("", "bash", "sh"):
            yield found[3]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command ``rlinf-vla ...`` in the blocks."""
    for block in blocks(text):
        for line in block.replace("\\\n", " ").split("\n"):
            if line.strip().startswith("rlinf-vla "):
                yield shlex.split(line.strip().replace("$", ""), comments=True)[1:]


PLACES = {"run", "plan", "operator", "episode"}
"""Keys of single verbs, which are in no recipe."""


@functools.cache
def known() -> set[str]:
    return {*compose.CHOICES, *PLACES, *recipes.keys()}


def check(words: list[str]) -> None:
    """Raises UserError, or fails, if the program would refuse the command before it begins."""
    verb, *rest = words
    if verb == "VERB":
        return
    assert verb in VERBS, verb
    if verb == "bench":
        assert rest and rest[0] in VERBS[verb].words, rest
        verb = f"bench_{rest.pop(0)}"
    elif verb == "robot":
        assert rest.pop(0) in VERBS["robot"].words, words
    elif verb not in ("train", "eval", "export", "serve", "record", "plan"):
        return
    overrides = [word for word in rest if re.match(r"[+~]*[\w./]+=", word)]
    for each in overrides:
        key = re.split(r"=", each)[0].lstrip("+~")
        assert (
            key in known()
            or any(key.startswith(f"{node}.") for node in known())
            or verb.startswith("bench_")
        ), f"{key} is no key"
    given = dict(each.split("=", 1) for each in overrides)
    ours = re.fullmatch(r"[a-z0-9_]+", given.get("recipe", "")) and not {
        "...",
        "…",
        "--config-dir",
    } & {*rest}
    chosen = all(re.fullmatch(r"[a-z0-9_]+", given.get(group, "none")) for group in compose.CHOICES)
    if not ours or not chosen or verb.startswith("bench_") or given["recipe"].startswith("my_"):
        return  # of a reader's own
    only = [each for each in overrides if each.split("=")[0] not in PLACES]
    try:
        recipes.read(compose.load("train", only))
    except UserError as error:
        if "could not be converted" not in str(error):
            raise
        recipes.read(
            compose.load("train", [each for each in only if not re.search(r"=[A-Z_]+$", each)])
        )  # a number's place, as LIMIT


def test_a_wrong_command_is_found() -> None:
    for line in (
        "trian recipe=maniskill_ppo",
        "train recipe=maniskill_ppo algorithm.gama=1",
        "bench everything",
        "robot dance robot=franka_sim",
    ):
        with pytest.raises((AssertionError, UserError)):
            check(line.split())
    with pytest.raises(UserError):
        check(["train", "recipe=maniskill_ppo", "env.task=7"])
    check(["train", "recipe=NAME", "--dry-run"])


def test_commands_are_found_in_blocks() -> None:
    text = "`rlinf-vla no`\n```\nrlinf-vla train a=1 \\\n   b=2  # why\nls\n```\n```yaml\nrlinf-vla no\n```\n"
    assert list(commands(text)) == [["train", "a=1", "b=2"]]


@pytest.mark.parametrize(
    "pages",
    [[ROOT / "README.md"], pytest.param(PAGES, marks=pytest.mark.slow)],
    ids=["README", "all"],
)
def test_every_command_of_a_page_is_accepted(pages: list[Path]) -> None:
    refused = []
    for page in pages:
        for words in commands(page.read_text()):
            try:
                check(words)
            except (AssertionError, UserError) as error:
                refused.append(f"{page.relative_to(ROOT)}: rlinf-vla {' '.join(words)}: {error}")
    assert refused == []


# the sentences

HOME_MADE = re.compile(
    r"\b(foresight|mend(s|ed)?|in good order|goes on bit for bit|its mend|a person shown|rooms of their own)\b",
    re.IGNORECASE,
)
"""Expressions that readers of this field stumbled over; CONTRIBUTING.md gives the usual ones."""
LONGEST, MEAN = 45, 23
"""Words in a sentence, and in the mean sentence of a page."""


def paragraphs(text: str) -> Iterator[str]:
    """Prose without code blocks, tables, headings and comments; a list's item counts as one."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *([#|!<].*)?$", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n{2,}|\n(?= *(?:[-*]|\d+\.) )", text):
        if words := " ".join(block.split()):
            yield re.sub(r"`[^`]*`", "CODE", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words))


def sentences(text: str) -> Iterator[str]:
    for paragraph in paragraphs(text):
        yield from re.split(r"(?<=[.!?])[*”\"]* +", paragraph)


def length(sentence: str) -> int:
    return sum(bool(re.search(r"[^\W\d]", word)) for word in sentence.split())


def test_sentences_are_counted() -> None:
    text = "# Not this one\nOne two `code of three`\n[four](no/words). Five.\n\n```\nnot this\n```\n| nor | this |\n\n- six 7\n- eight\n"
    assert [(each, length(each)) for each in sentences(text)] == [
        ("One two CODE four.", 4),
        ("Five.", 1),
        ("- six 7", 1),
        ("- eight", 1),
    ]


def faults(page: Path) -> Iterator[str]:
    found = list(sentences(page.read_text()))
    yield from (f"more than {LONGEST} words: {each}" for each in found if length(each) > LONGEST)
    if sum(map(length, found)) > MEAN * max(1, len(found)):
        yield f"the mean sentence has more than {MEAN} words"
    if page.name != "CONTRIBUTING.md":  # it says what not to write
        yield from (f"a home-made expression: {each}" for each in found if HOME_MADE.search(each))


def test_pages_are_readable() -> None:
    assert [
        f"{page.relative_to(ROOT)}: {fault}" for page in WRITTEN for fault in faults(page)
    ] == []


def test_a_page_that_is_hard_to_read_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(" ".join(["word"] * (LONGEST + 1)) + ".")
    assert [fault.partition(":")[0] for fault in faults(page)] == [
        f"more than {LONGEST} words",
        f"the mean sentence has more than {MEAN} words",
    ]
    page.write_text("The run is in good order.")
    assert [fault.partition(":")[0] for fault in faults(page)] == ["a home-made expression"]


# the pages


def test_a_page_has_at_most_250_lines() -> None:
    assert [
        str(page.relative_to(ROOT)) for page in WRITTEN if len(page.read_text().splitlines()) > 250
    ] == []

"""Recipes that a stranger wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlinf_vla.core.io import read_yaml

LAUGHS = (
    "a0: &a0 [x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
    + "name: x\n"
)
HOSTILE = {
    "aliases": (LAUGHS, r"line 2 has the alias \*a0, which no saved recipe has"),
    "an alias of itself": ("name: &a [*a]\n", "has the alias"),
    "a merged alias": ("a: &a {b: 1}\nname:\n  <<: *a\n", "has the alias"),
    "lists in lists": ("name: " + "[" * 900, "nested more than 32 deep"),
    "more lists in lists": ("name: " + "[" * 20_000, "nested more than 32 deep|flow level"),
    "maps in maps": ("name: " + "{a: " * 20_000, "nested more than 32 deep"),
    "a large file": ("name: x\n" + "# a comment\n" * 30_000, "has more than 262,144 bytes"),
    "code": (
        "name: !!python/object/apply:os.system ['true']\n",
        "could not determine a constructor",
    ),
    "a broken interpolation": ("name: ${a\n", "."),
    "half a file": ("name: [1, 2\nmodel: {", "."),
    "a number of many digits": (f"name: {'9' * 5000}\n", "."),
    "no text": ("name: \0", "."),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_recipe_is_one_line(tmp_path: Path, kind: str) -> None:
    text, message = HOSTILE[kind]
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_yaml(tmp_path / "recipe.yaml")
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match="it is no file"):
        read_yaml(tmp_path / "recipe.yaml")


def test_what_was_saved_is_read_and_interpolations_are_not_resolved(tmp_path: Path) -> None:
    values = {
        "name": "${oc.env:HOME}",
        "model": {"lora": {"rank": 8}, "modules": ["a", "b"]},
        "gamma": 0.99,
        "none": None,
    }
    (tmp_path / "recipe.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    assert read_yaml(tmp_path / "recipe.yaml") == values

from __future__ import annotations

from pathlib import Path

import pytest

LAST = "test_everything_was_compared"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """It checks what the other tests of its module have compared, with the same parameter of the
    module's fixture, so it is their last in any order."""
    modules = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}

    def place(item: pytest.Item) -> tuple[int, str, bool]:
        callspec = getattr(item, "callspec", None)
        return (
            modules[item.path],
            str(callspec.params.get("fixture")) if callspec else "None",
            item.name.startswith(LAST),
        )

    here = [
        number
        for number, item in enumerate(items)
        if item.path.is_relative_to(Path(__file__).parent)
    ]
    for number, item in zip(
        here, sorted((items[number] for number in here), key=place), strict=True
    ):
        items[number] = item

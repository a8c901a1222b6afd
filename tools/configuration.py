"""Stub."""

FOLDER = "reference/configuration"


def pages() -> dict[str, str]:
    return {}

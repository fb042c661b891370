"""Names and folders of adapters, as options give them."""

from __future__ import annotations


def adapter_folders(given: list[str]) -> dict[str, str]:
    """Return folders by name, from texts NAME=FOLDER."""
    from tutti.errors import InputError

    folders: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise InputError(f"--adapter is '{text}'; write NAME=FOLDER")
        if name in folders:
            raise InputError(f"--adapter: two are called '{name}'")
        folders[name] = folder
    return folders

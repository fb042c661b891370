"""The files beside a model's weights: config, tokenizer. Links that lead outside are not followed.

A folder of the Hugging Face cache consists of links into its neighbour `blobs`, which is part of
it. Any other link that leads out of a folder would bring a file along that nobody meant to share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def plain_paths(folder: Path) -> Iterator[Path]:
    """Yield every file of a folder that is neither hidden nor behind a link that leads outside."""
    for path in _visible(folder):
        if path.is_file() and is_inside(path, folder):
            yield path


def outside_links(folder: Path) -> list[str]:
    """Return the names that are passed over because they lead outside."""
    return [
        path.relative_to(folder).as_posix()
        for path in _visible(folder)
        if path.is_symlink() and path.exists() and not is_inside(path, folder)
    ]


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether what a path leads to is part of a folder."""
    own, target = folder.resolve(), path.resolve()
    if target.is_relative_to(own):
        return True
    return own.parent.name == "snapshots" and target.is_relative_to(own.parent.parent / "blobs")


def _visible(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path

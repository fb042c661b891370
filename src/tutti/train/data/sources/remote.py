"""Sources at URLs: their files are brought to the cache once, and read from there.

Tokenising reads every byte and keeps tokens here anyway, so a file is fetched whole: in ranges, by
several connections, going on where an earlier attempt ended. A file that changed at its URL is
fetched anew. Of several processes of a node one fetches, the others wait.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tutti.errors import InputError
from tutti.files import fingerprint, unwritable
from tutti.storage.ranged import fetch
from tutti.storage.url import RemoteFile, RemoteFolder, is_url, split_url
from tutti.train.data.config import SourceConfig
from tutti.train.data.sources.find import ENDINGS

Progress = Callable[[str, float, float], None]  # what is being done, how much of it, of how much


def remote_files(source: SourceConfig) -> tuple[RemoteFolder, list[RemoteFile]]:
    """Return the files that a source's URL names, in a fixed order; nothing of them is read."""
    url, pattern = split_url(source.path)
    folder = RemoteFolder(url)
    if re.search(r"[*?\[]", pattern):
        files = _matching(folder, pattern)
    else:
        # a server shows a folder as a page: only a known ending tells that it is a file
        one = folder.file(pattern) if pattern else None
        inside = (
            [] if one and Path(pattern).suffix in ENDINGS else _matching(folder, f"{pattern}/*")
        )
        files = inside or ([one] if one else [])
    if not files:
        raise InputError(f"{source.path}: no file is there, or none matches")
    return folder, files


def _matching(folder: RemoteFolder, pattern: str) -> list[RemoteFile]:
    try:
        names = folder.matching(pattern.lstrip("/"))
    except InputError:  # no such folder
        return []
    seen = (name for name in names if not Path(name).name.startswith("."))
    return [file for name in seen if (file := folder.file(name)) is not None]


def brought_here(source: SourceConfig, cache: Path, progress: Progress) -> SourceConfig:
    """Return a source whose files are on this disk; one that is here already as it is."""
    if not is_url(source.path):
        return source
    folder, files = remote_files(source)
    key = fingerprint([folder.url, [(file.name, file.identity) for file in files]])
    place = cache / "urls" / key
    whole = sum(file.num_bytes for file in files)
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise unwritable(place, error) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before = 0
        for file in files:
            target = place / file.name
            if not target.is_file():

                def shown(done: int, _: int, before: int = before) -> None:
                    progress(f"fetching {source.name}", before + done, whole)

                fetch(folder, file, target, report=shown)
            before += file.num_bytes
    finally:
        os.close(handle)
    only = place / files[0].name
    return replace(source, path=str(only if len(files) == 1 else place))

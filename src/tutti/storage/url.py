"""Files at URLs, through fsspec: `s3://bucket/run`, `https://host/data`, `file:///mnt/run`.

A `RemoteFolder` is a URL under which names are read and written. Whatever an fsspec back end
raises becomes one line that names the URL. A small file that is written whole is there in its old
or its new form, whenever the process ends: object stores put objects so, and on disks it is
renamed into place.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tutti.errors import InputError, TuttiError
from tutti.optional_imports import library

T = TypeVar("T")

EXTRA = "storage"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::[^/]*)?://")
_ATTEMPTS = 4
_PROBE = ".tutti-probe"
_FULL_OR_CLOSED = (errno.EACCES, errno.EFBIG, errno.ENOSPC, errno.EROFS, errno.EDQUOT)
_PAUSE_S = 0.2  # before the second attempt; then twice as long each time


class RemoteError(TuttiError):
    """Storage behind a URL that did not answer, or not as it should."""


class MissingError(InputError):
    """A file that is not there, as the server itself says."""


def is_url(text: str) -> bool:
    """Tell whether a text names a file elsewhere rather than a path."""
    return _URL.match(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file at a URL, as it is now."""

    name: str
    num_bytes: int
    identity: str  # changes when the content does, as far as the server says


class RemoteFolder:
    """All that lies under a URL."""

    def __init__(self, url: str) -> None:
        """Open a URL; nothing is asked of the server yet."""
        self.url = url.rstrip("/")
        fsspec = library("fsspec", url, EXTRA)
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise InputError(f"{url}: {_first_line(error)}") from None
        except (ValueError, TypeError) as error:
            known = "s3, gs, az, http, https, file"
            raise InputError(
                f"{url}: cannot be opened ({_first_line(error)}); kinds of URL: {known}, …"
            ) from None
        protocol = self._files.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_disk = bool(protocols & {"file", "local"})
        self._is_http = bool(protocols & {"http", "https"})

    def path(self, name: str) -> str:
        """Return the back end's own name of a file."""
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    # --- looking ---------------------------------------------------------------------------

    def file(self, name: str) -> RemoteFile | None:
        """Return what is known of a file; None where there is none."""

        def ask() -> RemoteFile | None:
            self._files.invalidate_cache()
            try:
                info = self._files.info(self.path(name))
            except FileNotFoundError:
                if self._is_http:  # said of a server that is down, too: a read tells them apart
                    self._files.cat_file(self.path(name), 0, 1)
                    raise OSError("the server says nothing of it") from None
                return None
            if info.get("type") == "directory":
                return None
            size = info.get("size")
            if size is None:
                raise RemoteError(
                    f"{self.url}/{name}: the server does not say how large it is; it is not read"
                )
            facts = [info.get(key) for key in ("ETag", "etag", "md5", "mtime", "LastModified")]
            identity = "|".join(str(fact) for fact in [size, *facts] if fact is not None)
            return RemoteFile(name=name, num_bytes=int(size), identity=identity)

        try:
            return self._tried(name, ask)
        except MissingError:
            return None

    def matching(self, pattern: str) -> list[str]:
        """Return the names of all files that match, in a fixed order."""

        def ask() -> list[str]:
            self._files.invalidate_cache()
            listing = self._files.glob(self.path(pattern), detail=True)
            root = self._root.rstrip("/")
            files = [path for path, facts in listing.items() if facts.get("type") != "directory"]
            return sorted(path.removeprefix(root).lstrip("/") for path in files)

        return self._tried(pattern, ask)

    def folders(self) -> list[str]:
        """Return the names of the folders right under the URL; none where it cannot be listed."""
        try:
            self._files.invalidate_cache()
            listing = self._files.ls(self._root, detail=True)
        except Exception:  # a server that lists nothing is no error here
            return []
        return sorted(
            str(facts["name"]).rstrip("/").rpartition("/")[2]
            for facts in listing
            if facts.get("type") == "directory"
        )

    # --- reading ---------------------------------------------------------------------------

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a range of a file, or all of it."""
        stop = None if length is None else start + length

        def ask() -> bytes:
            if length == 0:
                return b""
            first = None if length is None else start
            data: bytes = self._files.cat_file(self.path(name), first, stop)
            if length is not None and len(data) > length and self._is_http:
                data = data[start:stop]  # a server that knows no ranges sent everything
            if length is not None and len(data) != length:
                raise OSError(f"{len(data)} of {length} bytes came")
            return data

        return self._tried(name, ask)

    def read_if_there(self, name: str) -> bytes | None:
        """Return a small file; None where there is none."""
        try:
            return self.read(name)
        except MissingError:
            return None

    # --- writing ---------------------------------------------------------------------------

    def require_writable(self) -> None:
        """Refuse a URL that nothing can be written to, before hours depend on it."""
        try:
            self.write(_PROBE, b"written to see whether it can be\n")
        except TuttiError as error:
            raise InputError(f"{self.url}: cannot be written to ({error})") from None

    def upload(self, source: Path, name: str) -> int:
        """Copy a file there; return its bytes when they are all there."""
        size = source.stat().st_size

        def put() -> None:
            if self._is_disk:
                self._onto_disk(name, lambda fresh: self._files.put_file(str(source), fresh))
                return
            options = {"method": "put"} if self._is_http else {}
            if not self._is_http:
                self._files.makedirs(self._parent(name), exist_ok=True)
            self._files.put_file(str(source), self.path(name), **options)

        self._tried(name, put)
        stored = self.file(name)
        if stored is None or stored.num_bytes != size:
            there = "nothing is" if stored is None else f"{stored.num_bytes} of {size} bytes are"
            raise RemoteError(f"{self.url}/{name}: was sent, but {there} there")
        return size

    def write(self, name: str, content: bytes) -> None:
        """Write a small file as a whole."""

        def put() -> None:
            if self._is_disk:
                self._onto_disk(name, lambda fresh: self._files.pipe_file(fresh, content))
                return
            if not self._is_http:
                self._files.makedirs(self._parent(name), exist_ok=True)
            self._files.pipe_file(self.path(name), content)

        self._tried(name, put)

    def _onto_disk(self, name: str, put: Callable[[str], None]) -> None:
        path = Path(self.path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        put(str(fresh))
        with fresh.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(fresh, path)

    def _parent(self, name: str) -> str:
        return self.path(name).rpartition("/")[0]

    def remove_folder(self, name: str) -> bool:
        """Delete all under a name; tell whether the server let us."""
        try:
            self._files.rm(self.path(name), recursive=True)
        except Exception:  # what is left there is only room, and named by nobody
            return False
        return True

    # --- what goes wrong -------------------------------------------------------------------

    def _tried(self, name: str, work: Callable[[], T]) -> T:
        """Do something, again after a pause where the network may be at fault."""
        pauses = [_PAUSE_S * 2**n for n in range(_ATTEMPTS - 1)]
        for pause in [*pauses, None]:
            try:
                return work()
            except TuttiError:
                raise
            except FileNotFoundError:
                raise MissingError(f"{self.url}/{name}: no such file") from None
            except PermissionError as error:
                raise InputError(
                    f"{self.url}/{name}: access is denied ({_first_line(error)})"
                ) from None
            except Exception as error:  # back ends have errors of their own
                if pause is None or _is_final(error):
                    raise RemoteError(f"{self.url}/{name}: failed ({_first_line(error)})") from None
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def split_url(url: str) -> tuple[str, str]:
    """Part a URL into the folder and the pattern of names behind it."""
    head, _, rest = url.partition("://")
    pieces = rest.split("/")
    magic = next((i for i, piece in enumerate(pieces) if re.search(r"[*?\[]", piece)), None)
    at = len(pieces) - 1 if magic is None else magic
    at = max(at, 1)
    return f"{head}://{'/'.join(pieces[:at])}", "/".join(pieces[at:])


def _is_final(error: Exception) -> bool:
    """Tell whether trying again is of no use."""
    if isinstance(error, NotImplementedError):
        return True
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 429)
    return isinstance(error, OSError) and error.errno in _FULL_OR_CLOSED


def _first_line(error: Exception) -> str:
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    status = getattr(error, "status", None)
    lines = (f"{status} {text}" if isinstance(status, int) else text).splitlines()
    return lines[0].strip() if lines and lines[0].strip() else type(error).__name__
